"""Beams packed into a prefix tree by a few tensor operations of fixed shapes.

Beams share prefixes, and a shared prefix is verified once. The published code finds it by comparing
every pair of beams at every position, W x W x L numbers. Back pointers already hold it: a step
chooses pairs (beam of the previous step, token), each at most once. So two nodes of a step with the
same parent have different tokens; and if the nodes of the previous step represent different
prefixes, so do these, whether their parents are equal or not. By induction from the tip, pairs and
prefixes are one to one, and the back pointers are the tree's edges. It remains to drop nodes that
no beam contains, and to close the gaps.

Shapes: B rows, W beams, L steps, M = L W nodes in the order of steps (so parents come first), K
candidates.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.interfaces import NO_NODE


@dataclass(frozen=True, slots=True)
class Tree:
    """Kept nodes in the order of steps, padded after a row's count (token 0, parent NO_NODE)."""

    tokens_BM: Tensor
    parents_BM: Tensor  # index among the kept nodes; -1: the tip
    counts_B: Tensor
    places_BM: Tensor  # index of every node before packing among the kept ones, or M


def edges(parents_BLW: Tensor) -> Tensor:
    """Convert back pointers (beams of the previous step) to indices of nodes (B, M).

    The first step's nodes get -1.
    """
    B, L, W = parents_BLW.shape
    offsets_L1 = torch.arange(-W, (L - 1) * W, W, device=parents_BLW.device)[:, None]
    nodes_BLW = parents_BLW + offsets_L1
    nodes_BLW[:, 0] = -1
    return nodes_BLW.flatten(1)


def surviving(parents_BLW: Tensor, depths_B: Tensor) -> Tensor:
    """Return a mask (B, M) of the nodes in a beam of the row's last step.

    depths_B: number of steps of each row, 0 to L.
    """
    B, L, W = parents_BLW.shape
    last_BL = torch.arange(1, L + 1, device=parents_BLW.device) == depths_B[:, None]
    beams_BLW = last_BL[:, :, None].expand(B, L, W).long()  # beams that go through each node
    for step in range(L - 1, 0, -1):
        beams_BLW[:, step - 1].scatter_add_(1, parents_BLW[:, step], beams_BLW[:, step])
    return beams_BLW.flatten(1) > 0


def pack(tokens_BM: Tensor, parents_BM: Tensor, keep_BM: Tensor) -> Tree:
    """Return the tree of the nodes to keep, whose parents must be kept too.

    parents_BM: see `edges`.
    """
    B, M = tokens_BM.shape
    counted_BM = keep_BM.cumsum(1)
    index_BM = F.pad(counted_BM, (1, 0)) - 1  # node m at m + 1; the tip, -1, at 0
    places_BM = torch.where(keep_BM, counted_BM - 1, M)
    moved_BM = index_BM.gather(1, parents_BM + 1)
    room = (B, M + 1)  # the last slot receives dropped nodes
    return Tree(
        tokens_BM.new_zeros(room).scatter_(1, places_BM, tokens_BM)[:, :M],
        parents_BM.new_full(room, NO_NODE).scatter_(1, places_BM, moved_BM)[:, :M],
        counted_BM[:, -1],
        places_BM,
    )
