"""The tokenizer of a Hugging Face folder, as llama.cpp reads it from a GGUF file.

llama.cpp has two tokenizers that Llama models use: `llama`, SentencePiece's BPE by scores, and
`gpt2`, byte-level BPE by merges. It cuts a text for the second one by patterns of its own, which a
file can only name (`tokenizer.ggml.pre`). So tokenizers that it has no name for are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.models.text.tokenizer import load_tokenizer
from decoding.models.text.tokenizer_repair import (
    MODEL,
    PROBES,
    Difference,
    differences,
    encoder,
    probes_of,
)

# token types, which GGUF shares with SentencePiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> `pre_tokenizer` of tokenizer.json, and its `ignore_merges`
_PRE_TOKENIZERS: dict[str, tuple[dict[str, Any], bool]] = {
    "gpt-2": (_BYTES, False),
    "smollm": (
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES],
        },
        False,
    ),
    "llama-bpe": (
        {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _LLAMA3_PATTERN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {**_BYTES, "use_regex": False},
            ],
        },
        True,
    ),
}


@dataclass(frozen=True)
class Vocabulary:
    """The fields of a GGUF file's tokenizer, and how it differs from the folder's."""

    model: str  # llama | gpt2
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None  # of llama
    merges: list[str] | None  # of gpt2
    space_prefix: bool  # llama.cpp puts a blank before a text
    tokenizer: PreTrainedTokenizerBase
    difference: Difference | None = None  # in a text that continues after a special token


def read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """Return the tokenizer of a folder in GGUF's form.

    vocab_size: the model's; ids without a token become unused ones. Raises UserError for a
    tokenizer that llama.cpp does not have.
    """
    tokenizer = load_tokenizer(folder)
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        raise _refusal(folder, f"it is a {type(tokenizer).__name__}, not a fast tokenizer")
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.lstrip or token.rstrip or token.single_word:
            raise _refusal(folder, f"token {i}, {token.content!r}, takes the blanks around it")
    settings = json.loads(core.to_str())
    if settings["model"]["type"] != "BPE":
        raise _refusal(folder, f"its model is {settings['model']['type']}")
    if settings["model"].get("byte_fallback"):
        return _sentence_pieces(folder, tokenizer, vocab_size)
    return _byte_level(folder, tokenizer, settings, vocab_size)


def _refusal(folder: Path, found: str) -> UserError:
    return UserError(
        f"{folder}: its tokenizer cannot be written to a GGUF file: {found}. llama.cpp has "
        f"SentencePiece BPE with its tokenizer.model, and byte-level BPE cut as by "
        f"{', '.join(_PRE_TOKENIZERS)}. Serve the model with another engine."
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the text and type of every id, types of learned tokens being NORMAL."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, i in tokenizer.get_vocab().items():
        tokens[i], types[i] = token, NORMAL
    for i, added in tokenizer.added_tokens_decoder.items():
        tokens[i], types[i] = added.content, CONTROL if added.special else USER_DEFINED
    return tokens, types


def _byte_level(
    folder: Path, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any], vocab_size: int
) -> Vocabulary:
    """Return the fields of a byte-level tokenizer."""
    if settings["normalizer"] is not None:
        raise _refusal(folder, f"it normalizes texts ({settings['normalizer']['type']})")
    found = _without_offsets(settings["pre_tokenizer"]), settings["model"]["ignore_merges"]
    names = [name for name, known in _PRE_TOKENIZERS.items() if known == found]
    if not names:
        raise _refusal(
            folder,
            f"its pre_tokenizer is {json.dumps(found[0])} with ignore_merges {found[1]}",
        )
    tokens, types = _tokens(tokenizer, vocab_size)
    merges = settings["model"]["merges"]
    return Vocabulary(
        model="gpt2",
        pre=names[0],
        tokens=tokens,
        types=types,
        scores=None,
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        space_prefix=False,
        tokenizer=tokenizer,
    )


def _without_offsets(value: Any) -> Any:
    """Return settings without `trim_offsets`, which does not change the ids."""
    if isinstance(value, dict):
        return {k: _without_offsets(v) for k, v in value.items() if k != "trim_offsets"}
    return [_without_offsets(one) for one in value] if isinstance(value, list) else value


def _sentence_pieces(
    folder: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> Vocabulary:
    """Return the fields of a tokenizer with a SentencePiece model.

    Its ids are compared with those of llama.cpp, which puts a blank before every part of a text
    (`legacy` in decoding/models/text/sentence_pieces.py) and keeps all other blanks.
    """
    # imported here: only these folders need sentencepiece
    from decoding.models.text.sentence_pieces import SentencePieces

    if not (folder / MODEL).is_file():
        raise _refusal(folder, f"it has byte tokens, but the folder has no {MODEL}")
    model = (folder / MODEL).read_bytes()
    original = SentencePieces(model, tokenizer.added_tokens_decoder, legacy=True).proto
    spec = original.normalizer_spec
    if original.trainer_spec.model_type != original.trainer_spec.BPE or spec.precompiled_charsmap:
        raise _refusal(folder, f"{MODEL} is not BPE, or normalizes texts by a table")
    spec.remove_extra_whitespaces = False
    twin = SentencePieces(original.SerializeToString(), tokenizer.added_tokens_decoder, legacy=True)
    encode = encoder(tokenizer)
    wrong = differences(twin.encode, encode, PROBES)
    if wrong:
        raise _refusal(folder, f"llama.cpp would differ: {wrong[0]}")
    after_special = differences(twin.encode, encode, probes_of(tokenizer))
    tokens, types = _tokens(tokenizer, vocab_size)
    scores = [0.0] * vocab_size
    for i, piece in enumerate(original.pieces):
        scores[i] = piece.score
        if piece.piece == tokens[i] and (types[i] == NORMAL or piece.type == UNKNOWN):
            types[i] = piece.type
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores=scores,
        merges=None,
        space_prefix=bool(spec.add_dummy_prefix),
        tokenizer=tokenizer,
        difference=after_special[0] if after_special else None,
    )
