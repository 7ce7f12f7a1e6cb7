"""Sizes of the trees of a batch. A drafter keeps one budget for all rounds of a batch.

Where children are sampled, the number of nodes of each level is settled before they are sampled
(decoding/drafters/trees/sampled_children.py). Where they are the top k, a tree grows first, and the
likeliest of all its nodes are proposed. Either kind is sized before it grows, by past rounds, or
while it grows, by its own chances. Each row has a planner (decoding/stopping/planner.py).

Shapes: B rows, L levels, W reported chances of a level, X children that a sampled level could have;
for top-k trees P nodes of a level, K of them expanded next, M nodes in all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.candidates import CandidateTree
from decoding.interfaces import RoundCosts
from decoding.stopping.planner import AheadPlanner, StepPlanner

# The costs of a fixed number of nodes: each is as cheap as none.
FREE = RoundCosts(0.0, (1.0,))


class PlannedBudget:
    """Sizes that are settled before the trees grow.

    Without costs a tree has a fixed number of nodes. A top-k tree then takes the likeliest ones
    that it has; a sampled tree distributes them over its levels as past rounds suggest.
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
        """most: nodes of a tree. frontier: nodes of a level that are expanded, and their children.

        sampled: whether children are sampled. ahead: whether the host runs ahead of the device, and
        so does not read how many nodes there are.
        """
        self.most, self.sampled, self.ahead = most, sampled, ahead
        self.depths_B: list[int] = []  # of each row's tree, as far as it is known
        self._planners_B: Sequence[AheadPlanner | StepPlanner] | None = None
        self._levels: list[Tensor] = []  # chances of the children that each level could have
        if sampled or costs is not None:
            branching = frontier if sampled else None
            self._planners_B = [
                AheadPlanner(costs or FREE, most, most, branching, (frontier,)) for _ in range(rows)
            ]

    def begin(self, depths_B: Sequence[int]) -> list[int]:
        """Begin a round; return how deep each row drafts, 0 where drafting does not pay."""
        self._levels, self.depths_B = [], list(depths_B)
        if self._planners_B is not None:
            pairs = zip(self._planners_B, depths_B, strict=True)
            self.depths_B = [planner.begin(depth) for planner, depth in pairs]
        return self.depths_B

    def admit(self, chances_BX: Tensor) -> list[int]:
        """Return how many children of the next level are sampled, the likeliest first.

        chances_BX: the chances that each is accepted, in descending order.
        """
        assert self._planners_B is not None
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
        """Add a level of top-k nodes.

        scores_BP: the log path probabilities of its nodes. frontier_BK: those of the nodes that the
        next level would expand.
        """

    def settle(self, scores_BM: Tensor, real_B: Tensor) -> list[int]:
        """Return how many of each row's likeliest nodes are proposed.

        scores_BM: log path probabilities. real_B: the number of nodes; a host that runs ahead does
        not read it, and proposes some empty places.
        """
        M = scores_BM.shape[1]
        if self._planners_B is not None:
            return [min(planner.nodes, M) for planner in self._planners_B]
        if self.ahead:
            return [min(self.most, M) if depth else 0 for depth in self.depths_B]
        return [min(self.most, count) for count in real_B.tolist()]

    def readback(self, tree: CandidateTree) -> Callable[[Tensor], Sequence[Tensor]] | None:
        """Return what is read with the outcome, as `Proposal.asks`."""
        if self._planners_B is None:
            return None
        levels = self._levels
        return lambda _: (torch.stack(levels, 1) if levels else tree.chances(self.most),)

    def learn(self, answers: Sequence[Any], accepted_B: Sequence[int]) -> None:
        """End the round. answers: what `readback` requested, as lists."""
        if self._planners_B is None:
            return
        answer_B = answers[0] if answers else [()] * len(self._planners_B)
        for planner, answer, accepted in zip(self._planners_B, answer_B, accepted_B, strict=True):
            planner.learn(answer, accepted)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        if self._planners_B is not None:
            self._planners_B = [self._planners_B[row] for row in rows]


class GrowingBudget(PlannedBudget):
    """Sizes that each tree's own chances decide while it grows."""

    _planners_B: Sequence[StepPlanner]

    def __init__(self, rows: int, most: int, costs: RoundCosts, sampled: bool) -> None:
        super().__init__(rows, most, most, costs, sampled)
        self._planners_B = [StepPlanner(costs, most) for _ in range(rows)]

    def admit(self, chances_BX: Tensor) -> list[int]:
        """Return how many children of the next level are sampled, the likeliest first."""
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
        """Add a level of top-k nodes; `depths_B` ends rows that gain nothing by another level."""
        read = devices.read(scores_BP.exp(), frontier_BK.exp())
        for row, (planner, nodes_P, chances_K) in enumerate(
            zip(self._planners_B, *read, strict=True)
        ):
            planner.add(nodes_P)
            planner.start_from(chances_K)
            if not planner.continues:
                self.depths_B[row] = planner.steps

    def settle(self, scores_BM: Tensor, real_B: Tensor) -> list[int]:
        """Return how many of each row's likeliest nodes are proposed."""
        rows = zip(self._planners_B, scores_BM.exp().tolist(), real_B.tolist(), strict=True)
        return [min(real, planner.settle(chances_M)) for planner, chances_M, real in rows]

    def readback(self, tree: CandidateTree) -> None:
        """Return nothing: the chances are read while the tree grows."""
