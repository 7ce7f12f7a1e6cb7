"""Graph-structured drafting: equal nodes share their continuation, which is expanded once.

Source: Gong et al. 2024, "Graph-Structured Speculative Decoding" (arXiv 2407.16207). A node whose
token and last ancestors equal those of another node is merged with it. A merged node is not
expanded. Before verification the graph is unrolled to a tree, in which the merged node gets a copy
of the other node's descendants. Unlikely siblings are dropped, and unlikely nodes stay leaves. The
paper's sampled mode takes the longest path of independent tests, which changes the distribution;
here the tree is verified exactly. Sampled children are not copied: a merged node samples its
children from the distribution at the other node (decoding/drafters/trees/sampled.py).

Shapes: as in decoding/drafters/trees/ranked.py.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from decoding.drafters.trees.budgets import PlannedBudget
from decoding.drafters.trees.candidates import NONE, CandidateTree
from decoding.drafters.trees.node_graph import NodeGraph
from decoding.drafters.trees.ranked import RankedTree
from decoding.drafters.trees.sampled import Run, SampledGraph
from decoding.drafters.trees.sampled_children import ChildSampler
from decoding.errors import UserError
from decoding.interfaces import Chooser, Policies, Proposal, Tokens


class GraphDrafter(RankedTree):
    """A ranked tree whose equal nodes are merged.

    Hydra: `_target_: decoding.drafters.trees.graph.GraphDrafter`. match: number of last
    ancestors that equal nodes have in common. sibling_threshold: minimum probability of a node, as
    a share of its best sibling's. leaf_threshold: minimum probability of an expanded node, given
    its parent. Both thresholds apply to top-k children only. The other arguments are those of
    RankedTree.
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
                f"{leaf_threshold}, expected match >= 0 and thresholds from 0 to 1."
            )
        self.match = match
        self._least_sibling = math.log(sibling_threshold) if sibling_threshold else NONE
        self._least_leaf = math.log(leaf_threshold) if leaf_threshold else NONE

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft each row's graph, at most as deep as its budget, and propose it as a tree."""
        self._graph = NodeGraph(sequences_B, self.match, max(budgets_B), chooser.device)
        return super().propose(sequences_B, budgets_B, stopping_B, chooser)

    def _new_tree(self, draws: ChildSampler, run: Run, budget: PlannedBudget) -> SampledGraph:
        return SampledGraph(draws, run, self.frontier, budget, self._graph)

    def _tested(self, scores_BPK: Tensor, above_BP: Tensor) -> Tensor:
        weak_BPK = scores_BPK < scores_BPK[:, :, :1] + self._least_sibling
        return super()._tested(scores_BPK, above_BP).masked_fill(weak_BPK, NONE)

    def _expandable(self, tree: CandidateTree, first: int, scores_BPK: Tensor) -> Tensor:
        leaves_BP = self._graph.merge(tree, first) | (scores_BPK.flatten(1) < self._least_leaf)
        return tree.scores_BM[:, first:].masked_fill(leaves_BP, NONE)

    def _likeliest(self, tree: CandidateTree, budget: PlannedBudget) -> Proposal:
        return super()._likeliest(self._graph.unrolled(tree, self.max_nodes), budget)
