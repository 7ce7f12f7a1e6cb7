"""Drafters with another tokenizer: translation of texts, q over shared tokens, caches, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from decoding.drafters.other_vocabulary import OtherVocabulary
from decoding.drafters.translation import PART_TOKENS, Translation, Vocabularies
from decoding.engine import generate, load
from decoding.errors import UserError
from decoding.interfaces import Proposal
from decoding.loop import decode
from decoding.models.text.token_text import TokenText, without_unfinished
from decoding.rounds.settings import Settings
from tests.support.other_vocabularies import letters, partly_shared, renamed_drafter
from tests.support.tiny_folders import save
from tests.support.tiny_targets import VOCABULARY, hf_model, native_of, random_prompts

from .law_3 import P_LIMIT, drafter_of, law_holds
from .row_kinds.models import six_words

TEXT = (
    "Once upon a time there was a little girl. She said: hello world, hello there!\n\n"
    "def add(a, b):\n    return a + b  # the sum\n"
    "Naïve café, 日本語 and 😀 are written in UTF-8; numbers like 1234 too.\n"
)
ASSETS = Path(__file__).resolve().parents[2] / "assets" / "target"
SPECIAL = ["<unk>", "<s>", "</s>"]


def sentence_pieces(size: int = 400) -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes blanks as SentencePiece does, with one before a text."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    words = "\u2581".join(TEXT.split()).encode("ascii", "ignore").decode()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=pieces, show_progress=False)
    core.train_from_iterator([f"\u2581{word}" for word in words.split("\u2581")] * 2, trainer)
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _fast(core)


def byte_level(size: int = 360) -> PreTrainedTokenizerFast:
    """Return a tokenizer of byte-level BPE."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([TEXT] * 2, trainer)
    return _fast(core)


def _fast(core: Tokenizer) -> PreTrainedTokenizerFast:
    # the pieces of bytes are no special tokens
    state = json.loads(core.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in SPECIAL]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )


PIECES, BYTES = TokenText(sentence_pieces(), "pieces"), TokenText(byte_level(), "bytes")
BOTH = pytest.mark.parametrize("words", [PIECES, BYTES], ids=["pieces", "bytes"])


def shown(words: TokenText, ids: list[int]) -> bytes:
    return b"".join(words.bytes_V[i] or b"" for i in ids)


@BOTH
@pytest.mark.parametrize("first", [True, False])
def test_texts_are_encoded_and_decoded(words: TokenText, first: bool) -> None:
    assert words.adds_blank == (words is PIECES)
    for text in (TEXT, "a", " ", "  two", "\n\nx", "😀", "a</s>b", " a"):
        ids = words.encode(text.encode(), first)
        assert words.decode(ids, first) == text.encode()
        assert None not in [words.bytes_V[i] for i in ids], "the text is not a special token"
    broken = "a 😀".encode()[:-1] + b" b"
    assert words.decode(words.encode(broken, first), first) == broken


@BOTH
def test_tokens_continue_a_text_as_the_whole_text(words: TokenText) -> None:
    """Check every boundary of a text's own tokens; without the text before, most would differ."""
    data = TEXT.encode()
    ids = words.encode(data, True)
    alone = 0
    for place in range(1, len(ids)):
        new = data[len(words.decode(ids[:place], True)) :]
        assert words.continued(ids[:place], new, True) == ids[place:]
        alone += words.encode(new, True) != ids[place:]
    assert len(ids) > 60
    if words is PIECES:
        assert alone > len(ids) / 2, "control: encoded alone, a draft begins with a blank"


@BOTH
def test_a_boundary_inside_a_token_keeps_the_tokens_before_it(words: TokenText) -> None:
    ids = words.encode(b"he said hel", True)
    new = words.continued(ids, b"lo there", True)
    assert words.decode([*ids, *new], True) == b"he said hello there"
    assert shown(words, new) == b"lo there", "no blank is added"
    half = words.encode("a 😀".encode()[:-2], True)
    rest = "😀".encode()[-2:] + b" b"
    assert shown(words, words.continued(half, rest, True)) == rest


