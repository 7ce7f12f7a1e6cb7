"""Sizes of a batch's trees, in all its rounds.

For sampled children the number of nodes of each level is settled before they are sampled
(decoding/drafters/trees/sampled_children.py). A top-k tree grows first, and the likeliest of its
nodes are proposed. Both are sized either before they grow, from past rounds, or while they grow,
from their nodes' chances. Each row has a planner (decoding/stopping/).

Shapes: B rows, L levels, W chances of a level, X children that a sampled level could have, P nodes
of a level of top-k children, K of them expanded, M nodes of the tree.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.candidates import CandidateTree
from decoding.interfaces import RoundCosts
from decoding.stopping.ahead_planner import AheadPlanner
from decoding.stopping.planner import StepPlanner

FREE = RoundCosts(0.0, (1.0,))  # any number of nodes costs the same


class PlannedBudget:
    """Sizes that are settled before the trees grow.

    Without costs a tree has a fixed number of nodes: a top-k tree takes its likeliest nodes, and a
    sampled tree distributes them over its levels according to the chances of past rounds.
    """

    def __init__(
        self,
        rows: int,
        most: int,
        frontier: int,
        costs: RoundCosts | None,
        sampled: bool,
        ahead: bool = False,
    ) -> None:
        """Plan trees of at most `most` nodes for `rows` rows.

        frontier: number of expanded nodes of a level, and of children of each. costs: None for a
        fixed number of nodes. sampled: whether children are sampled. ahead: whether the host runs
        ahead of the device, and so does not read the number of nodes.
        """
        self.most, self.sampled, self.ahead = most, sampled, ahead
        self.depths_B: list[int] = []  # limit of each row's depth in this round
        self._planners_B: Sequence[AheadPlanner | StepPlanner] = ()
        self._levels: list[Tensor] = []  # chances of the children that each level could have
        # makes a row's planner; None: the size is fixed
        self._make: Callable[[], AheadPlanner | StepPlanner] | None = None
        if sampled or costs is not None:
            branching = frontier if sampled else None
            self._make = partial(AheadPlanner, costs or FREE, most, most, branching, (frontier,))
            self.add_rows(rows)

    def add_rows(self, count: int) -> None:
        """Add planners of `count` rows that begin."""
        if self._make is not None:
            self._planners_B = [*self._planners_B, *(self._make() for _ in range(count))]

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        """Begin a round; return the depth of each row, 0 where drafting does not pay."""
        self._levels, self.depths_B = [], list(depths_B)
        if self._planners_B:
            pairs = zip(self._planners_B, depths_B, strict=True)
            self.depths_B = [planner.begin(depth) for planner, depth in pairs]
        return self.depths_B

    def admit(self, chances_BX: Tensor) -> list[int]:
        """Return how many children each row samples in the next level, likeliest first.

        chances_BX: chances of acceptance of all possible children, in descending order.
        """
        known_BX = chances_BX[:, : self.most]
        self._levels.append(F.pad(known_BX, (0, self.most - known_BX.shape[1])))
        counts_B = [planner.admit(()) for planner in self._planners_B]
        for planner in self._planners_B:
            planner.start_from(())
        return counts_B

    def more(self) -> bool:
        """Return whether any row samples another level."""
        return len(self._levels) < max(self.depths_B)

    def grow(self, scores_BP: Tensor, frontier_BK: Tensor) -> None:
        """Do nothing, as the sizes are settled before the trees grow.

        scores_BP: log path probabilities of a new level's nodes. frontier_BK: log path
        probabilities of the nodes that the next level would expand.
        """

    def settle(self, scores_BM: Tensor, real_B: Tensor) -> list[int]:
        """Return how many nodes of each row's top-k tree are proposed, likeliest first.

        scores_BM: log path probabilities of the nodes. real_B: numbers of nodes without padding. A
        host that runs ahead does not read them, and its counts may include padding.
        """
        M = scores_BM.shape[1]
        if self._planners_B:
            return [min(planner.nodes, M) for planner in self._planners_B]
        if self.ahead:
            return [min(self.most, M) if depth else 0 for depth in self.depths_B]
        return [min(self.most, count) for count in real_B.tolist()]

    def readback(self, tree: CandidateTree) -> Callable[[Tensor], Sequence[Tensor]] | None:
        """Return the `Proposal.readback` whose values `learn` needs; None if it needs none."""
        if not self._planners_B:
            return None
        levels = self._levels
        return lambda _: (torch.stack(levels, 1) if levels else tree.chances(self.most),)

    def learn(self, answers: Sequence[Any], accepted_B: Sequence[int]) -> None:
        """End the round. answers: the values of `readback`."""
        answer_B = answers[0] if answers else [()] * len(self._planners_B)
        for planner, answer, accepted in zip(self._planners_B, answer_B, accepted_B):
            planner.learn(answer, accepted)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        if self._planners_B:
            self._planners_B = [self._planners_B[row] for row in rows]


class GrowingBudget(PlannedBudget):
    """Sizes that are decided while the trees grow, from their nodes' chances."""

    _planners_B: Sequence[StepPlanner]

    def __init__(self, rows: int, most: int, costs: RoundCosts, sampled: bool) -> None:
        super().__init__(rows, most, most, None, False)
        self.sampled = sampled
        self._make = partial(StepPlanner, costs, most)
        self.add_rows(rows)

    def admit(self, chances_BX: Tensor) -> list[int]:
        """Return how many children each row samples in the next level, likeliest first."""
        (read_BX,) = devices.read(chances_BX)
        counts_B = []
        for planner, chances_X in zip(self._planners_B, read_BX, strict=True):
            counts_B.append(planner.admit(chances_X))
            planner.start_from(chances_X[: counts_B[-1]])
        return counts_B

    def more(self) -> bool:
        """Return whether any row samples another level."""
        return any(planner.continues for planner in self._planners_B)

    def grow(self, scores_BP: Tensor, frontier_BK: Tensor) -> None:
        """Add a level of top-k nodes; end the rows for which another level does not pay."""
        read = devices.read(scores_BP.exp(), frontier_BK.exp())
        for row, (planner, nodes_P, chances_K) in enumerate(
            zip(self._planners_B, *read, strict=True)
        ):
            planner.add(nodes_P)
            planner.start_from(chances_K)
            if not planner.continues:
                self.depths_B[row] = planner.steps

    def settle(self, scores_BM: Tensor, real_B: Tensor) -> list[int]:
        """Return how many nodes of each row's top-k tree are proposed, likeliest first."""
        rows = zip(self._planners_B, scores_BM.exp().tolist(), real_B.tolist(), strict=True)
        return [min(real, planner.settle(chances_M)) for planner, chances_M, real in rows]

    def readback(self, tree: CandidateTree) -> None:
        """Return None: the chances are read while the tree grows."""
