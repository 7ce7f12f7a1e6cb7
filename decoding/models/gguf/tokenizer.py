"""The tokenizer of a GGUF file, as a fast Hugging Face tokenizer with the chat template."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding.errors import UserError
from decoding.models.gguf.file import GgufFile, shape_of, token_id
from decoding.models.text.tokenizer_repair import PROBES, differences, frame
from decoding.values import ValueRule, is_text

# token types, which GGUF shares with SentencePiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ROLES = ("bos", "eos", "unk", "pad")
_TEXT, _TRUTH = ValueRule(is_text, "a string"), ValueRule(lambda v: isinstance(v, bool), "a bool")


def _list_of(kind: type | tuple[type, ...], words: str) -> ValueRule:
    return ValueRule(
        lambda value: isinstance(value, list) and all(isinstance(one, kind) for one in value),
        f"a list of {words}",
    )


_STRINGS, _INTEGERS = _list_of(str, "strings"), _list_of(int, "whole numbers")
_NUMBERS = _list_of((int, float), "numbers")
# How a text is cut before byte-level BPE, by `tokenizer.ggml.pre`.
_PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a GGUF file by id, with their types, and the special roles by name."""

    tokens: list[str]
    types: list[int]
    roles: dict[str, str]

    def added(self) -> dict[int, AddedToken]:
        """Return the tokens that are matched in a text as they are, by id.

        Control tokens are special: decoding can skip them. User-defined ones are not.
        """
        return {
            i: AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        }


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file, with its special tokens and its chat template.

    Supports SentencePiece BPE (`tokenizer.ggml.model` llama), and byte-level BPE (gpt2) with the
    pre-tokenizers gpt-2 and smollm. Raises UserError for another tokenizer, and for lists that do
    not fit together.
    """
    vocabulary = _vocabulary(file)
    kind = file.value("tokenizer.ggml.model", _TEXT)
    if kind == "gpt2":
        core = _byte_level(file, vocabulary)
    elif kind == "llama":
        core = _sentence_pieces(file, vocabulary)
    else:
        raise UserError(
            f"{file.path}: tokenizer.ggml.model is '{kind}', expected 'gpt2' (byte-level BPE) or "
            f"'llama' (SentencePiece BPE). Use the model's own Hugging Face folder."
        )
    settings: dict[str, Any] = {f"{role}_token": token for role, token in vocabulary.roles.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=shape_of(file)["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **settings,
    )
    bos, eos = (
        vocabulary.roles.get(role, "")
        if file.value(f"tokenizer.ggml.add_{role}_token", _TRUTH, kind == "llama" and role == "bos")
        else ""
        for role in ("bos", "eos")
    )
    if bos or eos:
        tokenizer.backend_tokenizer.post_processor = frame(tokenizer, bos, eos)
    if "tokenizer.chat_template" in file.keys():  # noqa: SIM118 (no dict)
        tokenizer.chat_template = file.value("tokenizer.chat_template", _TEXT)
    return tokenizer


def _vocabulary(file: GgufFile) -> Vocabulary:
    """Return the tokens, or raise UserError for lists that do not fit together."""
    tokens = file.value("tokenizer.ggml.tokens", _STRINGS)
    types = file.value("tokenizer.ggml.token_type", _INTEGERS)
    if len(tokens) != len(types):
        raise UserError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries, expected "
            f"{len(tokens)}, one for each token. Copy the file again."
        )
    token, times = Counter(tokens).most_common(1)[0] if tokens else ("", 0)
    if times != 1:
        raise UserError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries and {token!r} {times} "
            f"times, expected different tokens. Copy the file again."
        )
    roles = {}
    for role in ROLES:
        i = token_id(file, role)
        if i is not None and i >= len(tokens):
            raise UserError(
                f"{file.path}: the {role} token has id {i}, expected one of {len(tokens)} tokens. "
                f"Copy the file again."
            )
        if i is not None:
            roles[role] = tokens[i]
    return Vocabulary(tokens, types, roles)


def _byte_level(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """Return a byte-level BPE tokenizer by the file's merges."""
    pre = file.value("tokenizer.ggml.pre", _TEXT)
    if pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre is '{pre}', expected one of "
            f"{', '.join(_PRE_TOKENIZERS)}. Use the model's own Hugging Face folder."
        )
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = []
    for line in file.value("tokenizer.ggml.merges", _STRINGS):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise UserError(
                f"{file.path}: tokenizer.ggml.merges holds {line!r}, expected two tokens whose "
                f"union is a token. Copy the file again."
            )
        merges.append((left, right))
    core = Tokenizer(models.BPE(ids, merges))
    core.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    core.decoder = decoders.ByteLevel()
    for _, token in sorted(vocabulary.added().items()):
        core.add_special_tokens([token]) if token.special else core.add_tokens([token])
    return core


def _sentence_pieces(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """Return the fast twin of the SentencePiece model with the file's pieces and scores.

    A file does not tell how its model treats a blank after a special token. As in llama.cpp, every
    part of a text gets a blank (`legacy` in decoding/models/text/sentence_pieces.py).
    """
    # imported here: only these files need sentencepiece
    from decoding.models.text.sentence_pieces import SentencePieces, fast_twin

    try:
        reference = SentencePieces(_proto(file, vocabulary), vocabulary.added(), legacy=True)
        twin = fast_twin(reference)
    except ValueError as error:
        raise UserError(
            f"{file.path}: its tokens are not a SentencePiece model ({error}). Copy the file again."
        ) from error
    wrong = differences(
        lambda text: twin.encode(text, add_special_tokens=False).ids, reference.encode, PROBES
    )
    if wrong:
        raise UserError(
            f"{file.path}: {wrong[0]} according to SentencePiece. Use the model's own Hugging Face "
            f"folder."
        )
    return twin


def _proto(file: GgufFile, vocabulary: Vocabulary) -> bytes:
    """Return the content of tokenizer.model for the file's pieces, scores and types."""
    from sentencepiece import sentencepiece_model_pb2

    scores = file.value("tokenizer.ggml.scores", _NUMBERS)
    if len(scores) != len(vocabulary.tokens):
        raise UserError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries, expected "
            f"{len(vocabulary.tokens)}, one for each token. Copy the file again."
        )
    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    for piece, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True):
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = BYTE in vocabulary.types
    if UNKNOWN in vocabulary.types:
        model.trainer_spec.unk_id = vocabulary.types.index(UNKNOWN)
        model.trainer_spec.unk_piece = vocabulary.tokens[model.trainer_spec.unk_id]
    spec = model.normalizer_spec
    spec.name = "identity"
    spec.add_dummy_prefix = file.value("tokenizer.ggml.add_space_prefix", _TRUTH, True)
    spec.remove_extra_whitespaces = file.value(
        "tokenizer.ggml.remove_extra_whitespaces", _TRUTH, False
    )
    if "tokenizer.ggml.precompiled_charsmap" in file.keys():  # noqa: SIM118 (no dict)
        spec.precompiled_charsmap = bytes(
            file.value("tokenizer.ggml.precompiled_charsmap", _INTEGERS)
        )
    return bytes(model.SerializeToString())
