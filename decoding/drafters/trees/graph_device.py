"""The graph of decoding/drafters/trees/graph.py by tensor operations at fixed shapes: nodes are
compared and unrolled where they are, and nothing is read.

The eager twin is in `GraphDrafter`: dictionaries of endings, and a queue of nodes that wait for
their copies. Here a node's ending is a row of tokens, and two nodes are one if their rows are
equal. Unrolling goes level by level and keeps of each level as many nodes as are proposed in all:
what is cut has that many better ones in its own level, and so has all that would hang below it.

Shapes: B rows, M nodes seen, P new nodes, X words of an ending, C nodes of an unrolled level, K
children of a node.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.candidates import NONE, CandidateTree
from decoding.interfaces import ancestors

# in place of a token, before the beginning of a text; in place of a node, where there is none
NOTHING = -1


class DeviceGraph:
    """One round's graph."""

    def __init__(
        self, sequences_B: Sequence[Sequence[int]], match: int, depth: int, device: torch.device
    ) -> None:
        """match: ancestors that must agree; a text and a path of `depth` tokens may have fewer."""
        width = min(match, max(len(sequence) for sequence in sequences_B) + depth)
        endings = (
            [[NOTHING, *sequence[max(0, len(sequence) - width) :]] for sequence in sequences_B]
            if width
            else []
        )
        rows = len(sequences_B)
        padded = [[NOTHING] * (width + 1 - len(ending)) + ending for ending in endings] or [
            [NOTHING]
        ] * rows
        # of the tip and of all nodes seen, own token last
        self._endings_BMX = devices.tensor(padded, device)[:, None]
        # In which turn a node came to be compared, and which goes on in its place: itself, if it is
        # not merged.
        self._turns_BM = self.twins_BM = torch.empty(rows, 0, dtype=torch.long, device=device)

    def merge(self, seen: CandidateTree, first: int) -> Tensor:
        """Compare the nodes from `first` on, likelier ones first; which of them (B, P) were merged
        with one that came before.
        """
        parents_BP, scores_BP = seen.parents_BM[:, first:], seen.scores_BM[:, first:]
        own_P = torch.arange(first, seen.scores_BM.shape[1], device=scores_BP.device)
        order_BP = scores_BP.sort(descending=True, stable=True).indices
        turns_BP = torch.empty_like(order_BP).scatter_(1, order_BP, own_P.expand_as(order_BP))
        self._turns_BM = torch.cat((self._turns_BM, turns_BP), 1)
        above_BPX = self._endings_BMX.gather(1, _spread(parents_BP + 1, self._endings_BMX.shape[2]))
        endings_BPX = torch.cat((above_BPX[:, :, 1:], seen.tokens_BM[:, first:, None]), 2)
        self._endings_BMX = torch.cat((self._endings_BMX, endings_BPX), 1)
        equal_BPM = (endings_BPX[:, :, None] == self._endings_BMX[:, None, 1:]).all(-1)
        equal_BPM &= seen.scores_BM[:, None] > NONE
        turns_BPM = torch.where(equal_BPM, self._turns_BM[:, None], seen.scores_BM.shape[1])
        twins_BP = turns_BPM.argmin(-1)  # of those that are equal, the one whose turn came first
        own_or_above_BPM = ancestors(seen.parents_BM)[:, first:]
        merged_BP = (scores_BP > NONE) & ~own_or_above_BPM.gather(2, twins_BP[:, :, None]).squeeze(
            2
        )
        self.twins_BM = torch.cat((self.twins_BM, torch.where(merged_BP, twins_BP, own_P)), 1)
        return merged_BP

    def unrolled(self, seen: CandidateTree, most: int) -> CandidateTree:
        """The tree of all paths through the graph, of each level its `most` likeliest nodes."""
        B, M = seen.scores_BM.shape
        above_BM = F.pad(seen.scores_BM, (1, 0)).gather(1, seen.parents_BM + 1)
        real_BM = seen.scores_BM > NONE
        steps_BM = torch.where(real_BM, seen.scores_BM - above_BM, NONE)
        children_BMK = _children(seen)
        tree = CandidateTree.none(B, seen.scores_BM.device, seen.scores_BM.dtype)
        tree.levels = seen.levels
        # Nodes of the graph, and of the tree: the tip.
        at_BC = places_BC = torch.full((B, 1), NOTHING, device=seen.scores_BM.device)
        scores_BC = torch.zeros_like(steps_BM[:, :1])
        for level in range(1, seen.levels + 1):
            twins_BC = F.pad(self.twins_BM, (1, 0), value=NOTHING).gather(1, at_BC + 1)
            K = children_BMK.shape[2]
            next_BX = children_BMK.gather(1, _spread(twins_BC + 1, K)).flatten(1)
            steps_BX = steps_BM.gather(1, next_BX.clamp(min=0)).masked_fill(
                next_BX == NOTHING, NONE
            )
            best = (scores_BC.repeat_interleave(K, 1) + steps_BX).topk(
                min(most, next_BX.shape[1]), dim=-1
            )
            at_BC, scores_BC = next_BX.gather(1, best.indices).clamp(min=0), best.values
            first, parents_BC = tree.scores_BM.shape[1], places_BC.gather(1, best.indices // K)
            tree.add(
                seen.tokens_BM.gather(1, at_BC),
                parents_BC,
                scores_BC,
                torch.full_like(at_BC, level),
            )
            places_BC = torch.arange(first, first + at_BC.shape[1], device=at_BC.device).expand(
                B, -1
            )
        return tree


def _children(seen: CandidateTree) -> Tensor:
    """The children (B, M + 1, K) of the tip and of every node, NOTHING where there are none.

    A level has K children of each of its parents, one parent's after another's, so a node's place
    tells which child it is.
    """
    B, M = seen.scores_BM.shape
    K = seen.siblings
    places_M = torch.arange(M, device=seen.scores_BM.device)
    slots_BM = (seen.parents_BM + 1) * K + places_M % K
    children_BX = torch.full((B, (M + 1) * K), NOTHING, device=seen.scores_BM.device)
    return children_BX.scatter_(1, slots_BM, places_M.expand(B, M)).view(B, M + 1, K)


def _spread(index_BP: Tensor, width: int) -> Tensor:
    """An index of nodes for `gather` over rows of this width."""
    return index_BP[:, :, None].expand(-1, -1, width)
