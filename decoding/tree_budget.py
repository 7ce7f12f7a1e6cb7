"""How many nodes of each level a drawn tree gets: said of every level before its nodes are drawn (why: decoding/draws.py).

`BySize` says it before the round, from the rounds before (decoding/tree_size.py): for a fixed number of nodes, and by measured costs where the
host runs ahead of the device. `ByWorth` weighs each level's children by measured costs where the host waits anyway (decoding/worth.py).

Shapes: B rows, X children that a level could have, L levels, W chances of a level that are told.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import cuda
from decoding.stopping import RoundCosts
from decoding.tree_size import TreeSize
from decoding.worth import Worth


class TreeBudget(Protocol):
    """The decisions of the rows of a batch."""

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        """A round begins: how deep each row may draft, at most `depths_B`; 0 where drafting does not pay."""
        ...

    def admit(self, chances_BX: Tensor) -> list[int]:
        """How many of the next level's children are drawn. chances_BX: that each is reached and passes, largest first."""
        ...

    def more(self) -> bool:
        """Whether any row wants another level."""
        ...

    def asks(self) -> tuple[Tensor, ...]:
        """What is to be read with the outcome."""
        ...

    def learn(self, answers: Sequence[Any], accepted_B: Sequence[int]) -> None:
        """The round is over. answers: what it asked for, as lists; nothing where it was not asked."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


class BySize:
    """So many nodes of each level as paid in past rounds."""

    def __init__(self, rows: int, most: int, branching: int, costs: RoundCosts | None = None) -> None:
        """most: nodes of a tree, or with costs the most. branching: children of a node at most."""
        self.most = most
        self._sizes_B = [TreeSize(costs, most, branching) for _ in range(rows)]
        self._levels: list[Tensor] = []

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        self._levels = []
        pairs = zip(self._sizes_B, depths_B, strict=True)
        return [len(size.choose(depth, self.most)) for size, depth in pairs]

    def admit(self, chances_BX: Tensor) -> list[int]:
        level, told_BX = len(self._levels), chances_BX[:, : self.most]
        self._levels.append(F.pad(told_BX, (0, self.most - told_BX.shape[1])))
        return [size.chosen[level] if level < len(size.chosen) else 0 for size in self._sizes_B]

    def more(self) -> bool:
        return len(self._levels) < max(len(size.chosen) for size in self._sizes_B)

    def asks(self) -> tuple[Tensor, ...]:
        return (torch.stack(self._levels, 1),)

    def learn(self, answers: Sequence[Any], accepted_B: Sequence[int]) -> None:
        chances_BLW = answers[0] if answers else [()] * len(self._sizes_B)
        for size, chances_LW, accepted in zip(self._sizes_B, chances_BLW, accepted_B, strict=True):
            size.learn(chances_LW, accepted)

    def select(self, rows: Sequence[int]) -> None:
        self._sizes_B = [self._sizes_B[row] for row in rows]


class ByWorth:
    """As many nodes and levels as this round's own tree makes worth their cost."""

    def __init__(self, rows: int, most: int, costs: RoundCosts) -> None:
        self.most = most
        self._worth_B = [Worth(costs) for _ in range(rows)]
        self._depths_B: list[int] = []

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        self._depths_B = [depth * worth.drafts() for worth, depth in zip(self._worth_B, depths_B, strict=True)]
        return self._depths_B

    def _goes_on(self, row: int) -> bool:
        worth = self._worth_B[row]
        return not worth.ended and worth.steps < self._depths_B[row] and worth.verified < self.most

    def admit(self, chances_BX: Tensor) -> list[int]:
        (read_BX,) = cuda.read(chances_BX)
        going = [self._goes_on(row) for row in range(len(read_BX))]
        return [
            sum(worth.admit(chances_X[: self.most - worth.verified])) if goes_on else 0
            for worth, chances_X, goes_on in zip(self._worth_B, read_BX, going, strict=True)
        ]

    def more(self) -> bool:
        return any(self._goes_on(row) for row in range(len(self._worth_B)))

    def asks(self) -> tuple[Tensor, ...]:
        return ()

    def learn(self, answers: Sequence[Any], accepted_B: Sequence[int]) -> None:
        for worth, accepted in zip(self._worth_B, accepted_B, strict=True):
            worth.learn(accepted)

    def select(self, rows: Sequence[int]) -> None:
        self._worth_B = [self._worth_B[row] for row in rows]
