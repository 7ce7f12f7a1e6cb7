"""Plans: how much a row of the recurrent head drafts.

A plan belongs to one row, so a row's draft does not depend on its neighbors. `Fixed` drafts all
beams to the end of the budget, and `ChainByCost` a chain whose length pays at the row's acceptance
rate. With costs and several beams the plan is a planner of decoding/stopping/. It reads the chances
of each step, or plans from past rounds, in batches and where reading would wait. With costs, at
most as many beams are searched as pay on the machine (`best_width`).

A node is dropped for its depth or its chance, which are known before any test. Sampled nodes are
never dropped: plans choose the number of children before they are sampled, and then the number of
sampled nodes to continue from.

Shapes: L steps, W beams.
"""

from collections import deque
from functools import lru_cache
from math import prod
from typing import Any

from decoding.interfaces import RoundCosts
from decoding.stopping.ahead_planner import AheadPlanner
from decoding.stopping.planner import (
    PRIOR,
    RoundPlanner,
    StepPlanner,
    best_prefix,
    sibling_chance,
)

DEEPEST = 8  # longest draft for which numbers of beams are compared


def list_widths(most: int) -> tuple[int, ...]:
    """Return the numbers of beams to compare: powers of two below `most`, and `most`."""
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


def width_rate(costs: RoundCosts, width: int) -> float:
    """Return the expected tokens per millisecond of `width` beams at their best draft length.

    Every node is verified, and a step counts as accepted if one of its siblings is.
    """
    rejected = prod(1 - sibling_chance(place) for place in range(1, width))
    accepted = 1 - (1 - PRIOR) * rejected

    def round_ms(steps: int) -> float:
        if not steps:
            return costs.plain_ms
        return costs.drafted_ms(costs.steps_ms(steps, width), steps * width)

    return best_prefix((accepted**step for step in range(1, DEEPEST + 1)), round_ms)[1]


@lru_cache
def best_width(costs: RoundCosts, most: int) -> int:
    """Return the number of beams with the most expected tokens per millisecond, at most `most`.

    It depends on the costs alone, so all requests search the same number of beams.
    """
    return max(list_widths(most), key=lambda width: (width_rate(costs, width), -width))


class Room:
    """The number of nodes that the target's forward holds of a row's tree of fixed beams.

    It is the largest number that the latest trees needed, at most W x L. Nodes beyond it are
    dropped; they belong to the last steps, which are accepted least often. The true number is read
    after the round, so a row lacks room for at most one round at a time.
    """

    ROUNDS = 8

    def __init__(self) -> None:
        self._last: deque[tuple[int, int]] = deque(
            maxlen=self.ROUNDS
        )  # nodes needed, and nodes searched
        self._most = 0

    def nodes(self, most: int) -> int:
        """Return the number of nodes to hold of a draft with `most` nodes."""
        self._most = most
        return max((-(-needed * most // total) for needed, total in self._last), default=most)

    def learn(self, needed: int) -> None:
        """End the round, in which the tree had `needed` nodes."""
        if self._most:
            self._last.append((needed, self._most))
        self._most = 0


class Fixed:
    """Plan that drafts all beams to the end of the budget."""

    def __init__(self, width: int, ahead: bool) -> None:
        self._width, self._room = width, Room() if ahead else None
        self.depth = 0  # steps of this round
        # largest number of nodes to propose; None: all of them
        self.room: int | None = None

    def begin(self, budget: int) -> int:
        """Begin a round and return its number of steps."""
        self.depth = budget
        self.room = None if self._room is None else self._room.nodes(self._width * budget)
        return budget

    def learn(self, answer: Any, accepted: int) -> None:
        """End the round. answer: the number of nodes of the tree; None if it was not read."""
        if self._room is not None and answer is not None:
            self._room.learn(answer)


class ChainByCost(Fixed):
    """Plan of a chain whose length is chosen before the round, from the acceptance rate."""

    def __init__(self, costs: RoundCosts) -> None:
        super().__init__(1, ahead=False)
        self._planner = RoundPlanner(costs)

    def begin(self, budget: int) -> int:
        """Begin a round and return its number of steps, 0 if drafting does not pay."""
        self.depth = self._planner.chain_length(budget)
        return self.depth

    def learn(self, answer: Any, accepted: int) -> None:
        """End the round and update the acceptance rate."""
        round_ms = self._planner.costs.round_ms(self.depth, self.depth)
        self._planner.learn_round(self.depth, accepted, round_ms)
        self.depth = 0


BeamPlan = StepPlanner | AheadPlanner
Plan = Fixed | BeamPlan


def make_plan(costs: RoundCosts | None, width: int, ahead: bool) -> Plan:
    """Return a row's plan.

    costs: None for fixed beams. ahead: whether the host runs ahead of the device.
    """
    if costs is None:
        return Fixed(width, ahead)
    if width == 1:
        return ChainByCost(costs)
    if ahead or costs.rows > 1:
        return AheadPlanner(costs, width, frontiers=list_widths(width))
    return StepPlanner(costs)
