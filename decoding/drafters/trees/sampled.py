"""Growing trees whose children are sampled.

How many children a level gets, and at which nodes, is settled before they are sampled. Trees of
top-k children (decoding/drafters/trees/ranked.py) instead propose the likeliest nodes of a finished
tree, which would bias sampled trees (decoding/drafters/trees/sampled_children.py). The likeliest
sampled nodes are expanded. In a graph a node that is merged with another one is expanded without
the model: its children are sampled from the distribution at the other node, with independent noise,
since a sample must not serve two nodes.

Shapes: B rows, P expanded nodes, K children of a node, X = P K children that a level could have, M
children that it gets, or nodes of the tree.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.budgets import PlannedBudget
from decoding.drafters.trees.candidates import NONE, CandidateTree
from decoding.drafters.trees.node_graph import NodeGraph
from decoding.drafters.trees.sampled_children import ChildSampler, child_chances
from decoding.interfaces import Proposal

# (tokens, parents, n) -> logits after the last n of these nodes
Run = Callable[[Tensor, Tensor, int], Tensor]


class SampledTree:
    """The sampled trees of one round, one per row."""

    def __init__(
        self, children: ChildSampler, run: Run, frontier: int, budget: PlannedBudget
    ) -> None:
        """Start from the tips.

        frontier: number of expanded nodes of a level, and maximum number of children of each.
        """
        self.children, self.run, self.frontier, self.budget = children, run, frontier, budget
        tip_B1 = children.tips()
        self.tree = CandidateTree.none(len(tip_B1), tip_B1.device, children.dtype)
        # row of the distribution that a node's children are sampled from; 0, the tip's, if none
        self._rows_BM = self._read_BN = self._read_parents_BN = self.tree.tokens_BM
        self._counts: list[list[int]] = []

    def grow(self) -> None:
        """Sample level after level, until the budget ends the trees."""
        nodes_BP = self.children.tips() - 1
        above_BP = torch.zeros_like(nodes_BP, dtype=self.children.dtype)
        while True:
            first, reached_BM = self._add_level(nodes_BP, above_BP)
            if not self.budget.more():
                return
            nodes_BP, above_BP = self._expand(first, reached_BM)

    def _add_level(self, nodes_BP: Tensor, above_BP: Tensor) -> tuple[int, Tensor]:
        """Sample children of these nodes.

        above_BP: log chances that the nodes are accepted. Returns the place of the first child and,
        for each child, the log chance (B, M) that it is accepted.
        """
        rows_BP = F.pad(self._rows_BM, (1, 0)).gather(1, nodes_BP + 1)
        q_BPV = self.children.q(rows_BP)
        tokens_BPK, probs_BPK = self._sample(q_BPV)
        K = tokens_BPK.shape[2]
        before_BPK, after_BPK = child_chances(q_BPV, probs_BPK)
        # Siblings keep their order: the chance of a later one is lower, and the sort is stable.
        best = (before_BPK + above_BP[:, :, None]).flatten(1).sort(descending=True, stable=True)
        counts_B = [
            min(count, best.indices.shape[1]) for count in self.budget.admit(best.values.exp())
        ]
        M = max(counts_B)
        slots_BM = best.indices[:, :M]
        is_child_BM = (
            torch.arange(M, device=nodes_BP.device)
            < devices.tensor(counts_B, nodes_BP.device)[:, None]
        )
        scores_BM = best.values[:, :M].masked_fill(~is_child_BM, NONE)
        first = self.tree.tokens_BM.shape[1]
        self._counts.append(counts_B)
        self.tree.add(
            tokens_BPK.flatten(1).gather(1, slots_BM),
            nodes_BP.gather(1, slots_BM // K),
            scores_BM,
            torch.full_like(slots_BM, len(self._counts)),
        )
        self._rows_BM = F.pad(self._rows_BM, (0, M))
        reached_BM = (after_BPK + above_BP[:, :, None]).flatten(1).gather(1, slots_BM)
        return first, reached_BM.masked_fill(scores_BM == NONE, NONE)

    def _sample(self, q_BPV: Tensor) -> tuple[Tensor, Tensor]:
        """Return children of a level's nodes and their probabilities, (B, P, K)."""
        return self.children.sample(q_BPV, self.frontier, len(self._counts))

    def _expand(self, first: int, reached_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Expand the likeliest nodes from `first` on; return places and log chances (B, P)."""
        top = reached_BM.topk(min(self.frontier, reached_BM.shape[1]), dim=-1)
        nodes_BP = first + top.indices
        self._read(nodes_BP, top.values > NONE)
        return nodes_BP, top.values

    def _read(self, nodes_BP: Tensor, is_real_BP: Tensor) -> None:
        """Run the model over these nodes and store their distributions; padding gets none."""
        P, start = nodes_BP.shape[1], self._read_BN.shape[1]
        above_BP = self.tree.parents_BM.gather(1, nodes_BP)
        # row r + 1 belongs to input r
        inputs_BP = F.pad(self._rows_BM, (1, 0)).gather(1, above_BP + 1) - 1
        self._read_BN = torch.cat((self._read_BN, self.tree.tokens_BM.gather(1, nodes_BP)), 1)
        self._read_parents_BN = torch.cat((self._read_parents_BN, inputs_BP), 1)
        self.children.add(self.run(self._read_BN, self._read_parents_BN, P))
        rows_BP = torch.arange(start + 1, start + P + 1, device=nodes_BP.device).expand_as(nodes_BP)
        self._set_rows(nodes_BP, rows_BP, is_real_BP)

    def _set_rows(self, nodes_BP: Tensor, rows_BP: Tensor, which_BP: Tensor) -> None:
        """Set the distributions of these nodes' children where `which_BP` is true."""
        rows_BP = torch.where(which_BP, rows_BP, self._rows_BM.gather(1, nodes_BP))
        self._rows_BM = self._rows_BM.scatter(1, nodes_BP, rows_BP)

    def proposal(self, ahead: bool) -> Proposal:
        """Propose all sampled nodes.

        ahead: whether to pad to the largest possible number of nodes instead of reading the number.
        """
        is_real_BM = self.tree.scores_BM > NONE
        real_B = is_real_BM.sum(1)
        counts_B = (
            [sum(levels) for levels in zip(*self._counts, strict=True)]
            if ahead
            else real_B.tolist()
        )
        order_BM = is_real_BM.long().sort(descending=True, stable=True).indices
        tokens_BN, parents_BN, places_BN = self.tree.kept(order_BM, real_B, max(counts_B))
        above_BN = self.tree.parents_BM.gather(1, places_BN)
        return Proposal(
            tokens_BN,
            counts_B,
            parents_BN,
            self.children.q(F.pad(self._rows_BM, (1, 0)).gather(1, above_BN + 1)),
            len(self._counts),
            siblings=self.frontier,
            readback=self.budget.readback(self.tree),
        )


class SampledGraph(SampledTree):
    """Sampled trees in which equal nodes are expanded once."""

    def __init__(
        self,
        children: ChildSampler,
        run: Run,
        frontier: int,
        budget: PlannedBudget,
        graph: NodeGraph,
    ) -> None:
        super().__init__(children, run, frontier, budget)
        self.graph = graph
        self._num_read = 1  # nodes of a level that the model has read, followed by merged ones

    def _sample(self, q_BPV: Tensor) -> tuple[Tensor, Tensor]:
        level, n = len(self._counts), self._num_read
        sides = [self.children.sample(q_BPV[:, :n], self.frontier, level)]
        if q_BPV.shape[1] > n:
            sides.append(self.children.sample(q_BPV[:, n:], self.frontier, level, self.frontier))
        tokens_BPK, probs_BPK = (torch.cat(both, 1) for both in zip(*sides, strict=True))
        return tokens_BPK, probs_BPK

    def _expand(self, first: int, reached_BM: Tensor) -> tuple[Tensor, Tensor]:
        merged_BM = self.graph.merge(self.tree, first)
        read_BP, above_BP = super()._expand(first, reached_BM.masked_fill(merged_BM, NONE))
        top = reached_BM.masked_fill(~merged_BM, NONE).topk(above_BP.shape[1], dim=-1)
        nodes_BP = first + top.indices
        rows_BP = self._rows_BM.gather(1, self.graph.twins_BM.gather(1, nodes_BP))
        # a twin that was not expanded has no distribution
        is_known_BP = (top.values > NONE) & (rows_BP > 0)
        self._set_rows(nodes_BP, rows_BP, is_known_BP)
        self._num_read = read_BP.shape[1]
        reached_BP = torch.cat((above_BP, top.values.masked_fill(~is_known_BP, NONE)), 1)
        return torch.cat((read_BP, nodes_BP), 1), reached_BP
