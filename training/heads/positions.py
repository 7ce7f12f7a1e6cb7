"""Positions and labels of the heads' predictions in a packed batch, as indices.

Head i (from 0) of the draft that begins at position t reads the target's hidden state h_t and the
tokens at t + 1 .. t + 1 + i, and predicts the token at t + 2 + i. It is trained if that token is
supervised and all of them are in one document of the row; the head runs at no other positions. The
indices are computed on the host and transferred in one asynchronous copy.

Shapes: K heads, M drafts (positions at which at least one head predicts), N predictions of all
heads, O drafts that continue from the head's tokens, P hidden states, R rows, T tokens a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from decoding.sampling import noise
from training.data.packing import PackedBatch, Sample
from training.heads.masks import MASKED, mask_slots
from training.losses.chunked import CHUNK

# parts of the keys of what is sampled, which differ from those of other random numbers of a run
_DRAFTS, _DEPTHS, _MASKS, _CONTINUED = range(7, 11)


@dataclass
class Positions:
    """Indices of one batch on its device."""

    # positions in the flattened batch, rising, where the target's hidden states are read; for a
    # head that reads the context, all positions in documents
    kept_P: Tensor
    # indices into kept_P where drafts begin
    drafts_M: Tensor
    # ids of the true tokens that the heads read in turn
    tokens_MK: Tensor
    # drafts that continue from the head's own tokens
    own_O: Tensor
    # True if any draft can; equal on all ranks, which read sharded weights together
    continues_own: bool
    # draft of each prediction; predictions of one token are adjacent, or in one chunk of the loss
    draft_N: Tensor
    head_N: Tensor  # head of each prediction
    heads: np.ndarray  # head_N on the host
    labels_N: Tensor  # ids of the predicted tokens
    # indices into kept_P, rising from one chunk of the loss to the next, where the target predicts
    # the same token; empty if the loss does not need them
    targets_N: Tensor
    targets: np.ndarray  # targets_N on the host
    counts_K: list[int]  # predictions of each head
    kept_R: list[int]  # number of kept_P in each row
    # number of predictions in the row, over those of its sampled drafts and depths: the factor of
    # a prediction's loss. None: nothing is sampled
    scale_N: Tensor | None = None
    # the same at the prediction's depth and after masking: the factor of its figures
    figure_scale_N: Tensor | None = None
    # tokens in a block's slots, MASKED in those that it predicts; None: all slots are masked
    filled_MK: Tensor | None = None
    # masked slots of each prediction's draft, if some are not (training/heads/masks.py)
    masked_N: Tensor | None = None

    def with_tokens(self, tokens_MK: Tensor) -> "Positions":
        """Return these positions with other tokens, [M, K + 1], read and predicted by drafts."""
        filled_MK = self.filled_MK
        if filled_MK is not None:
            filled_MK = torch.where(filled_MK == MASKED, MASKED, tokens_MK[:, 1:])
        return replace(
            self,
            tokens_MK=tokens_MK[:, :-1],
            labels_N=tokens_MK[self.draft_N, self.head_N + 1],
            filled_MK=filled_MK,
        )


def positions(
    batch: PackedBatch,
    heads: int,
    uses_teacher: bool,
    own_tokens: float = 0.0,
    key: tuple[int, ...] = (),
    *,
    grouped: bool = False,
    by_draft: bool = False,
    context: bool = False,
    drafts_per_row: int = 0,
    shares_K: Sequence[float] = (),
    random_masks: bool = False,
) -> Positions:
    """Return the positions and labels of all predictions of `heads` heads in a batch.

    uses_teacher: include the hidden states from which the target predicts. own_tokens: share of the
    drafts that continue from the head's own tokens. key: of all that is sampled, such as (seed,
    step); what is sampled in a row depends on it and on the samples in the row, not on the other
    rows of the batch or on the padding. grouped: make the predictions of one head contiguous in
    every chunk of the loss, for heads with separate output layers. by_draft: order the predictions
    by draft and depth, not by predicted token, and return draft x heads + head as their targets.
    context: keep the hidden states of all tokens, for heads that attend to them. drafts_per_row:
    maximum number of drafts in a row, sampled by the key; 0: all drafts. shares_K: the share of the
    drafts that predict at each depth, falling, sampled by the key; empty: all. random_masks: fill
    some slots of each draft with the text's tokens, and predict the others. These three need
    `context`, as stores keep the states of one step for the others.
    """
    rows, length = batch.host.documents_RT.shape
    predicts_KF = _predicts(batch, heads)
    drafts = np.flatnonzero(predicts_KF.any(axis=0))
    all_KR = _count_in_rows(predicts_KF, np.arange(rows * length) // length, rows)
    if drafts_per_row:
        drafts = _sample_drafts(batch, drafts, drafts_per_row, key)
    predicts_KM = predicts_KF[:, drafts]
    if any(share < 1 for share in shares_K):
        predicts_KM = predicts_KM & _keeps_depths(batch, drafts, shares_K, key)
    unmasked_R = _count_in_rows(predicts_KM, drafts // length, rows).sum(axis=0)
    filled_MK, masked_M = drafts[:0], drafts[:0]
    if random_masks:
        masked_KM, masked_M = mask_slots(_draft_keys(batch, drafts, key, _MASKS), heads)
        predicts_KM = predicts_KM & masked_KM
        filled_MK = _filled(batch, drafts, masked_KM.T)
    head, draft = np.nonzero(predicts_KM)
    kept_KR = _count_in_rows(predicts_KM, drafts // length, rows)
    targets = drafts[draft] + 1 + head
    order = np.lexsort((head, draft)) if by_draft else np.argsort(targets, kind="stable")
    if grouped:
        order = order[np.lexsort((head[order], np.arange(len(order)) // CHUNK))]
    head, draft, targets = head[order], draft[order], targets[order]
    kept = np.union1d(drafts, targets) if uses_teacher else drafts
    if context:
        kept = np.flatnonzero(batch.host.documents_RT > 0)
    taken = np.minimum(drafts[:, None] + 1 + np.arange(heads), rows * length - 1)
    continued = np.flatnonzero(_sampled_numbers(batch, drafts, key, _CONTINUED) < own_tokens)
    seats = np.searchsorted(kept, targets) if uses_teacher else targets[:0]
    if by_draft:
        seats = draft * heads + head
    # of the fields that are read through places in the batch, the places
    on_host = {
        "kept_P": kept,
        "drafts_M": np.searchsorted(kept, drafts),
        "tokens_MK": taken,
        "own_O": continued,
        "draft_N": draft,
        "head_N": head,
        "labels_N": targets,
        "targets_N": seats,
    }
    if random_masks:
        on_host |= {"filled_MK": filled_MK, "masked_N": masked_M[draft]}
    moved = devices.copy_arrays_to_device(tuple(on_host.values()), batch.device)
    found, ids_F = dict(zip(on_host, moved, strict=True)), batch.ids_RT.flatten()
    found["tokens_MK"] = ids_F[found["tokens_MK"]]
    found["labels_N"] = batch.next_RT.flatten()[found["labels_N"]]
    if random_masks:
        places_MK = found["filled_MK"]
        found["filled_MK"] = torch.where(places_MK == MASKED, MASKED, ids_F[places_MK])
    if (kept_KR < all_KR).any():
        scales_2N = _scales(drafts[draft] // length, head, all_KR, kept_KR, unmasked_R)
        scale_N, figure_scale_N = devices.tensor(scales_2N, batch.device, torch.float32)
        found |= {"scale_N": scale_N, "figure_scale_N": figure_scale_N}
    return Positions(
        **found,
        continues_own=own_tokens > 0,
        heads=head,
        targets=seats,
        counts_K=kept_KR.sum(axis=1).tolist(),
        kept_R=np.bincount(kept // length, minlength=rows).tolist(),
    )


def _scales(
    row_N: np.ndarray,
    head_N: np.ndarray,
    all_KR: np.ndarray,
    kept_KR: np.ndarray,
    unmasked_R: np.ndarray,
) -> np.ndarray:
    """Return the factors of each prediction's loss and of its figures [2, N].

    Each row has those of its own counts, so that no other row of the batch changes its weight; the
    weights of masked slots make up for those of the others. row_N, head_N: of the predictions.
    all_KR, kept_KR: numbers of all predictions and of those that are made. unmasked_R: of the
    sampled drafts and depths.
    """
    of_losses_R = all_KR.sum(axis=0) / np.maximum(unmasked_R, 1)
    of_figures_KR = all_KR / np.maximum(kept_KR, 1)
    return np.stack((of_losses_R[row_N], of_figures_KR[head_N, row_N]))


def _filled(batch: PackedBatch, drafts: np.ndarray, masked_MK: np.ndarray) -> np.ndarray:
    """Return the place of each slot's token in the flattened batch, or MASKED [M, K].

    Slots after the end of the draft's document stay masked.
    """
    documents_RT = batch.host.documents_RT
    ahead_K = 2 + np.arange(masked_MK.shape[1])
    in_row_MK = drafts[:, None] % documents_RT.shape[1] + ahead_K < documents_RT.shape[1]
    places_MK = np.where(in_row_MK, drafts[:, None] + ahead_K, 0)
    documents_F = documents_RT.ravel()
    known_MK = in_row_MK & (documents_F[places_MK] == documents_F[drafts][:, None])
    return np.where(known_MK & ~masked_MK, places_MK, MASKED)


def _predicts(batch: PackedBatch, heads: int) -> np.ndarray:
    """Return whether each head predicts in the draft that begins at each position [K, R T]."""
    documents_RT, supervised_RT = batch.host.documents_RT, batch.host.supervised_RT
    predicts_KRT = np.zeros((heads, *documents_RT.shape), dtype=bool)
    for ahead in range(1, min(heads, documents_RT.shape[1] - 1) + 1):
        within = documents_RT[:, :-ahead] == documents_RT[:, ahead:]
        predicts_KRT[ahead - 1, :, :-ahead] = supervised_RT[:, ahead:] & within
    return predicts_KRT.reshape(heads, -1)


def _count_in_rows(predicts_KM: np.ndarray, rows_M: np.ndarray, rows: int) -> np.ndarray:
    """Return the number of each head's predictions in each row [K, R]; rows_M: those of drafts."""
    return np.stack([np.bincount(rows_M[each_M], minlength=rows) for each_M in predicts_KM])


