"""Packing of beams into a prefix tree by a few tensor operations of fixed shapes.

Beams share prefixes, and a shared prefix is verified once. The published code finds shared prefixes
by comparing every pair of beams at every position, W x W x L numbers. Back pointers already hold
them: a step chooses pairs (beam of the previous step, token), each at most once. So two nodes of a
step with the same parent have different tokens. If the nodes of the previous step represent
different prefixes, so do these, whether their parents are equal or not. By induction from the tip,
pairs and prefixes are one to one, and the back pointers are the tree's edges. It remains to drop
nodes that no beam contains and to close the gaps.

Shapes: B rows, L steps, M = L W nodes in the order of steps (parents come first), W beams.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.interfaces import NO_NODE


@dataclass(frozen=True, slots=True)
class Tree:
    """The kept nodes in the order of steps, padded per row (token 0, parent NO_NODE)."""

    tokens_BM: Tensor
    parents_BM: Tensor  # parent's index among the kept nodes; -1: the tip
    counts_B: Tensor
    places_BM: Tensor  # index among the kept nodes of every original node; M: it was dropped


def edges(parents_BLW: Tensor) -> Tensor:
    """Convert back pointers (beams of the previous step) to the parents' nodes (B, M).

    The back pointers of the first step are 0, and its nodes get -1.
    """
    _, L, W = parents_BLW.shape
    return (parents_BLW + _offsets(L, W, parents_BLW.device)).flatten(1)


@cache  # never freed, as recorded graphs read it
def _offsets(length: int, width: int, device: torch.device) -> Tensor:
    """Return for each step the first node of the step before, (L, 1); -1 for the first step."""
    with torch.inference_mode(False):
        return devices.tensor([-1, *range(0, (length - 1) * width, width)], device)[:, None]


def mask_survivors(parents_BLW: Tensor, depths_B: Tensor) -> Tensor:
    """Return a mask (B, M) of the nodes that a beam of their row's last step contains.

    depths_B: number of steps of each row, 0 to L.
    """
    B, L, W = parents_BLW.shape
    last_BL = torch.arange(1, L + 1, device=parents_BLW.device) == depths_B[:, None]
    beams_BLW = last_BL[:, :, None].expand(B, L, W).long()  # number of beams through each node
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
