"""Drafts of several slots in packed rows: which rows they are in, and what their slots see.

Shapes: R rows, T tokens of a row, M drafts, A drafts of a row, a of them in a chunk, S slots of a
draft, N = A S.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from decoding import devices
from training.data.packing import PackedBatch

SLOTS_AT_ONCE = 256  # slots of drafts that attend at once, in each row


class DraftsInRows:
    """Drafts of a packed batch, grouped by row and in chunks.

    Attention scores then need memory for one chunk at a time. tips_M: the tips' places in the
    flattened batch. ids: token ids (M, ...) that each draft reads.
    """

    def __init__(self, batch: PackedBatch, tips_M: Tensor, ids: Tensor) -> None:
        rows, row_tokens = batch.ids_RT.shape
        self._batch = batch
        self._drafts_RA, self._seats_M = group_by_row(tips_M // row_tokens, rows)
        # one more draft, with which rows are padded
        self._tips_M, self._ids = (
            torch.cat((each, each.new_zeros(1, *each.shape[1:]))) for each in (tips_M, ids)
        )

    def chunks(self, slots: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the drafts in chunks of `slots` = S slots each.

        A chunk is the drafts' ids (R, a, ...), the slots' positions (R, a, S), and the text that
        each draft sees (R, a, T).
        """
        slots_S = torch.arange(slots, device=self._tips_M.device)
        for drafts_Ra in self._drafts_RA.split(max(1, SLOTS_AT_ONCE // slots), dim=1):
            tips_Ra = self._tips_M[drafts_Ra]
            positions_RaS = self._batch.positions_RT.flatten()[tips_Ra][:, :, None] + slots_S
            visible_RaT = visible_text(self._batch, tips_Ra)
            yield self._ids[drafts_Ra], positions_RaS, visible_RaT

    def join(self, chunks: list[Tensor]) -> Tensor:
        """Return the results (M, ...) of all drafts from those of the chunks (R, a, ...)."""
        return torch.cat(chunks, 1).flatten(0, 1)[self._seats_M]


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
    same_draft_NN = slots_N[:, None] // slots == slots_N // slots
    if causal:
        same_draft_NN = same_draft_NN & (slots_N <= slots_N[:, None])
    text_RNT = visible_RAT[:, :, None].expand(R, A, slots, T).flatten(1, 2)
    mask = torch.cat((text_RNT, same_draft_NN.expand(R, -1, -1)), 2)[:, None]
    return mask.repeat(1, 1, shared, 1)
