"""Measured costs of a round, and the protocol of a planner that decides from them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol


@dataclass(frozen=True)
class RoundCosts:
    """Measured milliseconds of a round's parts, from which policies and planners decide.

    The *frontier* of a draft step is the number of nodes that it continues from: 1 in a chain, the
    number of beams in a beam search, the number of expanded nodes in a tree.
    """

    # one draft step at the widest frontier, sampling and tree building included
    t_draft_ms: float
    # a target forward over n = 1, 2, ... new tokens; extrapolated through the last two
    t_target_ms: tuple[float, ...]
    overhead_ms: float = 0.0  # the rest of a round that drafts
    plain_overhead_ms: float | None = None  # the rest of a round without a draft; None: the same
    # Rows of the timed batch. One row's draft lengthens the round of all rows, so the rows of a
    # batch decide together before the round, from past rounds.
    rows: int = 1
    # (frontier, milliseconds of a step) in increasing order, linear in between; empty if all steps
    # cost the same
    t_draft_by_frontier_ms: tuple[tuple[int, float], ...] = ()
    # frontier at which `overhead_ms` was measured; None: the planner's choice for these costs
    frontier: int | None = None
    # why a prediction from these costs is unreliable, as a clause; empty: it is reliable
    unreliable: str = ""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "RoundCosts":
        """Return the costs read from JSON, in the form that `dataclasses.asdict` produces."""
        steps = tuple((frontier, ms) for frontier, ms in entry.get("t_draft_by_frontier_ms", ()))
        values = {"t_target_ms": tuple(entry["t_target_ms"]), "t_draft_by_frontier_ms": steps}
        return cls(**{**entry, **values})

    @property
    def plain_ms(self) -> float:
        """Milliseconds of a round that does not draft."""
        rest_ms = self.plain_overhead_ms
        return self.target_ms(1) + (self.overhead_ms if rest_ms is None else rest_ms)

    def step_ms(self, frontier: float) -> float:
        """Return the milliseconds of a draft step at this frontier, which may be a mean."""
        known = self.t_draft_by_frontier_ms
        if not known:
            return self.t_draft_ms
        # for a single number Python is faster than numpy
        for (fewer, less_ms), (more, more_ms) in pairwise(known):
            if frontier < more:
                return less_ms + (more_ms - less_ms) * max(frontier - fewer, 0) / (more - fewer)
        return known[-1][1]

    def steps_ms(self, steps: int, frontier: int | None = None) -> float:
        """Return the milliseconds of `steps` draft steps, of which the first starts from the tip.

        steps: at least 1. frontier: the frontier of every later step; None is the widest.
        """
        return self.step_ms(1) + (steps - 1) * (
            self.t_draft_ms if frontier is None else self.step_ms(frontier)
        )

    def with_slower_steps(self, ms: float) -> "RoundCosts":
        """Return these costs with `ms` milliseconds added to every draft step."""
        steps = tuple((frontier, step_ms + ms) for frontier, step_ms in self.t_draft_by_frontier_ms)
        return replace(self, t_draft_ms=self.t_draft_ms + ms, t_draft_by_frontier_ms=steps)

    def of_one_pass(self) -> "RoundCosts":
        """Return these costs for a drafter whose step drafts all tokens: later steps cost nothing.

        `Capabilities.steps` of such a drafter is "round".
        """
        return replace(self, t_draft_ms=0.0, t_draft_by_frontier_ms=((1, self.t_draft_ms),))

    def round_ms(self, steps: int, nodes: int) -> float:
        """Return the milliseconds of a round with `steps` draft steps and `nodes` drafted tokens.

        Without steps the round does not draft, and `nodes` is ignored.
        """
        return self.drafted_ms(self.steps_ms(steps), nodes) if steps else self.plain_ms

    def drafted_ms(self, draft_ms: float, nodes: int) -> float:
        """Return the milliseconds of a round whose draft of `nodes` tokens takes `draft_ms`."""
        return draft_ms + self.target_ms(nodes + 1) + self.overhead_ms

    def target_ms(self, n: int) -> float:
        """Return the milliseconds of a target forward over n new tokens."""
        known = self.t_target_ms
        if n <= len(known):
            return known[n - 1]
        slope = known[-1] - known[-2] if len(known) > 1 else 0.0
        return known[-1] + max(slope, 0.0) * (n - len(known))


class FrontierPlanner(Protocol):
    """Planner that chooses the frontier of a drafter's steps from measured costs."""

    def best_frontier(self, costs: RoundCosts) -> int:
        """Return the frontier with the most expected tokens per millisecond."""

    def expected_rate(self, costs: RoundCosts) -> float:
        """Return the expected tokens per millisecond at the frontier of these costs."""