def test_unfinished_characters_are_found() -> None:
    for text in ("a", "é", "日", "😀"):
        data = b"x" + text.encode()
        assert without_unfinished(data) == data
        for cut in range(1, len(text.encode())):
            assert without_unfinished(data[:-cut]) == b"x"
    assert without_unfinished(b"") == b""


@pytest.mark.parametrize("turned", [False, True])
def test_shared_tokens_have_the_same_text(turned: bool) -> None:
    both = Vocabularies(*((BYTES, PIECES) if turned else (PIECES, BYTES)))
    pairs = list(zip(both.target_ids_N, both.drafter_ids_N, strict=True))
    ends = (both.target.end, both.drafter.end)
    assert ends in pairs
    texts = [
        (both.target.bytes_V[ours], both.drafter.bytes_V[theirs])
        for ours, theirs in pairs
        if (ours, theirs) != ends
    ]
    assert len(texts) == both.shared_text > 256
    assert all(ours == theirs for ours, theirs in texts)
    assert any(len(ours) > 3 for ours, _ in texts if ours), "words are shared, not bytes alone"
    assert len(set(both.target_ids_N)) == len(set(both.drafter_ids_N)) == len(pairs)


@pytest.mark.parametrize("turned", [False, True])
def test_a_translation_is_a_function_of_the_text(turned: bool) -> None:
    """Check that a text which grows token by token is translated as at once, and read back."""
    both = Vocabularies(*((BYTES, PIECES) if turned else (PIECES, BYTES)))
    sequence = [both.target.begin, *both.target.encode(TEXT.encode() * 2, True)]
    sequence += [both.target.end, *both.target.encode(b"Next text", True)]
    grown = Translation(both)
    for end in range(1, len(sequence) + 1):
        translated = grown.of(sequence[:end])
    assert translated == Translation(both).of(sequence)
    assert len(sequence) > 4 * PART_TOKENS
    end = translated.index(both.drafter.end)
    assert both.drafter.decode(translated[len(both.drafter.start) : end], True) == TEXT.encode() * 2
    assert both.drafter.decode(translated[end + 1 :], True) == b"Next text"


def test_drafted_text_ends_before_special_tokens_and_unfinished_characters() -> None:
    both = Vocabularies(BYTES, PIECES)
    text = Translation(both)
    text.of(BYTES.encode(b"She said", True))
    drafted = PIECES.encode(b" hello", False)
    assert shown(BYTES, text.continued(drafted, 10)) == b" hello"
    assert text.continued(drafted, 1) == text.continued(drafted, 10)[:1]
    ended = text.continued([*drafted, PIECES.end, *drafted], 10)
    assert shown(BYTES, ended) == b" hello"
    assert ended[-1] == BYTES.end
    assert text.continued([PIECES.begin or 0, *drafted], 10) == []
    unfinished = PIECES.encode("é".encode(), False)[:1]
    assert shown(BYTES, text.continued([*drafted, *unfinished], 10)) == b" hello"


class WholeVocabulary(OtherVocabulary):
    """A drafter whose q is its distribution over all of its tokens, not renormalised."""

    def propose(self, sequences_B: Any, *given: Any) -> Proposal:
        proposal = super().propose(sequences_B, *given)
        assert proposal.q_BNV is not None
        table: Any = self.model
        for b, sequence in enumerate(sequences_B):
            # the target's last token is unknown to the drafter
            text = [min(token, 5) if token < 4 else 5 for token in sequence[-2:]]
            for n, token in enumerate(proposal.tokens_BN[b].tolist()):
                full_D = table.table_VVV[text[-2], text[-1]].softmax(-1)
                proposal.q_BNV[b, n] = torch.cat((full_D[:4], torch.zeros(1)))
                text.append(token)
        return proposal


def test_law_3_rejects_q_over_the_whole_vocabulary() -> None:
    right = drafter_of("other_vocabulary")
    assert isinstance(right, OtherVocabulary)
    made = WholeVocabulary(model=six_words(), vocabularies=right.vocabularies)
    assert law_holds(made, "token", "plain") < P_LIMIT
    assert law_holds(right, "token", "plain") > P_LIMIT


