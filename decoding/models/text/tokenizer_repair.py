"""Repair of a folder's tokenizer whose ids differ from those that the model was trained on.

`transformers` 5 rebuilds a `LlamaTokenizer` from its pieces. Its ids differ for consecutive blanks,
for a text that begins with blanks, and after `</s>`; without `add_bos_token` in the settings the
beginning of text is missing. Probe texts detect that: their ids are compared with SentencePiece's
if the folder has a tokenizer.model, else with the ids of its tokenizer.json.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Tokenizer, processors
from transformers import LlamaTokenizer, PreTrainedTokenizerBase

from decoding.errors import UserError, without_stop

if TYPE_CHECKING:
    from decoding.models.text.sentence_pieces import SentencePieces

CORE, MODEL, SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
PROBES = (
    "def f(x):\n    return x",
    "class A:\n\n\n        y = [\n\t\t1,\n    ]\n",
    "".join("x" + " " * count for count in range(1, 34)),
    " one",
    "  two",
    "   three\n",
    "     \n  x",
    "trailing  ",
    "\n\n  x",
    "\t\tif a:\t# b",
    "I've 1234567 apples; see http://x.org/a?b=1&c=%20.",
    "你好，世界。 日本 語 한국어 Привет",
    "😀👩‍👩‍👧 é naïve ⌘ \U0001fae0 \x01",
    "ﬁne ½ Ａ１ e\u0301",
)
_VICUNA = (
    "A chat between a curious user and an assistant. USER: Write code. ASSISTANT: def f():\n    "
    "pass{0}"
    "USER: Again ASSISTANT:  ok {0} USER: Thanks ASSISTANT:"
)
_AROUND_SPECIAL = (
    "hi{0}USER: x",
    "hi{0} USER: x",
    "hi{0}  x{0}\n y",
    "{0}x",
    "{0}  x",
    " {0}{0}    x ",
    _VICUNA,
)
_MOST_SPECIAL = 16  # special tokens that are probed
_SHOWN = 6  # ids that a message shows
# settings that tokenizer.json replaces
_REBUILDING = ("added_tokens_decoder", "add_prefix_space", "sp_model_kwargs")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Difference:
    """A probe text to which two tokenizers give different ids."""

    text: str
    found: list[int]
    expected: list[int]

    def __str__(self) -> str:
        """Describe the text and some of its ids, from the first difference on."""
        pairs = zip_longest(self.found, self.expected)
        first = next(i for i, (a, b) in enumerate(pairs) if a != b)
        found, expected = (ids[first : first + _SHOWN] for ids in (self.found, self.expected))
        return f"the ids of {self.text!r} from place {first} on are {found}, expected {expected}"


@dataclass(frozen=True)
class Repair:
    """New contents of tokenizer.json and tokenizer_config.json, and a note that reports why."""

    core: str
    settings: str
    note: str


def differences(encode: Encode, reference: Encode, texts: Iterable[str]) -> list[Difference]:
    """Return a `Difference` for each text to which the tokenizers give different ids."""
    both = [Difference(text, encode(text), reference(text)) for text in texts]
    return [one for one in both if one.found != one.expected]


def probes_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the probe texts, and probes with text before and after the special tokens."""
    added = sorted(tokenizer.added_tokens_decoder.items())
    special = [token.content for _, token in added if token.special]
    if tokenizer.eos_token:
        special = list(dict.fromkeys([tokenizer.eos_token, *special]))
    special = special[:_MOST_SPECIAL]
    return [*PROBES, *(form.format(token) for token in special for form in _AROUND_SPECIAL)]


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Return the function from a text to its ids, without added ids at beginning and end."""
    return lambda text: cast(
        list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    )


def find_repair(
    folder: Path, tokenizer: PreTrainedTokenizerBase, held: dict[str, bytes], model_type: Any = None
) -> Repair | None:
    """Return the repair that a tokenizer needs, None if its ids are right.

    held: the contents of the folder's tokenizer files by name. model_type: the one in the folder's
    config.json. Raises UserError if tokenizer.model is not a SentencePiece model, and if no repair
    gives its ids.
    """
    settings = json.loads(held.get(SETTINGS, b"{}"))
    # For a LLaMA model, tokenizer.model alone means LlamaTokenizer with its defaults, even if
    # `transformers` chooses another class.
    rebuilt = isinstance(tokenizer, LlamaTokenizer) or (
        model_type == "llama" and CORE not in held and "tokenizer_class" not in settings
    )
    if MODEL not in held:
        return _repair_by_core(tokenizer, settings, held[CORE].decode()) if rebuilt else None
    legacy, prefix = settings.get("legacy"), settings.get("add_prefix_space") is not False
    # Without `legacy` LLaMA's default is true. Other classes come with a tokenizer.json, which
    # decides between both.
    conventions = [legacy] if isinstance(legacy, bool) else [True] if rebuilt else [True, False]
    added = tokenizer.added_tokens_decoder
    # imported here: a machine that only runs models may lack sentencepiece
    from decoding.models.text.sentence_pieces import SentencePieces

    try:
        references = [SentencePieces(held[MODEL], added, flag, prefix) for flag in conventions]
    except ValueError as error:
        raise UserError(
            f"{folder / MODEL} is not a SentencePiece model ({error}). Copy it again, or remove "
            f"it if the model has a tokenizer of another kind."
        ) from error
    texts = probes_of(tokenizer)
    ours = encoder(tokenizer)
    found = [(differences(ours, each.encode, texts), each) for each in references]
    wrong, reference = min(found, key=lambda pair: len(pair[0]))
    bos, eos = _ends(tokenizer, settings) if rebuilt else ("", "")
    if rebuilt:
        ends = cast(list[int], tokenizer.convert_tokens_to_ids([*filter(None, (bos, eos))]))
        framed = cast(list[int], tokenizer("")["input_ids"])
        wrong += differences(lambda _: framed, lambda _: ends, [""])
    if not wrong:
        return None
    _check_same_pieces(folder, tokenizer, reference, wrong[0])
    twin = _twin(folder, reference, texts, wrong[0])
    kept = settings | {"legacy": reference.legacy}
    if rebuilt:
        twin.post_processor = frame(tokenizer, bos, eos)
        kept |= {"add_bos_token": bool(bos), "add_eos_token": bool(eos)}
    else:
        twin.post_processor = tokenizer.backend_tokenizer.post_processor
    return Repair(twin.to_str(), _settings(tokenizer, kept), _note(wrong[0], MODEL))


def _repair_by_core(
    tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], core: str
) -> Repair | None:
    """Return the repair that loads tokenizer.json as it is, if the loaded tokenizer differs."""
    by_core = Tokenizer.from_str(core)
    wrong = differences(
        encoder(tokenizer),
        lambda text: by_core.encode(text, add_special_tokens=False).ids,
        probes_of(tokenizer),
    )
    return Repair(core, _settings(tokenizer, settings), _note(wrong[0], CORE)) if wrong else None


def _check_same_pieces(
    folder: Path, tokenizer: PreTrainedTokenizerBase, reference: "SentencePieces", wrong: Difference
) -> None:
    """Raise UserError if tokenizer and model have different vocabularies; either may be right."""
    ours, theirs = tokenizer.get_vocab(), reference.vocabulary()
    odd = sorted(ours.items() ^ theirs.items(), key=lambda entry: entry[1])
    if odd:
        token, i = odd[0]
        raise UserError(
            f"{folder}: {MODEL} and the other tokenizer files have different vocabularies "
            f"({len(theirs)} and {len(ours)} tokens; id {i} is {token!r} in only one of them): "
            f"{wrong} according to {MODEL}. Copy both from the same model, or remove {MODEL} if it "
            f"belongs to another model."
        )


def _twin(
    folder: Path, reference: "SentencePieces", texts: list[str], wrong: Difference
) -> Tokenizer:
    """Return a tokenizer that gives the reference's ids for all texts, or raise UserError."""
    from decoding.models.text.sentence_pieces import fast_twin

    try:
        twin = fast_twin(reference)
    except ValueError as error:
        raise UserError(
            f"{folder}: {wrong} according to {MODEL}, and it cannot be repaired: "
            f"{without_stop(error)}. Copy the tokenizer files of the model again."
        ) from error
    left = differences(
        lambda text: twin.encode(text, add_special_tokens=False).ids, reference.encode, texts
    )
    if left:
        raise UserError(
            f"{folder}: {wrong} according to {MODEL}, and in a tokenizer with that model's scores, "
            f"{left[0]}. The model would read other ids than it was trained on. Use tokenizer "
            f"files with the ids of {MODEL}, or remove {MODEL} if it belongs to another model."
        )
    return twin


