"""Whether two engines accept the tokens of one drafter equally often.

A drafter folder that an engine loads wrongly still gives the target's text, only slower, so nothing
but the acceptance shows the fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.statistics.metrics import add_by_depth

AGREES, DIFFERS, TOO_FEW, NOT_COMPARED = "agrees", "differs", "too few tests", "not compared"
# Chance of a false "differs" in a comparison, over all of its depths. It is smaller where both
# engines decode the same texts, as their counts then vary together.
LEVEL = 0.01
MIN_TESTS = 50  # fewer tests at the first depth, one a round, decide nothing


@dataclass(frozen=True)
class Counts:
    """Tests and accepted tokens, by depth or, if an engine reports only sums, in one entry."""

    tested: list[int]
    accepted: list[int]


@dataclass(frozen=True)
class Agreement:
    """One of the words defined above, and a sentence with the counts."""

    word: str
    detail: str


def compare(engine: Counts, ours: Counts, per_round: int = 1) -> Agreement:
    """Compare acceptance rates depth by depth with Fisher's exact test of two proportions.

    The level is LEVEL, divided by the number of depths (Bonferroni). per_round: tests of a round in
    each entry; more than one where an engine reports sums over all depths.
    """
    sides = (engine.tested, engine.accepted, ours.tested, ours.accepted)
    depths = list(zip(*sides, strict=False))
    texts = [f"{x} of {n} against {u} of {m}" for n, x, m, u in depths]
    for depth, (n, x, m, u) in enumerate(depths, start=1):
        if fisher(x, n, u, m) < LEVEL / len(depths):
            place = f" at depth {depth}" if len(engine.tested) > 1 else ""
            return Agreement(DIFFERS, f"differs{place} ({texts[depth - 1]})")
    detail = ("by depth: " if len(texts) > 1 else "") + ", ".join(texts)
    if not depths or min(depths[0][0], depths[0][2]) < MIN_TESTS * per_round:
        return Agreement(TOO_FEW, detail)
    return Agreement(AGREES, detail)


def fisher(x: int, n: int, u: int, m: int) -> float:
    """Return the two-sided p-value of Fisher's exact test for x of n against u of m.

    It is the probability, with both margins fixed, of a table at most as probable as this one.
    """
    total, successes = n + m, x + u
    support = range(max(0, successes - m), min(n, successes) + 1)
    logs = np.array([_log_choose(n, k) + _log_choose(m, successes - k) for k in support])
    chances = np.exp(logs - _log_choose(total, successes))
    return float(chances[chances <= chances[x - support.start] * (1 + 1e-7)].sum())


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def counts_of(
    tested: Sequence[Sequence[int] | None],
    accepted: Sequence[Sequence[int] | None],
    rounds: Sequence[int | None],
) -> Counts | None:
    """Return the sums of several batches' counts by depth; None if one does not report them.

    Where only `tested` is missing, each depth tests what the depth before it accepted.
    """
    sums_tested: list[list[int]] = []
    for tests, kept, count in zip(tested, accepted, rounds, strict=True):
        if kept is None or (tests is None and count is None):
            return None
        if tests is not None:
            sums_tested.append(list(tests))
        elif kept:
            assert count is not None
            sums_tested.append([count, *kept[:-1]])
    return Counts(add_by_depth(sums_tested), add_by_depth([kept for kept in accepted if kept]))
