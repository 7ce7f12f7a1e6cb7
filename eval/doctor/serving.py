"""Decoding under chosen conditions, and the fate of every drafted token.

Shapes: E tested tokens of all prompts, P prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decoding.engine import Engine, with_costs
from decoding.interfaces import Drafter, Proposal, Target
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from eval.doctor.estimates import Counts

PROMPTS_PER_BATCH = 8


@dataclass(frozen=True)
class Tests:
    """Draft tokens that the target tested.

    A round without a draft counts as a rejection at depth 1, as a drafter that falls silent would
    otherwise look better. The last token of an answer at its limit is none: nothing is drafted for
    it.
    """

    prompt_E: np.ndarray
    place_E: np.ndarray  # index of the emitted token in the answer
    token_E: np.ndarray  # the emitted token, which is the target's if the draft was rejected
    depth_E: np.ndarray  # from 1
    accepted_E: np.ndarray
    drafted_E: np.ndarray  # false: nothing was drafted

    def counts(self, prompts: int, among_E: np.ndarray | None = None) -> Counts:
        """Return the counts of each prompt, among some of the tests."""
        among_E = np.ones(len(self.token_E), dtype=bool) if among_E is None else among_E
        accepted_P, tested_P = (
            np.bincount(self.prompt_E[chosen_E], minlength=prompts).astype(float)
            for chosen_E in (among_E & self.accepted_E, among_E)
        )
        return Counts(accepted_P, tested_P)


@dataclass(frozen=True)
class Served:
    """Prompts, the target's answers to them, and the tests of the drafts."""

    prompts: list[list[int]]
    answers: list[list[int]]
    ended: list[bool]  # whether a stop token ends the answer
    rounds: int  # of all answers
    tests: Tests
    # (prompt, index in the answer) -> the first token that a round drafted there
    first: dict[tuple[int, int], int]

    @property
    def counts(self) -> Counts:
        return self.tests.counts(len(self.prompts))

    @property
    def tau(self) -> float:
        """Return the block efficiency."""
        return sum(map(len, self.answers)) / self.rounds

    @property
    def previous_E(self) -> np.ndarray:
        """Return the token before each tested one."""
        tests = self.tests
        return np.asarray(
            [
                self.answers[prompt][place - 1] if place else self.prompts[prompt][-1]
                for prompt, place in zip(tests.prompt_E, tests.place_E, strict=True)
            ],
            dtype=np.int64,
        )


def serve(
    target: Target, drafter: Drafter, tokenizer: Any, prompts: list[list[int]], settings: Settings
) -> Served:
    """Answer the prompts with the drafter, and record every test."""
    engine = Engine(target, drafter, tokenizer, settings.stop_token_ids)
    if drafter.capabilities.needs_costs:
        settings = with_costs(engine, prompts[0], settings)
    first = _FirstDrafts(drafter, prompts)
    done: list[Generation] = []
    with first:
        for start in range(0, len(prompts), PROMPTS_PER_BATCH):
            ids = range(start, min(start + PROMPTS_PER_BATCH, len(prompts)))
            some = prompts[ids.start : ids.stop]
            done += decode(target, drafter, some, settings, request_ids=[*ids])
    tests = [_tests(row, one) for row, one in enumerate(done)]
    return Served(
        prompts,
        [one.tokens for one in done],
        [one.finish == "stop" for one in done],
        sum(one.rounds for one in done),
        Tests(*(np.concatenate(column) for column in zip(*tests, strict=True))),
        first.found,
    )


def _tests(row: int, done: Generation) -> tuple[np.ndarray, ...]:
    """Return the columns of `Tests` for one answer, read from its trace."""
    found: list[tuple[int, int, int, bool, bool]] = []
    depth = 1
    for place, mark in enumerate(done.trace):
        last = place == len(done.trace) - 1 and done.finish == "length"
        if mark in "10" or (depth == 1 and not last):
            found.append((place, done.tokens[place], depth, mark == "1", mark in "10"))
        depth = depth + 1 if mark == "1" else 1
    columns = np.asarray(found, dtype=np.int64).reshape(-1, 5).T
    place_E, token_E, depth_E, accepted_E, drafted_E = columns
    return (
        np.full(len(found), row),
        place_E,
        token_E,
        depth_E,
        accepted_E.astype(bool),
        drafted_E.astype(bool),
    )


class _FirstDrafts:
    """A record of the first drafted token of each round, of drafters of chains."""

    def __init__(self, drafter: Drafter, prompts: Sequence[Sequence[int]]) -> None:
        self.found: dict[tuple[int, int], int] = {}
        self._drafter: Any = drafter
        self._rows = {tuple(prompt): row for row, prompt in enumerate(prompts)}
        self._lengths = sorted({len(prompt) for prompt in prompts}, reverse=True)

    def __enter__(self) -> None:
        propose = self._drafter.propose

        def watched(sequences_B: Sequence[Sequence[int]], *given: Any) -> Proposal:
            proposal: Proposal = propose(sequences_B, *given)
            if proposal.parents_BN is None and proposal.tokens_BN.shape[1]:
                firsts_B = proposal.tokens_BN[:, 0].tolist()
                for sequence, token, count in zip(
                    sequences_B, firsts_B, proposal.counts_B, strict=True
                ):
                    if count and (place := self._place(sequence)) is not None:
                        self.found[place] = token
            return proposal

        self._drafter.propose = watched

    def __exit__(self, *_: object) -> None:
        del self._drafter.propose

    def _place(self, sequence: Sequence[int]) -> tuple[int, int] | None:
        """Return the prompt that begins a sequence, and the length of its answer so far."""
        for length in self._lengths:
            if (
                length <= len(sequence)
                and (row := self._rows.get(tuple(sequence[:length]))) is not None
            ):
                return row, len(sequence) - length
        return None