def _ends(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> tuple[str, str]:
    """Return the tokens that LLaMA's released tokenizer puts before and after a text, or ""."""
    bos = tokenizer.bos_token if settings.get("add_bos_token", True) else ""
    eos = tokenizer.eos_token if settings.get("add_eos_token", False) else ""
    return bos or "", eos or ""


def frame(tokenizer: PreTrainedTokenizerBase, bos: str, eos: str) -> processors.TemplateProcessing:
    """Return the post-processor that adds the tokens of beginning and end."""
    tokens = [token for token in dict.fromkeys((bos, eos)) if token]
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens]
    return processors.TemplateProcessing(
        single=[*filter(None, (bos, "$A:0", eos))],
        pair=[*filter(None, (bos, "$A:0", eos, bos and f"{bos}:1", "$B:1", eos and f"{eos}:1"))],
        special_tokens=ids,
    )


def _settings(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> str:
    """Return the folder's tokenizer_config.json with a class that loads tokenizer.json as it is."""
    kept = {key: value for key, value in settings.items() if key not in _REBUILDING}
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    named = {role: getattr(tokenizer, role) for role in roles}
    plain = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": tokenizer.clean_up_tokenization_spaces,
    }
    return json.dumps(kept | named | plain, indent=2, ensure_ascii=False) + "\n"


def _note(wrong: Difference, truth: str) -> str:
    """Return the message that reports a repair."""
    return (
        f"transformers loads this tokenizer wrongly ({wrong} according to {truth}): repaired, here "
        f"and in exports"
    )
