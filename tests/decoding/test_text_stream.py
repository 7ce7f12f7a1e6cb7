"""Streamed pieces make up the text, and no piece ends inside a character."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from decoding.models.text.text_stream import BROKEN, TextStream
from decoding.models.text.tokenizer import load_tokenizer

TEXTS = [
    "Hello, world.\n\n  Indented — and done.",
    "naïve café, 你好世界, 🙂🙃 and ☃",
    "def f(x):\n\treturn x  # ∀x ∈ ℝ",
    " a blank first",
]


def streamed(tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(lambda some: tokenizer.decode(list(some), skip_special_tokens=True))
    return [*(stream.add([token]) for token in ids), stream.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_make_up_the_text(embedded_target: Path, text: str) -> None:
    tokenizer = load_tokenizer(embedded_target)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any(BROKEN in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > len(text) // 8, "pieces come before the end"
    whole = TextStream(lambda some: tokenizer.decode(list(some), skip_special_tokens=True))
    assert whole.add(ids) + whole.end() == "".join(pieces)


def test_control_tokens_decoded_one_by_one_break_characters(embedded_target: Path) -> None:
    tokenizer = load_tokenizer(embedded_target)
    ids = tokenizer(TEXTS[1], add_special_tokens=False)["input_ids"]
    assert any(BROKEN in tokenizer.decode([token]) for token in ids)


def test_a_special_token_keeps_the_next_tokens_blank(embedded_target: Path) -> None:
    tokenizer = load_tokenizer(embedded_target)
    one, two = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("one", "one two")
    )
    ids = [*one, tokenizer.eos_token_id, *two[len(one) :]]
    assert "".join(streamed(tokenizer, ids)) == "one two"


def test_a_text_that_continues_another_keeps_its_first_blank(llama_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer, of_model=False)
    ids = tokenizer("It is a long way to Rome, they say", add_special_tokens=False)["input_ids"]
    lost = 0
    for at in range(1, len(ids)):
        before, after = ids[:at], ids[at:]
        start, whole = tokenizer.decode(before), tokenizer.decode(ids)
        assert start + continued(tokenizer, before, after) == whole
        lost += start + continued(tokenizer, [], after) != whole
    assert lost > 5, "control: SentencePiece drops the blank of a text that continues nothing"


def continued(tokenizer, before: list[int], after: list[int]) -> str:
    stream = TextStream(lambda some: str(tokenizer.decode(list(some))), before)
    return "".join([*(stream.add([token]) for token in after), stream.end()])


def test_invalid_bytes_do_not_delay_later_text(embedded_target: Path) -> None:
    tokenizer = load_tokenizer(embedded_target)
    stray = tokenizer.convert_tokens_to_ids("<0x80>")
    ids = [*tokenizer("so", add_special_tokens=False)["input_ids"], *[stray] * 6]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert any(BROKEN in piece for piece in pieces[:-2])


def counted(tokenizer) -> tuple[TextStream, list[int]]:
    """Return a stream, and a list that gains an entry for every decode."""
    decodes: list[int] = []

    def text_of(some: Sequence[int]) -> str:
        decodes.append(len(some))
        return str(tokenizer.decode(list(some), skip_special_tokens=True))

    return TextStream(text_of), decodes


def test_tokens_that_are_added_at_once_are_decoded_at_once(embedded_target: Path) -> None:
    tokenizer = load_tokenizer(embedded_target)
    plain = "The cost per token does not grow with the text, and rounds add several tokens."
    ids = tokenizer(plain, add_special_tokens=False)["input_ids"]
    (stream, decodes), (singles, single_decodes) = counted(tokenizer), counted(tokenizer)
    text = "".join(stream.add(ids[at : at + 5]) for at in range(0, len(ids), 5))
    assert text == "".join(singles.add([token]) for token in ids) == plain
    assert len(decodes) <= 2 * -(-len(ids) // 5)
    assert max(decodes) <= 10, "the cost does not grow with the text"
    assert len(single_decodes) > 4 * len(decodes), "a control: one by one they take more"


@pytest.mark.parametrize("seed", range(40))
def test_the_text_does_not_depend_on_how_many_tokens_come_at_once(
    seed: int, embedded_target: Path
) -> None:
    """Mix texts with stray bytes, after which bytes before them are no characters any more."""
    tokenizer = load_tokenizer(embedded_target)
    random = Random(seed)
    ids: list[int] = []
    for _ in range(12):
        text = random.choice([*TEXTS, "你好世界世界", "🙂🙃🙂"])
        ids += tokenizer(text, add_special_tokens=False)["input_ids"][: random.randrange(20)]
        for _ in range(random.randrange(4) * random.randrange(2)):
            ids.append(tokenizer.convert_tokens_to_ids(f"<0x{random.randrange(256):02X}>"))
    whole, parted = counted(tokenizer)[0], counted(tokenizer)[0]
    pieces, at = [], 0
    while at < len(ids):
        count = random.randrange(1, 9)
        pieces.append(parted.add(ids[at : at + count]))
        at += count
    expected = "".join(streamed(tokenizer, ids))
    assert "".join(pieces) + parted.end() == expected
    assert whole.add(ids) + whole.end() == expected
