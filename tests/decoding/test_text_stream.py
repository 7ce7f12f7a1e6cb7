"""Streamed pieces make up the text, and no piece ends inside a character."""

from pathlib import Path

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


def test_invalid_bytes_do_not_delay_later_text(embedded_target: Path) -> None:
    tokenizer = load_tokenizer(embedded_target)
    stray = tokenizer.convert_tokens_to_ids("<0x80>")
    ids = [*tokenizer("so", add_special_tokens=False)["input_ids"], *[stray] * 6]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert any(BROKEN in piece for piece in pieces[:-2])
