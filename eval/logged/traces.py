"""Rounds in traces and in output files of the published demo, and its averages.

A trace has a character for each emitted token (decoding.rounds.stats.Generation.trace). A round
emits the accepted drafts and one token of the target, the bonus, which ends it. The last round of
an output may end with a draft.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from decoding.errors import UserError

ROUND = re.compile(r"1*[0.]|1+$")


@dataclass(frozen=True)
class PromptRounds:
    """Tokens that each round of one output emitted, the target's own included."""

    emitted: list[int]
    accepted: int  # drafts

    @property
    def mean(self) -> float:
        return sum(self.emitted) / len(self.emitted)


def emitted_tokens(trace: str) -> list[int]:
    """Return the number of emitted tokens of each round of a serial schedule."""
    return [len(found) for found in ROUND.findall(trace)]


def rounds_of_trace(trace: str) -> PromptRounds:
    """Return the rounds in the trace of an output."""
    return PromptRounds(emitted_tokens(trace), trace.count("1"))


def rounds_of_totals(
    path: Path, rounds: Sequence[tuple[int, Sequence[int]]], num_draft_tokens: int = 0
) -> list[PromptRounds]:
    """Return the outputs in an output file: the prompts in order, each with all rows of its batch.

    rounds: (line, running totals of the rows) of each round. num_draft_tokens: the draft length, 0
    if it is not known. A total that does not grow begins a new prompt. Raises UserError, with the
    line, for a round that emits nothing, or more than the draft length allows.
    """
    most = num_draft_tokens + 1 if num_draft_tokens else 10**9
    expected = f"1 to {most} (num_draft_tokens + 1)" if num_draft_tokens else "1 or more"
    prompts: list[list[Sequence[int]]] = []
    before: Sequence[int] | None = None
    for line, totals in rounds:
        grown = [new - old for new, old in zip(totals, before or totals, strict=True)]
        if min(grown) <= 0:
            prompts.append([])
            grown = list(totals)
        for tokens in grown:
            if not 1 <= tokens <= most:
                raise UserError(
                    f"{path}:{line}: found a round of {tokens} tokens, expected {expected}."
                )
        prompts[-1].append(grown)
        before = totals
    return [
        PromptRounds(list(emitted), sum(emitted) - len(emitted))
        for prompt in prompts
        for emitted in zip(*prompt, strict=True)
    ]


def published_average(outputs: Sequence[PromptRounds]) -> float:
    """Return the dataset's average as the published script computes it, of one row a batch.

    It averages the differences of consecutive totals. So it leaves out the first round of the file
    and counts the last one twice; where a prompt begins with more tokens than the one before ended
    with, it takes the difference of the two for a round.
    """
    totals: list[int] = []
    for output in outputs:
        total = 0
        for tokens in output.emitted:
            total += tokens
            totals.append(total)
    if len(totals) < 2:
        return float(sum(totals))
    found = [new - old if new > old else new for old, new in pairwise(totals)]
    return sum([*found, found[-1]]) / len(totals)
