"""Merge the equal nodes of a draft tree, by tensor operations at fixed shapes.

Two nodes are equal if their tokens and their last `match` ancestors are. Nothing is read on the
host. Unrolling keeps the `max_nodes` likeliest nodes of each level: a node that is cut, and all of
its descendants, are less likely than those.

Shapes: B rows, M nodes of the tree, P new nodes, X tokens of an ending, C nodes of an unrolled
level, K children of a node.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.candidates import NONE, CandidateTree

NOTHING = -1  # a token before the beginning of a text; a missing node


class NodeGraph:
    """The merged nodes of one round."""

    def __init__(
        self, sequences_B: Sequence[Sequence[int]], match: int, depth: int, device: torch.device
    ) -> None:
        """Start from the tips. `match` may exceed the tokens of a sequence and a path."""
        width = min(match, max(len(sequence) for sequence in sequences_B) + depth)
        endings = [list(sequence[-width:]) if width else [] for sequence in sequences_B]
        padded = [[NOTHING] * (width + 1 - len(ending)) + ending for ending in endings]
        # of the tip and all nodes: the last ancestors and the node's token
        self._endings_BMX = devices.tensor(padded, device)[:, None]
        # of the tip and all nodes: whether node m is an ancestor, or the node itself
        self._lines_BMM = torch.zeros(len(padded), 1, 0, dtype=torch.bool, device=device)
        # of all nodes: the order of comparison, and the node that is expanded in its place
        self._turns_BM = self.twins_BM = torch.empty(
            len(padded), 0, dtype=torch.long, device=device
        )

    def merge(self, tree: CandidateTree, first: int) -> Tensor:
        """Merge the nodes from `first` on, likeliest first, with equal nodes compared before.

        Returns a mask (B, P) of the merged ones. A node is not merged with its ancestors.
        """
        parents_BP, scores_BP = tree.parents_BM[:, first:], tree.scores_BM[:, first:]
        B, P = parents_BP.shape
        nodes_P = torch.arange(first, first + P, device=scores_BP.device)
        order_BP = scores_BP.sort(descending=True, stable=True).indices
        turns_BP = torch.empty_like(order_BP).scatter_(1, order_BP, nodes_P.expand_as(order_BP))
        self._turns_BM = torch.cat((self._turns_BM, turns_BP), 1)
        above_BPX = _rows(self._endings_BMX, parents_BP + 1)
        endings_BPX = torch.cat((above_BPX[:, :, 1:], tree.tokens_BM[:, first:, None]), 2)
        self._endings_BMX = torch.cat((self._endings_BMX, endings_BPX), 1)
        self_BPP = torch.eye(P, dtype=torch.bool, device=scores_BP.device).expand(B, P, P)
        lines_BPM = torch.cat((_rows(self._lines_BMM, parents_BP + 1), self_BPP), 2)
        self._lines_BMM = torch.cat((F.pad(self._lines_BMM, (0, P)), lines_BPM), 1)
        equal_BPM = (endings_BPX[:, :, None] == self._endings_BMX[:, None, 1:]).all(-1)
        equal_BPM &= tree.scores_BM[:, None] > NONE
        turns_BPM = torch.where(equal_BPM, self._turns_BM[:, None], first + P)
        twins_BP = turns_BPM.argmin(-1)  # the equal node whose turn came first
        merged_BP = ~lines_BPM.gather(2, twins_BP[:, :, None]).squeeze(2) & (scores_BP > NONE)
        self.twins_BM = torch.cat((self.twins_BM, torch.where(merged_BP, twins_BP, nodes_P)), 1)
        return merged_BP

    def unrolled(self, tree: CandidateTree, max_nodes: int) -> CandidateTree:
        """Return the graph as a tree, with the `max_nodes` likeliest nodes of each level."""
        B, M = tree.scores_BM.shape
        device = tree.scores_BM.device
        above_BM = F.pad(tree.scores_BM, (1, 0)).gather(1, tree.parents_BM + 1)
        steps_BM = torch.where(tree.scores_BM > NONE, tree.scores_BM - above_BM, NONE)
        twins_BM = F.pad(self.twins_BM, (1, 0), value=NOTHING)
        children_BMK = _children(tree)
        K = children_BMK.shape[2]
        levels: list[tuple[Tensor, ...]] = []
        # nodes of the graph, and the places of their copies in the new tree; first the tip
        nodes_BC = places_BC = torch.full((B, 1), NOTHING, device=device)
        scores_BC, first = torch.zeros_like(steps_BM[:, :1]), 0
        for level in range(1, tree.levels + 1):
            next_BX = _rows(children_BMK, twins_BM.gather(1, nodes_BC + 1) + 1).flatten(1)
            steps_BX = steps_BM.gather(1, next_BX.clamp(min=0))
            scores_BX = scores_BC.repeat_interleave(K, 1) + steps_BX.masked_fill(
                next_BX == NOTHING, NONE
            )
            best = scores_BX.topk(min(max_nodes, next_BX.shape[1]), dim=-1)
            nodes_BC, scores_BC = next_BX.gather(1, best.indices).clamp(min=0), best.values
            parents_BC = places_BC.gather(1, best.indices // K)
            depths_BC = torch.full_like(nodes_BC, level)
            levels.append((tree.tokens_BM.gather(1, nodes_BC), parents_BC, scores_BC, depths_BC))
            end = first + nodes_BC.shape[1]
            places_BC, first = torch.arange(first, end, device=device).expand(B, -1), end
        tokens_BM, parents_BM, scores_BM, depths_BM = (torch.cat(part, 1) for part in zip(*levels))
        return CandidateTree(tokens_BM, parents_BM, scores_BM, depths_BM, tree.levels)


def _children(tree: CandidateTree) -> Tensor:
    """Return the children (B, M + 1, K) of the tip and of every node, padded with NOTHING.

    A level holds the K children of each of its parents in turn, so a node's place gives its rank.
    """
    B, M = tree.scores_BM.shape
    K = tree.siblings
    places_M = torch.arange(M, device=tree.scores_BM.device)
    slots_BM = (tree.parents_BM + 1) * K + places_M % K
    children_BX = torch.full((B, (M + 1) * K), NOTHING, device=tree.scores_BM.device)
    return children_BX.scatter_(1, slots_BM, places_M.expand(B, M)).view(B, M + 1, K)


def _rows(values_BMX: Tensor, index_BP: Tensor) -> Tensor:
    """Return the rows (B, P, X) of these nodes."""
    return values_BMX.gather(1, index_BP[:, :, None].expand(-1, -1, values_BMX.shape[2]))
