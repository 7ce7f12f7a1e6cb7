"""How large a tree a row drafts next, from its past rounds: for devices that the host runs ahead
of, where a look at the tree costs a wait, and for batches, whose rounds are as wide as their widest
tree.

Elsewhere a tree is weighed while it grows (decoding/drafters/trees/ranked.py,
decoding/stopping/marginal_gain.py). Here the numbers that would decide are read after the round,
with the accepted lengths: for each level the chances of its likeliest nodes, which are their path
probabilities. Their means over past rounds say what a tree of so many levels and nodes gains, the
measured costs what it takes, and the size with the most expected tokens a millisecond is drafted.
Where a step costs more the more nodes it starts from, the number of these (its frontier) is chosen
with the size, each number by the rounds that had it. Estimates are trusted as far as they came
true. Everything is the row's own, so its output does not depend on other rows.

Shapes: L levels, W nodes of a level whose chances are known.
"""

from collections.abc import Sequence

from decoding.interfaces import RoundCosts
from decoding.stopping.base import Tries


class _Seen:
    """What rounds saw whose steps had one frontier, older ones for less."""

    def __init__(self) -> None:
        self.sums: list[list[float]] = []  # of the chances, by level and by rank in it
        self.rounds: list[float] = []  # that saw the level

    def reach(self, depth: int, width: int) -> None:
        """Have at least so many levels."""
        for _ in range(depth - len(self.sums)):
            self.sums.append([0.0] * width)
            self.rounds.append(0.0)

    def discount(self, share: float) -> None:
        """A round is over."""
        self.sums = [[share * x for x in sums] for sums in self.sums]
        self.rounds = [share * rounds for rounds in self.rounds]

    def add(self, level: int, chances_W: Sequence[float]) -> None:
        """The round saw this of a level."""
        self.sums[level] = [
            x + chance for x, chance in zip(self.sums[level], chances_W, strict=True)
        ]
        self.rounds[level] += 1


