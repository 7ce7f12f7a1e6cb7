"""Texts shown token by token, each token marked as drafted or as the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.measure.records import Record


@dataclass(frozen=True)
class TracedText:
    """One generation: what each token adds to the text, and its mark (see Generation.trace)."""

    drafter: str
    prompt_id: str
    rounds: int
    pieces: list[tuple[str, str]]

    @property
    def drafted(self) -> int:
        return sum(mark == "1" for _, mark in self.pieces)


def traced_texts(
    records: Sequence[Record],
    drafters: Sequence[str],
    text_of: Callable[[Sequence[int]], str],
    prompts: int,
) -> list[TracedText]:
    """Return the first `prompts` texts of the main part's first condition, with each drafter."""
    main = [record for record in records if record.part == "main" and record.drafter in drafters]
    main = [r for r in main if r.condition == main[0].condition and (r.sample, r.turn) == (0, 0)]
    ids = list(dict.fromkeys(record.prompt_id for record in main))[:prompts]
    shown = sorted((r for r in main if r.prompt_id in ids), key=lambda r: ids.index(r.prompt_id))
    return [TracedText(r.drafter, r.prompt_id, r.rounds, _pieces(r, text_of)) for r in shown]


def _pieces(record: Record, text_of: Callable[[Sequence[int]], str]) -> list[tuple[str, str]]:
    shown, pieces = "", []
    for end, mark in enumerate(record.trace, start=1):
        text = text_of(record.tokens[:end])
        if end < len(record.tokens) and text.endswith("\ufffd"):  # a character of several tokens
            text = shown
        pieces.append((text[len(shown) :], mark))
        shown = text
    return pieces
