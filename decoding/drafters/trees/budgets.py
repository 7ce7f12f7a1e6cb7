"""How large the trees of a batch grow. A drafter holds one budget for all rounds of a batch, which
learns what came of each.

Where children are drawn, the number of nodes of each level is said before they are drawn (why:
decoding/drafters/trees/sampled_children.py). Where they are picked, a tree grows first, and of all
the nodes that it saw the likeliest are proposed. Each kind is sized in three ways: by a fixed
number of nodes; by measured costs and the rounds before (decoding/drafters/trees/sizing.py), where
a look at a growing tree costs a wait, and in a batch, whose rounds are as wide as their widest
tree; else by measured costs and the tree itself while it grows
(decoding/stopping/marginal_gain.py).

Shapes: B rows, L levels, W reported probabilities of a level, X children that a drawn level could
have; of picked trees P nodes of a level, K of them expanded next, M nodes seen.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.candidates import Seen
from decoding.drafters.trees.sizing import TreeSize
from decoding.interfaces import RoundCosts
from decoding.stopping.marginal_gain import Worth


class TreeBudget(Protocol):
    """The decisions of the rows of a batch."""

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        """A round begins: how deep each row may draft, at most `depths_B`; 0 where drafting does
        not pay.
        """
        ...

    def learn(self, answers: Sequence[Any], accepted_B: Sequence[int]) -> None:
        """The round is over. answers: what it asked for, as lists; nothing where it was
        not asked.
        """
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


@runtime_checkable
class DrawnBudget(TreeBudget, Protocol):
    """Of trees whose children are drawn."""

    def admit(self, chances_BX: Tensor) -> list[int]:
        """How many of the next level's children are drawn. chances_BX: that each is reached and
        passes, largest first.
        """
        ...

    def more(self) -> bool:
        """Whether any row wants another level."""
        ...

    def asks(self) -> tuple[Tensor, ...]:
        """What is to be read with the outcome."""
        ...


@runtime_checkable
class PickedBudget(TreeBudget, Protocol):
    """Of trees whose children are picked."""

    depths_B: list[int]  # how deep each row's tree is to be, as far as is known

    def saw(self, scores_BP: Tensor, frontier_BK: Tensor) -> None:
        """The next level has nodes with these path scores (logarithms), and would be expanded from
        those of `frontier_BK`.
        """
        ...

    def settle(self, scores_BM: Tensor, real_B: Tensor) -> list[int]:
        """The trees are grown: how many of each row's likeliest nodes are proposed. No more than
        its `real_B` are; where the host does not look at those, the number is of places, some of
        which stay empty. scores_BM: path scores of all nodes, of no node the score `NONE`.
        """
        ...

    def asks(self, seen: Seen) -> Callable[[Tensor], Sequence[Tensor]] | None:
        """What is to be read with the outcome, as `Proposal.asks`."""
        ...


class _Sizes:
    """By the rounds before."""

    def __init__(
        self, rows: int, most: int, branching: int | None, costs: RoundCosts | None
    ) -> None:
        self.most = most
        self.depths_B: list[int] = []
        self._sizes_B = [TreeSize(costs, most, branching) for _ in range(rows)]

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        pairs = zip(self._sizes_B, depths_B, strict=True)
        self.depths_B = [len(size.choose(depth, self.most)) for size, depth in pairs]
        return self.depths_B

    def learn(self, answers: Sequence[Any], accepted_B: Sequence[int]) -> None:
        chances_BLW = answers[0] if answers else [()] * len(self._sizes_B)
        for size, chances_LW, accepted in zip(self._sizes_B, chances_BLW, accepted_B, strict=True):
            size.learn(chances_LW, accepted)

    def select(self, rows: Sequence[int]) -> None:
        self._sizes_B = [self._sizes_B[row] for row in rows]


class _Worths:
    """By the tree itself while it grows."""

    def __init__(self, worth_B: list[Worth], most: int) -> None:
        self.most = most
        self.depths_B: list[int] = []
        self._worth_B = worth_B

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        self.depths_B = [
            depth * worth.drafts() for worth, depth in zip(self._worth_B, depths_B, strict=True)
        ]
        return self.depths_B

    def learn(self, answers: Sequence[Any], accepted_B: Sequence[int]) -> None:
        for worth, accepted in zip(self._worth_B, accepted_B, strict=True):
            worth.learn(accepted)

    def select(self, rows: Sequence[int]) -> None:
        self._worth_B = [self._worth_B[row] for row in rows]


class DrawnBySize(_Sizes):
    """So many nodes of each level as paid in past rounds, or without costs as make up a fixed
    number of nodes.
    """

    def __init__(
        self, rows: int, most: int, branching: int, costs: RoundCosts | None = None
    ) -> None:
        """most: nodes of a tree, or with costs the most. branching: children of a node at most."""
        super().__init__(rows, most, branching, costs)
        self._levels: list[Tensor] = []

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        self._levels = []
        return super().begin(depths_B)

    def admit(self, chances_BX: Tensor) -> list[int]:
        level, told_BX = len(self._levels), chances_BX[:, : self.most]
        self._levels.append(F.pad(told_BX, (0, self.most - told_BX.shape[1])))
        return [size.chosen[level] if level < len(size.chosen) else 0 for size in self._sizes_B]

    def more(self) -> bool:
        return len(self._levels) < max(len(size.chosen) for size in self._sizes_B)

    def asks(self) -> tuple[Tensor, ...]:
        return (torch.stack(self._levels, 1),)


class DrawnByWorth(_Worths):
    """As many nodes and levels as this round's own tree makes worth their cost: each level's
    children are weighed before they are drawn.
    """

    def __init__(self, rows: int, most: int, costs: RoundCosts) -> None:
        super().__init__([Worth(costs) for _ in range(rows)], most)

    def _goes_on(self, row: int) -> bool:
        worth = self._worth_B[row]
        return not worth.ended and worth.steps < self.depths_B[row] and worth.verified < self.most

    def admit(self, chances_BX: Tensor) -> list[int]:
        (read_BX,) = devices.read(chances_BX)
        going = [self._goes_on(row) for row in range(len(read_BX))]
        return [
            sum(worth.admit(chances_X[: self.most - worth.verified])) if goes_on else 0
            for worth, chances_X, goes_on in zip(self._worth_B, read_BX, going, strict=True)
        ]

    def more(self) -> bool:
        return any(self._goes_on(row) for row in range(len(self._worth_B)))

    def asks(self) -> tuple[Tensor, ...]:
        return ()


class PickedByNumber:
    """A fixed number of nodes, or as many as there are."""

    def __init__(self, most: int, ahead: bool) -> None:
        """ahead: the host does not look at how many there are."""
        self.most, self.ahead = most, ahead
        self.depths_B: list[int] = []

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        self.depths_B = list(depths_B)
        return self.depths_B

    def saw(self, scores_BP: Tensor, frontier_BK: Tensor) -> None:
        """As deep as may be, whatever is seen."""

    def settle(self, scores_BM: Tensor, real_B: Tensor) -> list[int]:
        if self.ahead:
            return [min(self.most, scores_BM.shape[1]) if depth else 0 for depth in self.depths_B]
        return [min(self.most, count) for count in real_B.tolist()]

    def asks(self, seen: Seen) -> None:
        return None

    def learn(self, answers: Sequence[Any], accepted_B: Sequence[int]) -> None:
        """Nothing to learn."""

    def select(self, rows: Sequence[int]) -> None:
        """Rows have nothing of their own."""


class PickedBySize(_Sizes):
    """So many levels and nodes as paid in past rounds."""

    def __init__(self, rows: int, most: int, costs: RoundCosts) -> None:
        super().__init__(rows, most, None, costs)

    def saw(self, scores_BP: Tensor, frontier_BK: Tensor) -> None:
        """The depth is settled."""

    def settle(self, scores_BM: Tensor, real_B: Tensor) -> list[int]:
        return [min(sum(size.chosen), scores_BM.shape[1]) for size in self._sizes_B]

    def asks(self, seen: Seen) -> Callable[[Tensor], Sequence[Tensor]]:
        return lambda _: (seen.chances(self.most),)


class PickedByWorth(_Worths):
    """As many levels as promise more than they cost, and of the finished tree as many nodes as
    promise most.
    """

    def __init__(self, rows: int, most: int, costs: RoundCosts) -> None:
        super().__init__([Worth(costs, most) for _ in range(rows)], most)

    def saw(self, scores_BP: Tensor, frontier_BK: Tensor) -> None:
        chances_BP, mass_B = devices.read(scores_BP.exp(), frontier_BK.exp().sum(1))
        for worth, chances_P, mass, depth in zip(
            self._worth_B, chances_BP, mass_B, self.depths_B, strict=True
        ):
            if worth.steps < depth:
                worth.saw(chances_P, mass)
        pairs = zip(self._worth_B, self.depths_B, strict=True)
        self.depths_B = [worth.steps if worth.ended else depth for worth, depth in pairs]

    def settle(self, scores_BM: Tensor, real_B: Tensor) -> list[int]:
        counts_B = [min(self.most, count) for count in real_B.tolist()]
        pairs = zip(self._worth_B, scores_BM.exp().tolist(), strict=True)
        settled_B = [worth.settle(chances_M) for worth, chances_M in pairs]
        return [min(pair) for pair in zip(counts_B, settled_B, strict=True)]

    def asks(self, seen: Seen) -> None:
        return None
