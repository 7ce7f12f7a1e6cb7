"""Graph-structured drafting: nodes that say the same go on together, so that the model expands each
continuation once.

Source: Gong et al. 2024, "Graph-Structured Speculative Decoding" (arXiv 2407.16207). A node whose
token and last ancestors stand elsewhere in the draft already is merged with that node: it is not
expanded, and before verification the graph is unrolled to a tree, in which it gets a copy of what
followed there. Unlikely siblings are left out and unlikely nodes stay leaves. The paper's sampled
mode takes the longest path of independent tests, which changes the distribution; here the tree is
verified exactly, as every other. Where the host runs ahead of the device, nodes are compared and
the graph is unrolled there (decoding/drafters/trees/graph_device.py). Where children are drawn
nothing is
unrolled: a merged node draws children of its own from what the model said at the other one
(decoding/drafters/trees/sampled.py).

Shapes: as in decoding/drafters/trees/ranked.py.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from decoding import devices
from decoding.drafters.trees.budgets import PlannedBudget
from decoding.drafters.trees.candidates import NONE, CandidateTree
from decoding.drafters.trees.graph_device import DeviceGraph
from decoding.drafters.trees.ranked import RankedTree
from decoding.drafters.trees.sampled import Run, SampledGraph
from decoding.drafters.trees.sampled_children import ChildSampler, are_sampled
from decoding.errors import UserError
from decoding.interfaces import Chooser, Proposal, Stopping


class GraphDrafter(RankedTree):
    """A ranked tree with merged nodes and pruned siblings. Hydra:
    `_target_: decoding.drafters.trees.graph.GraphDrafter`.

    match: ancestors that must agree, besides the token, for two nodes to be one. sibling_threshold:
    share of its best sibling's probability that a picked child needs. leaf_threshold: own
    probability that a picked node needs to be expanded. The others are RankedTree's.
    """

    def __init__(
        self,
        *arguments: Any,
        match: int = 1,
        sibling_threshold: float = 0.1,
        leaf_threshold: float = 0.05,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        if match < 0 or not 0 <= sibling_threshold <= 1 or not 0 <= leaf_threshold <= 1:
            raise UserError(
                f"match is {match}, sibling_threshold {sibling_threshold} and leaf_threshold "
                f"{leaf_threshold}; expected a number from 0 up and two shares between 0 and 1."
            )
        self.match = match
        self._least_sibling = math.log(sibling_threshold) if sibling_threshold else NONE
        self._least_leaf = math.log(leaf_threshold) if leaf_threshold else NONE
        self._endings: list[tuple[int, ...]] = []
        self._known: list[dict[tuple[int, ...], int]] = []  # ending with a node's token -> the node
        self._merged: list[dict[int, int]] = []  # merged node -> the node that it is one with
        # in place of these three, where the host runs ahead
        self._on_device: DeviceGraph | None = None

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """The unrolled graph of each row, at most as deep as its budget."""
        if are_sampled(self.children, chooser):
            return super().propose(sequences_B, budgets_B, stopping_B, chooser)
        self._endings = [
            tuple(sequence[len(sequence) - self.match :]) if self.match else ()
            for sequence in sequences_B
        ]
        self._known = [{} for _ in sequences_B]
        self._merged = [{} for _ in sequences_B]
        self._on_device = (
            DeviceGraph(sequences_B, self.match, max(budgets_B), chooser.device)
            if self._ahead
            else None
        )
        return super().propose(sequences_B, budgets_B, stopping_B, chooser)

    def _new_tree(
        self,
        draws: ChildSampler,
        run: Run,
        budget: PlannedBudget,
        sequences_B: Sequence[Sequence[int]],
    ) -> SampledGraph:
        graph = DeviceGraph(sequences_B, self.match, draws.levels, draws.chooser.device)
        return SampledGraph(draws, run, self.frontier, budget, graph)

    def _kept(self, scores_BPK: Tensor, above_BP: Tensor) -> Tensor:
        weak_BPK = scores_BPK < scores_BPK[:, :, :1] + self._least_sibling
        return super()._kept(scores_BPK, above_BP).masked_fill(weak_BPK, NONE)

    def _expandable(self, seen: CandidateTree, first: int, scores_BPK: Tensor) -> Tensor:
        if self._on_device is not None:
            closed_BP = self._on_device.merge(seen, first) | (
                scores_BPK.flatten(1) < self._least_leaf
            )
            return seen.scores_BM[:, first:].masked_fill(closed_BP, NONE)
        return seen.scores_BM[:, first:].masked_fill(self._closed(seen, first, scores_BPK), NONE)

    def _closed(self, seen: CandidateTree, first: int, scores_BPK: Tensor) -> Tensor:
        """Which of the nodes from `first` on are not expanded: unlikely ones, and those that are
        merged here.
        """
        closed_BP = (scores_BPK.flatten(1) < self._least_leaf).tolist()
        tokens, parents, scores = (
            seen.tokens_BM.tolist(),
            seen.parents_BM.tolist(),
            seen.scores_BM.tolist(),
        )
        for b, closed_P in enumerate(closed_BP):
            # Of two nodes that are one, the likelier goes on.
            for node in sorted(
                range(first, len(tokens[b])), key=lambda node: (-scores[b][node], node)
            ):
                if scores[b][node] == NONE:
                    continue
                path = _path(parents[b], node)
                words = (*self._endings[b], *(tokens[b][n] for n in path))
                twin = self._known[b].setdefault(words[max(0, len(words) - self.match - 1) :], node)
                if twin != node and twin not in path:
                    self._merged[b][node] = twin
                    closed_P[node - first] = True
        return devices.tensor(closed_BP, seen.scores_BM.device)

    def _pick(self, seen: CandidateTree, budget: PlannedBudget) -> Proposal:
        if self._on_device is not None:
            return super()._pick(self._on_device.unrolled(seen, self.max_nodes), budget)
        added = [self._unrolled(seen, b, depth) for b, depth in enumerate(budget.depths_B)]
        width = max(len(nodes) for nodes in added)
        if width:
            padded = [nodes + [(0, -1, NONE, 0)] * (width - len(nodes)) for nodes in added]
            device, dtype = seen.scores_BM.device, seen.scores_BM.dtype
            tokens, parents, scores, depths = (
                [[node[i] for node in row] for row in padded] for i in range(4)
            )
            whole = [devices.tensor(column, device) for column in (tokens, parents, depths)]
            seen.add(whole[0], whole[1], devices.tensor(scores, device, dtype), whole[2])
        return super()._pick(seen, budget)

    def _unrolled(
        self, seen: CandidateTree, row: int, depth: int
    ) -> list[tuple[int, int, float, int]]:
        """(token, parent, score, depth) of the copies that merged nodes get, parents first."""
        merged = self._merged[row]
        if not merged:
            return []
        columns = (seen.tokens_BM, seen.parents_BM, seen.scores_BM, seen.depths_BM)
        tokens, parents, scores, depths = (column[row].tolist() for column in columns)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            if scores[node] > NONE:
                children.setdefault(parent, []).append(node)
        copies: list[tuple[int, int, float, int]] = []
        # (node that gets children, its score, its depth, node whose children it gets)
        waiting = [(node, scores[node], depths[node], twin) for node, twin in merged.items()]
        while waiting and len(copies) < 4 * self.max_nodes:
            node, score, level, twin = waiting.pop(0)
            for child in children.get(merged.get(twin, twin), ()) if level < depth else ():
                own = score + scores[child] - scores[parents[child]]
                waiting.append((len(tokens) + len(copies), own, level + 1, child))
                copies.append((tokens[child], node, own, level + 1))
        return copies


def _path(parents: list[int], node: int) -> list[int]:
    """From the tip's child down to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