def _draft_keys(
    batch: PackedBatch, drafts: np.ndarray, key: tuple[int, ...], purpose: int
) -> np.ndarray:
    """Return the 64-bit key of each draft, from `key`, its row's samples and its place there."""
    length = batch.host.documents_RT.shape[1]
    of_rows = [noise.key(*key, purpose, *row) for row in batch.rows]
    keys_R = np.asarray(of_rows, dtype=np.uint64)
    return noise.extend(keys_R[drafts // length], (drafts % length).astype(np.uint64))


def _sampled_numbers(
    batch: PackedBatch, drafts: np.ndarray, key: tuple[int, ...], purpose: int
) -> np.ndarray:
    """Return a number inside (0, 1) for each draft, see `_draft_keys`."""
    numbers_M: np.ndarray = noise.uniform(_draft_keys(batch, drafts, key, purpose))
    return numbers_M


def _keeps_depths(
    batch: PackedBatch, drafts: np.ndarray, shares_K: Sequence[float], key: tuple[int, ...]
) -> np.ndarray:
    """Return whether each draft predicts at each depth [K, M]; one that ends begins no more."""
    return _sampled_numbers(batch, drafts, key, _DEPTHS) < np.asarray(shares_K)[:, None]


def _sample_drafts(
    batch: PackedBatch, drafts: np.ndarray, most: int, key: tuple[int, ...]
) -> np.ndarray:
    """Return at most `most` drafts of each row, in their order."""
    row_M = drafts // batch.host.documents_RT.shape[1]
    order = np.lexsort((_sampled_numbers(batch, drafts, key, _DRAFTS), row_M))
    rows = row_M[order]
    first = np.searchsorted(rows, rows)  # place of the row's first draft
    return np.sort(drafts[order[np.arange(len(rows)) - first < most]])


def count_kept(mask_T: np.ndarray, heads: int, uses_teacher: bool, context: bool = False) -> int:
    """Return the number of hidden states that `positions` keeps of one document, given its mask."""
    if context:
        return len(mask_T)
    # cumulative count of supervised tokens from the third on
    before_T = np.concatenate(([0], np.cumsum(mask_T[2:])))
    begins = np.arange(len(mask_T) - 2)
    kept_T = np.zeros(len(mask_T), dtype=bool)
    kept_T[:-2] = before_T[np.minimum(begins + heads, len(begins))] > before_T[begins]
    if uses_teacher:
        kept_T[1:-1] |= mask_T[2:]
    return int(kept_T.sum())


def check_predictions(samples: Sequence[Sample], heads: int) -> None:
    """Raise UserError if no supervised token can be predicted by a head."""
    if not any(sample.mask[2:].any() for sample in samples):
        raise UserError(
            f"zero supervised positions for {heads} heads in {len(samples)} samples. A head can "
            f"predict tokens from the third of a sample on, and none of these is supervised. Check "
            f"the chat template and data.train_on"
        )
