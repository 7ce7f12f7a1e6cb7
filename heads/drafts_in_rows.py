"""Drafts of several slots in packed rows: which rows they are in, and what their slots see.

Shapes: R rows, T tokens of a row, M drafts, A drafts of a row, S slots of a draft, N = A S.
"""

import torch
from torch import Tensor

from decoding import devices
from training.data.packing import PackedBatch


def group_by_row(rows_M: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the drafts of each row (R, A), padded with M, and each draft's place in them.

    The places are indices [M] into the flattened (R, A). A is at least 1, so that a batch without
    drafts still depends on the head's weights.
    """
    M = len(rows_M)
    numbers_M = torch.arange(M, device=rows_M.device)
    if rows == 1 and M:
        return numbers_M[None], numbers_M
    counts_R = torch.bincount(rows_M, minlength=rows)
    (counts,) = devices.read(counts_R)
    width = max([1, *counts])
    order_M = rows_M.argsort(stable=True)
    first_R = counts_R.cumsum(0) - counts_R
    seats_M = torch.empty_like(numbers_M)
    seats_M[order_M] = rows_M[order_M] * width + numbers_M - first_R[rows_M[order_M]]
    padding_F = torch.full((rows * width,), M, device=rows_M.device)
    return padding_F.index_copy(0, seats_M, numbers_M).view(rows, width), seats_M


def visible_text(batch: PackedBatch, tips_RA: Tensor) -> Tensor:
    """Return which tokens of the row each draft sees, (R, A, T): its document's before the tip."""
    R, T = batch.ids_RT.shape
    documents_RA = batch.documents_RT.flatten()[tips_RA]
    places_R1T = torch.arange(R * T, device=batch.device).view(R, 1, T)
    return (batch.documents_RT[:, None] == documents_RA[:, :, None]) & (
        places_R1T < tips_RA[:, :, None]
    )


def slot_mask(visible_RAT: Tensor, slots: int, causal: bool, shared: int = 1) -> Tensor:
    """Return what each slot sees: its draft's text and its own draft's slots.

    The shape is (R, 1, shared * N, T + N). slots: S. causal: a slot sees no later slot. shared:
    number of query heads that share a key head (see `grouped_attention`).
    """
    R, A, T = visible_RAT.shape
    slots_N = torch.arange(A * slots, device=visible_RAT.device)
    own_NN = slots_N[:, None] // slots == slots_N // slots
    if causal:
        own_NN = own_NN & (slots_N <= slots_N[:, None])
    text_RNT = visible_RAT[:, :, None].expand(R, A, slots, T).flatten(1, 2)
    mask = torch.cat((text_RNT, own_NN.expand(R, -1, -1)), 2)[:, None]
    return mask.repeat(1, 1, shared, 1)
