"""Growing trees whose children are drawn: of each level as many as its budget says, before they are
drawn, the worthiest of those that could be.

The picked twins are in decoding/drafters/trees/ranked.py and decoding/drafters/trees/graph.py: they
see more nodes than they propose and take the likeliest ones of the whole tree, which drawn children
do not allow (decoding/drafters/trees/sampled_children.py). Here a level's nodes are settled when
the next level is drawn. The likeliest of them, as they were drawn, are expanded. In a graph a node
that is one with another is expanded without the model: its children are drawn from what the model
said there, by numbers of their own, as a draw must not serve two nodes.

Shapes: B rows, P nodes expanded, K children of a node, X = P K children that a level could have, M
nodes that it gets, or nodes seen.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.budgets import PlannedBudget
from decoding.drafters.trees.candidates import NONE, CandidateTree
from decoding.drafters.trees.graph_device import DeviceGraph
from decoding.drafters.trees.sampled_children import ChildSampler, child_chances
from decoding.interfaces import Proposal

# tokens, parents, n: logits of the last n of these nodes behind the tip
Run = Callable[[Tensor, Tensor, int], Tensor]


class SampledTree:
    """One round's tree."""

    def __init__(self, draws: ChildSampler, run: Run, frontier: int, budget: PlannedBudget) -> None:
        """frontier: nodes of a level that are expanded, and children that each gets at most."""
        self.draws, self.run, self.frontier, self.budget = draws, run, frontier, budget
        tip_B1 = draws.tips()
        self.seen = CandidateTree.none(len(tip_B1), tip_B1.device, draws.dtype)
        # The number of the distribution that a node's children are drawn from; 0, the tip's, stands
        # for none.
        self._rows_BM = self._fed_BN = self._fed_parents_BN = self.seen.tokens_BM
        self._counts: list[list[int]] = []

    def grow(self) -> None:
        """Draw level after level."""
        at_BP = self.draws.tips() - 1
        above_BP = torch.zeros_like(at_BP, dtype=self.draws.dtype)
        while True:
            first, reached_BM = self._level(at_BP, above_BP)
            if not self.budget.more():
                return
            at_BP, above_BP = self._expanded(first, reached_BM)

    def _level(self, at_BP: Tensor, above_BP: Tensor) -> tuple[int, Tensor]:
        """Draw children of the nodes at these places, reached with these chances (logarithms): the
        place of the first one, and the chances (B, M) to reach what is behind each.
        """
        rows_BP = F.pad(self._rows_BM, (1, 0)).gather(1, at_BP + 1)
        q_BPV = self.draws.q(rows_BP)
        tokens_BPK, probs_BPK = self._draw(q_BPV)
        K = tokens_BPK.shape[2]
        worth_BPK, reached_BPK = child_chances(q_BPV, probs_BPK)
        # Siblings stay in their order: a later one is worth less, and equal ones keep their places.
        best = (worth_BPK + above_BP[:, :, None]).flatten(1).sort(descending=True, stable=True)
        counts_B = [
            min(count, best.indices.shape[1]) for count in self.budget.admit(best.values.exp())
        ]
        M = max(counts_B)
        drawn_BM = (
            torch.arange(M, device=at_BP.device) < devices.tensor(counts_B, at_BP.device)[:, None]
        )
        slots_BM, worth_BM = best.indices[:, :M], best.values[:, :M].masked_fill(~drawn_BM, NONE)
        first = self.seen.tokens_BM.shape[1]
        self._counts.append(counts_B)
        self.seen.add(
            tokens_BPK.flatten(1).gather(1, slots_BM),
            at_BP.gather(1, slots_BM // K),
            worth_BM,
            torch.full_like(slots_BM, len(self._counts)),
        )
        self._rows_BM = F.pad(self._rows_BM, (0, M))
        reached_BM = (reached_BPK + above_BP[:, :, None]).flatten(1).gather(1, slots_BM)
        return first, reached_BM.masked_fill(worth_BM == NONE, NONE)

    def _draw(self, q_BPV: Tensor) -> tuple[Tensor, Tensor]:
        """Children of a level's nodes and their probabilities, (B, P, K)."""
        return self.draws.children(q_BPV, self.frontier, len(self._counts))

    def _expanded(self, first: int, reached_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Expand the likeliest of the nodes from `first` on: their places and their chances, (B,
        P).
        """
        top = reached_BM.topk(min(self.frontier, reached_BM.shape[1]), dim=-1)
        nodes_BP = first + top.indices
        self._feed(nodes_BP, top.values > NONE)
        return nodes_BP, top.values

    def _feed(self, nodes_BP: Tensor, wanted_BP: Tensor) -> None:
        """Have the model say what may follow these nodes; those that are not wanted ride along."""
        P, fed = nodes_BP.shape[1], self._fed_BN.shape[1]
        above_BP = self.seen.parents_BM.gather(1, nodes_BP)
        # row r + 1 is of fed node r
        fed_above_BP = F.pad(self._rows_BM, (1, 0)).gather(1, above_BP + 1) - 1
        self._fed_BN = torch.cat((self._fed_BN, self.seen.tokens_BM.gather(1, nodes_BP)), 1)
        self._fed_parents_BN = torch.cat((self._fed_parents_BN, fed_above_BP), 1)
        self.draws.add(self.run(self._fed_BN, self._fed_parents_BN, P))
        rows_BP = torch.arange(fed + 1, fed + P + 1, device=nodes_BP.device).expand_as(nodes_BP)
        self._set_rows(nodes_BP, rows_BP, wanted_BP)

    def _set_rows(self, nodes_BP: Tensor, rows_BP: Tensor, which_BP: Tensor) -> None:
        """The children of these nodes are drawn from these rows, where `which_BP` says so."""
        rows_BP = torch.where(which_BP, rows_BP, self._rows_BM.gather(1, nodes_BP))
        self._rows_BM = self._rows_BM.scatter(1, nodes_BP, rows_BP)

    def proposal(self, ahead: bool) -> Proposal:
        """All drawn nodes. ahead: with as many places as there may be nodes, without asking how
        many there are.
        """
        real_BM = self.seen.scores_BM > NONE
        real_B = real_BM.sum(1)
        counts_B = (
            [sum(levels) for levels in zip(*self._counts, strict=True)]
            if ahead
            else real_B.tolist()
        )
        order_BM = real_BM.long().sort(descending=True, stable=True).indices
        tokens_BN, parents_BN, seen_BN = self.seen.kept(order_BM, real_B, max(counts_B))
        above_BN = self.seen.parents_BM.gather(1, seen_BN)
        q_BNV = self.draws.q(F.pad(self._rows_BM, (1, 0)).gather(1, above_BN + 1))
        proposal = Proposal(
            tokens_BN, counts_B, parents_BN, q_BNV, len(self._counts), siblings=self.frontier
        )
        proposal.readback = self.budget.readback(self.seen)
        return proposal


class SampledGraph(SampledTree):
    """A drawn tree whose equal nodes are expanded once."""

    def __init__(
        self,
        draws: ChildSampler,
        run: Run,
        frontier: int,
        budget: PlannedBudget,
        graph: DeviceGraph,
    ) -> None:
        super().__init__(draws, run, frontier, budget)
        self.graph = graph
        self._own = 1  # nodes of a level that the model has run over; merged ones are behind them

    def _draw(self, q_BPV: Tensor) -> tuple[Tensor, Tensor]:
        level, own_BPV, merged_BPV = len(self._counts), q_BPV[:, : self._own], q_BPV[:, self._own :]
        sides = [self.draws.children(own_BPV, self.frontier, level)]
        if merged_BPV.shape[1]:
            sides.append(self.draws.children(merged_BPV, self.frontier, level, self.frontier))
        tokens_BPK, probs_BPK = (torch.cat(both, 1) for both in zip(*sides, strict=True))
        return tokens_BPK, probs_BPK

    def _expanded(self, first: int, reached_BM: Tensor) -> tuple[Tensor, Tensor]:
        merged_BM = self.graph.merge(self.seen, first)
        own_BP, above_BP = super()._expanded(first, reached_BM.masked_fill(merged_BM, NONE))
        again = reached_BM.masked_fill(~merged_BM, NONE).topk(above_BP.shape[1], dim=-1)
        nodes_BP = first + again.indices
        rows_BP = self._rows_BM.gather(1, self.graph.twins_BM.gather(1, nodes_BP))
        # a twin that was not expanded has nothing to say
        known_BP = (again.values > NONE) & (rows_BP > 0)
        self._set_rows(nodes_BP, rows_BP, known_BP)
        self._own = own_BP.shape[1]
        reached_BP = torch.cat((above_BP, again.values.masked_fill(~known_BP, NONE)), 1)
        return torch.cat((own_BP, nodes_BP), 1), reached_BP
