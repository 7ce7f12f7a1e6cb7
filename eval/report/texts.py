"""Who wrote what: a text's tokens, each marked as drafted or as the target's own, for the report's
case studies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from eval.measure.records import Record


@dataclass(frozen=True)
class Text:
    """One generation, token by token."""

    drafter: str
    prompt_id: str
    rounds: int
    pieces: list[tuple[str, str]]  # (text, mark): see decoding.rounds.stats.Generation.trace


def texts_of(
    records: Sequence[Record],
    drafters: Sequence[str],
    text_of: Callable[[Sequence[int]], str],
    prompts: int,
) -> list[Text]:
    """The texts of the first `prompts` prompts of the main part, under its first condition, with
    each of `drafters`.
    """
    main = [record for record in records if record.part == "main" and record.drafter in drafters]
    main = [
        one
        for one in main
        if one.condition == main[0].condition and (one.sample, one.turn) == (0, 0)
    ]
    ids = list(dict.fromkeys(record.prompt_id for record in main))[:prompts]
    chosen = sorted(
        (one for one in main if one.prompt_id in ids), key=lambda one: ids.index(one.prompt_id)
    )
    return [Text(one.drafter, one.prompt_id, one.rounds, _pieces(one, text_of)) for one in chosen]


def _pieces(record: Record, text_of: Callable[[Sequence[int]], str]) -> list[tuple[str, str]]:
    """What each token adds to the text; a character of several tokens goes with its last."""
    shown, pieces = "", []
    for end, mark in enumerate(record.trace, start=1):
        text = text_of(record.tokens[:end])
        if end < len(record.tokens) and text.endswith("\ufffd"):
            text = shown
        pieces.append((text[len(shown) :], mark))
        shown = text
    return pieces


def page_part(texts: Sequence[Text]) -> str:
    """The texts as HTML; empty without any."""
    if not texts:
        return ""
    parts = [
        '<p class="note">Marked: tokens that were drafted and passed. Boxed: the target\'s own in '
        "place of one that failed. Plain: the target's "
        "own where nothing was tested.</p>"
    ]
    for text in texts:
        drafted = sum(mark == "1" for _, mark in text.pieces)
        heading = (
            f"{text.prompt_id}, {text.drafter}: {len(text.pieces)} tokens in {text.rounds} "
            f"target forwards, {drafted} drafted"
        )
        spans = "".join(
            f'<span class="{_CLASSES[mark]}">{escape(piece)}</span>' for piece, mark in text.pieces
        )
        parts.append(f'<h3>{escape(heading)}</h3><p class="text">{spans}</p>')
    return "".join(parts)


_CLASSES = {"1": "drafted", "0": "corrected", ".": "own"}
