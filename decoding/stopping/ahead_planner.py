"""A planner that decides the whole tree of a round before it, from the chances of past rounds.

Shapes: L levels, W nodes of a level.
"""

from collections.abc import Sequence
from typing import Any

from decoding.interfaces import RoundCosts
from decoding.stopping.planner import PRIOR, DecayedRate, LevelRates, RoundPlanner, best_prefix


class AheadPlanner(RoundPlanner):
    """Decisions before a round, from the mean chances of past rounds.

    It serves devices that the host runs ahead of, where reading a step would wait, and batches,
    whose rounds are as wide as their widest tree. The chances are read after the round, together
    with the outcome. For each level and rank the planner keeps the mean chance, given that the
    level above is accepted. A level that was never drafted is expected to branch like the first
    one.
    """

    reads = False

    def __init__(
        self,
        costs: RoundCosts,
        width: int,
        most: int | None = None,
        branching: int | None = None,
        frontiers: Sequence[int] = (),
    ) -> None:
        """Plan trees of at most `most` nodes, in levels of W = `width`.

        branching: number of children of a node; None: W. frontiers: the numbers of nodes that
        steps may start from, in increasing order; empty: W alone.
        """
        super().__init__(costs)
        self.width, self.most, self.branching = width, most, branching or width
        self._frontiers = tuple(frontiers) or (width,)
        self.trust = DecayedRate(1.0)  # accepted tokens over the sum of expected chances
        self._shares_L: list[LevelRates] = []
        self._first = [PRIOR * (1 - PRIOR) ** rank for rank in range(width)]
        self.frontier = self._frontiers[-1]  # of every step but the first
        self.levels: list[int] = []  # nodes of each level of this round's tree
        self._taken = 0

    @property
    def depth(self) -> int:
        """Number of steps of this round."""
        return len(self.levels)

    steps = depth

    @property
    def nodes(self) -> int:
        """Number of nodes to verify."""
        return sum(self.levels)

    def begin(self, budget: int) -> int:
        """Begin a round; return its number of steps, 0 if drafting does not pay."""
        best, self.levels, self._taken = 1 / self.costs.plain_ms, [], 0
        for frontier in self._frontiers:
            ranked = self._ranked(self.expected_chances(budget, frontier))
            verify_ms = [self.costs.target_ms(n + 1) for n in range(len(ranked[: self.most]) + 1)]
            for depth in range(1, budget + 1):
                draft_ms = self.costs.steps_ms(depth, frontier)
                # the costs of a round, added in the order of `RoundCosts.drafted_ms`
                round_ms = [draft_ms + ms + self.costs.overhead_ms for ms in verify_ms]
                reached = [node for node in ranked if node[1] < depth][: self.most]
                count, rate = best_prefix((chance for chance, _ in reached), round_ms.__getitem__)
                if count and rate > best:
                    best, self.frontier = rate, frontier
                    levels = [level for _, level in reached[:count]]
                    self.levels = [levels.count(level) for level in range(max(levels) + 1)]
        if not self._backoff.drafts(bool(self.levels)):
            self.levels = []
        return self.depth

    def add(self, chances_W: Sequence[float]) -> None:
        """Ignore the chances, which are unknown until the round is over."""

    def admit(self, chances_W: Sequence[float]) -> int:
        """Return the number of children that the current step samples."""
        return self.levels[self._taken] if self._taken < self.depth else 0

    def start_from(self, chances_W: Sequence[float]) -> int:
        """Return the number of nodes that the next step starts from; 0 ends the draft."""
        self._taken += 1
        return self.frontier if self._taken < self.depth else 0

    def learn(self, answer: Any, accepted: int) -> None:
        """End the round and update the estimates.

        answer: for each level the chances of its likeliest nodes, in descending order.
        """
        reached, expected = 1.0, 0.0
        for level, rates in enumerate(self._shares_L):
            drafted = level < self.depth
            known = list(answer[level][: self.width]) if drafted else []
            rates.update(known, reached * drafted)
            expected += sum(known[: self.levels[level]]) if drafted else 0.0
            reached = sum(known[: self.frontier])
        self.trust.update(accepted * bool(self.levels), expected)
        self.levels = []

    def expected_chances(self, depth: int, frontier: int) -> list[list[float]]:
        """Return the expected chances [level][rank] if steps start from `frontier` nodes."""
        while len(self._shares_L) < depth:
            self._shares_L.append(LevelRates(self.width))
        levels: list[list[float]] = []
        above, reached, expected = [1.0], 1.0, self._first
        for rates in self._shares_L[:depth]:
            if levels:
                # in a level without rounds each node branches like the tip
                children = [node * child for node in above for child in levels[0]]
                expected = sorted(children, reverse=True)[: self.width]
            shares = rates.values_with([chance / reached for chance in expected])
            # a node is never likelier than its parent
            levels.append([min(reached * share, above[0]) for share in shares])
            above = levels[-1][:frontier]
            reached = sum(above)
        return levels

    def _ranked(self, chances_LW: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
        """Return (expected acceptances, level) of the nodes, likeliest first."""
        nodes = [
            (-chance, level)
            for level, chances_W in enumerate(chances_LW)
            for chance in chances_W[: self.branching ** (level + 1)]
        ]
        trust = self.trust.value
        return [(trust * -chance, level) for chance, level in sorted(nodes)]