def greedy(drafter: Any, prompts: list[list[int]], **fields: Any) -> list[Any]:
    target = native_of(hf_model("llama", layers=2))
    return decode(target, drafter, prompts, Settings(max_new_tokens=40, **fields))


@pytest.mark.parametrize("rule", ["tokens", "strings"])
def test_a_round_reads_new_tokens_alone(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the drafter's forwards read the text once, and the last token of a draft twice."""
    model = native_of(hf_model("llama", layers=2), noise=0.03)
    drafter, read = renamed_drafter(model, rule), 0
    original = type(model).commit

    def counted(self: Any, paths_BL: Any, counts_B: Any) -> None:
        nonlocal read
        read += sum(counts_B) if self is model else 0
        original(self, paths_BL, counts_B)

    monkeypatch.setattr(type(model), "commit", counted)
    (done,) = greedy(drafter, random_prompts(1, longest=12, seed=5))
    assert done.accepted > 5
    assert read <= done.prefilled + done.drafted + 2 * done.rounds


@pytest.mark.parametrize("rule", ["tokens", "strings"])
def test_a_drafter_with_a_short_context_stops_drafting(rule: str) -> None:
    model = native_of(hf_model("llama", layers=2), noise=0.03, max_length=24)
    prompts = [[4], [5] * 20, [6] * 40]
    plain, drafted = greedy(None, prompts), greedy(renamed_drafter(model, rule), prompts)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert drafted[0].drafted > 0
    assert drafted[2].drafted == 0


@pytest.mark.parametrize("rule", ["tokens", "strings"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "verify": "coupled"}])
def test_tokens_that_the_drafter_lacks_are_never_drafted(
    rule: str, settings: dict[str, Any]
) -> None:
    """Check a target whose texts have many tokens that the drafter lacks."""
    model = native_of(hf_model("llama", layers=2), noise=0.03)
    drafter = partly_shared(model, VOCABULARY, 24, rule)
    prompts = random_prompts(8)
    plain, drafted = greedy(None, prompts, **settings), greedy(drafter, prompts, **settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert 0 < sum(g.accepted for g in drafted) < sum(g.tested for g in drafted)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["tokens", "strings"])
def test_a_folder_with_another_tokenizer_drafts(rule: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "characters")
    with pytest.raises(UserError, match=f"use: other_vocabulary, folder: {folder}"):
        load(ASSETS, folder)
    plain = load(ASSETS)
    engine = load(ASSETS, {"use": "other_vocabulary", "folder": str(folder), "rule": rule})
    for prompt in ("def add(a, b):", "é 😀", "x = [\n"):
        for settings in ({}, {"temperature": 1.0, "verify": "coupled", "seed": 4}):
            fields: dict[str, Any] = {"max_new_tokens": 24, "stopping": "fixed", **settings}
            drafted, wanted = (generate(each, prompt, **fields) for each in (engine, plain))
            assert drafted.tokens == wanted.tokens
            assert drafted.stats.tested > 0 or not wanted.tokens


def test_folders_that_cannot_draft_are_refused(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text('{"medusa_num_heads": 2}')
    with pytest.raises(UserError, match=r"it is a head \(medusa\), .* expected a model"):
        load(ASSETS, {"use": "other_vocabulary", "folder": str(head)})
    folder = save(tmp_path / "letters")
    words = {each: i for i, each in enumerate([*SPECIAL, *letters(90)])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    _fast(core).save_pretrained(folder)
    with pytest.raises(UserError, match="none of its 90 tokens has the text of one of the target"):
        load(ASSETS, {"use": "other_vocabulary", "folder": str(folder)})


def test_a_tokenizer_with_an_unknown_convention_is_refused() -> None:
    core = Tokenizer(models.WordPiece({"<unk>": 0, "a": 1, "##b": 2}, unk_token="<unk>"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="F: its tokenizer decodes with WordPiece, expected"):
        TokenText(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"), "F")