class TreeSize:
    """The decisions of one row."""

    # of what was seen, every round: a row that gave up drafting, or a level, tries again some day
    DISCOUNT = 0.97
    WEIGHT = 4.0  # rounds that what is thought of a level before it was seen stands for
    # the chance of the best token at first; the next one has this share of what is left, and so on
    FIRST = 0.75

    def __init__(
        self,
        costs: RoundCosts | None,
        width: int,
        branching: int | None = None,
        frontiers: Sequence[int] = (),
    ) -> None:
        """costs: None where the number of nodes is fixed. width: W. branching: children that a node
        has at most; None: as many as a level.
        frontiers: numbers of a level's nodes, fewest first, that the next step may start from, of
        which one is chosen for a round; none: all nodes, and no step costs more for them.
        """
        self.costs, self.width, self.branching = costs, width, branching or width
        self._tries = Tries(costs) if costs is not None else None
        self._seen = {number: _Seen() for number in frontiers or (width,)}
        self._forward_ms: list[float] = []  # and the rest of a round, by nodes
        self._promised = self._kept = self.WEIGHT
        self.chosen: list[int] = []  # nodes of each level in the round that began
        self.frontier = max(self._seen)  # that each of its steps but the first starts from

    @property
    def trust(self) -> float:
        """Accepted over promised tokens."""
        return self._kept / self._promised

    def choose(self, depth: int, most: int) -> list[int]:
        """Nodes by level of the tree to draft, at most `most` on at most `depth` levels; none where
        drafting does not pay.
        """
        if self.costs is None:
            self.chosen = self._split(self._likeliest(self._chances(depth), depth, most), depth)
            return self.chosen
        best, self.chosen = 1 / self.costs.plain_ms, []
        for frontier in self._seen:
            levels = self._chances(depth, frontier)
            for deepest in range(1, depth + 1):
                ranked = self._likeliest(levels, deepest, most)
                rate, taken = self._most_worth(ranked, self.costs.steps_ms(deepest, frontier))
                if rate > best:
                    best, self.chosen, self.frontier = (
                        rate,
                        self._split(ranked[:taken], deepest),
                        frontier,
                    )
        if self._tries is not None and not self._tries(bool(self.chosen)):
            self.chosen = []
        return self.chosen

    def _most_worth(self, ranked: list[tuple[float, int]], draft_ms: float) -> tuple[float, int]:
        """(tokens a millisecond, how many) of the first nodes whose verification promises most,
        after such a draft.
        """
        assert self.costs is not None
        for nodes in range(len(self._forward_ms), len(ranked) + 1):
            self._forward_ms.append(self.costs.drafted_ms(0.0, nodes))
        tokens, best, taken = 1.0, 0.0, 0
        for count, (chance, _) in enumerate(ranked, 1):
            tokens += self.trust * chance
            rate = tokens / (draft_ms + self._forward_ms[count])
            if rate > best:
                best, taken = rate, count
        return best, taken

    def _likeliest(
        self, levels: list[list[float]], depth: int, most: int
    ) -> list[tuple[float, int]]:
        """(chance, level) of the `most` likeliest nodes down to this depth."""
        nodes = [
            (chance, n) for n in range(depth) for chance in levels[n][: self.branching ** (n + 1)]
        ]
        return sorted(nodes, key=lambda node: (-node[0], node[1]))[:most]

    def _split(self, nodes: list[tuple[float, int]], depth: int) -> list[int]:
        """How many nodes each level has, down to the deepest that has any."""
        counts = [0] * depth
        for _, level in nodes:
            counts[level] += 1
        return counts[: max((level + 1 for _, level in nodes), default=0)]

    def learn(self, chances_LW: Sequence[Sequence[float]], accepted: int) -> None:
        """The round is over. chances_LW: of at least the levels drafted, likeliest first; fewer
        than W may be known.
        """
        for known in self._seen.values():
            known.discount(self.DISCOUNT)
        promised = 0.0
        for level, count in enumerate(self.chosen):
            seen = [
                *chances_LW[level][: self.width],
                *[0.0] * (self.width - len(chances_LW[level])),
            ]
            for frontier, known in self._seen.items():
                # the first step starts from the tip alone, whatever the others do
                if level == 0 or frontier == self.frontier:
                    known.add(level, seen)
            promised += sum(seen[:count])
        self._promised = self.WEIGHT + (self._promised - self.WEIGHT) * self.DISCOUNT + promised
        self._kept = (
            self.WEIGHT
            + (self._kept - self.WEIGHT) * self.DISCOUNT
            + (accepted if self.chosen else 0)
        )
        self.chosen = []

    def _chances(self, depth: int, frontier: int | None = None) -> list[list[float]]:
        """Mean chances by level, in rounds whose steps have this frontier (None: the
        most). What was not seen of a level is thought to follow the level before as the first one
        follows the tip.
        """
        frontier = frontier or max(self._seen)
        known = self._seen[frontier]
        known.reach(depth, self.width)
        levels: list[list[float]] = []
        for sums, rounds in zip(known.sums[:depth], known.rounds):
            before = self._products(levels[-1], levels[0], frontier) if levels else self._first()
            means = [
                (self.WEIGHT * b + x) / (self.WEIGHT + rounds)
                for b, x in zip(before, sums, strict=True)
            ]
            # a node's parent has no less
            levels.append([min(mean, levels[-1][0]) for mean in means] if levels else means)
        return levels

    def _first(self) -> list[float]:
        """The first level before it was seen."""
        return [self.FIRST * (1 - self.FIRST) ** rank for rank in range(self.width)]

    def _products(self, above: list[float], step: list[float], frontier: int) -> list[float]:
        """The largest products of one of the first chances of one level and a chance of another,
        both falling.
        """
        found = (
            above[i] * step[j]
            for i in range(min(frontier, self.width))
            for j in range(self.width // (i + 1))
        )
        return sorted(found, reverse=True)[: self.width]
