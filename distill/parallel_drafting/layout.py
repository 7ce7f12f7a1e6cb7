"""Text of a packed batch with mask tokens after its positions, as one sequence.

A mask token belongs to an anchor a, a position of the text, and a depth d >= 1. It has the rope
position a + d, sees the text of its document up to a and the mask tokens of its own anchor up to
depth d, and predicts the token at a + d + 1. The text itself is depth 0: its position a predicts
the token at a + 1. So a mask token sees what it sees in drafting, where a is the tip.

Conditional drop sampling (An et al. 2025, arXiv 2504.18583, section 3.3) keeps the cost linear:
depth d trains at a share max(retain^d, retain_min) of the anchors that have a supervised token so
far ahead, sampled among those of depth d - 1.

Shapes: R rows, T tokens of a row, F = R T, N supervised tokens, A anchors of a row, E mask tokens,
D documents, S positions of the sequence, M predictions of all depths, H heads, C head width.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from decoding import devices
from training.data.packing import PackedBatch
from training.models.attention import document_starts

# all kernels but cuDNN's, which spends some 100 ms on a plan for every new shape
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# last word of the key of the anchors, which differs from those of other random numbers of a run
_PURPOSE = 6


@dataclass(frozen=True)
class Retention:
    """Share of the anchors that train each depth."""

    retain: float = 1.0
    retain_min: float = 1.0

    def share(self, depth: int) -> float:
        """Return the share of the anchors at this depth; 1 at depth 0."""
        return max(self.retain**depth, self.retain_min)


ALL = Retention()


@dataclass(frozen=True)
class Document:
    """A document of the sequence: its text, and the mask tokens after it."""

    length: int  # tokens of the text
    visible_ES: Tensor  # positions of the document that each of its mask tokens sees


@dataclass(frozen=True)
class Layout:
    """The sequence, and the predictions of its positions in the order of the predicted tokens."""

    ids_S: Tensor
    positions_S: Tensor
    documents: list[Document]
    places_M: Tensor  # position in the sequence
    tokens_M: Tensor  # index of the predicted token among the supervised ones of the batch
    tokens: np.ndarray  # tokens_M on the host
    depths_M: Tensor
    weights_M: Tensor  # weights of the loss, see `_weigh`

    def states(self, model: Any) -> Tensor:
        """Return a causal LM's states after the final norm [M, H] at the predictions."""
        given = {"position_ids": self.positions_S[None], "use_cache": False}
        read = model.model(self.ids_S[None], attend=self.attend, **given).last_hidden_state
        states_MH: Tensor = read[0, self.places_M]
        return states_MH

    @torch.compiler.disable  # code for the documents of each batch would be compiled anew
    def attend(self, q_SHC: Tensor, k_SHC: Tensor, v_SHC: Tensor, scaling: float) -> Tensor:
        """Return the attention [S, H, C] of all positions."""
        lengths = [document.length + len(document.visible_ES) for document in self.documents]
        by_document = (
            [part.transpose(0, 1)[None] for part in each.split(lengths)]
            for each in (q_SHC, k_SHC, v_SHC)
        )
        attention, mixed = partial(F.scaled_dot_product_attention, scale=scaling), []
        with sdpa_kernel(_KERNELS):
            for document, q, k, v in zip(self.documents, *by_document, strict=True):
                text_q, text_k, text_v = (each[:, :, : document.length] for each in (q, k, v))
                mixed.append(attention(text_q, text_k, text_v, is_causal=True))
                if len(document.visible_ES):
                    masks = q[:, :, document.length :]
                    mixed.append(attention(masks, k, v, attn_mask=document.visible_ES))
        return torch.cat([each[0].transpose(0, 1) for each in mixed])


def lay_out(
    batch: PackedBatch,
    tokens: int,
    mask_token: int,
    retention: Retention = ALL,
    key: tuple[int, ...] = (),
) -> Layout:
    """Return the layout of a batch for drafts of `tokens` tokens.

    key: of the random anchors, such as (seed, step); a row's anchors depend on it and on the
    samples in the row alone.
    """
    documents_RT, supervised_RT = batch.host.documents_RT, batch.host.supervised_RT
    starts_D, lengths_D = _documents(documents_RT)
    anchors_E, depths_E = _sample_elements(batch, tokens, retention, key)
    firsts = np.searchsorted(anchors_E, np.append(starts_D, documents_RT.size))
    counts_D = np.diff(firsts)  # mask tokens of each document
    local_E = anchors_E - np.repeat(starts_D, counts_D)
    sources_S, places_F, places_E = _arrange(starts_D, lengths_D, counts_D, documents_RT.size)
    positions_S = np.zeros_like(sources_S)
    positions_S[places_E] = local_E + depths_E
    text_S = sources_S >= 0
    positions_S[text_S] = sources_S[text_S] - np.repeat(starts_D, lengths_D)
    # supervised tokens from an anchor on follow each other, so depth d predicts the d-th after it
    supervised_N = np.flatnonzero(supervised_RT)
    ahead_E = np.searchsorted(supervised_N, anchors_E) + depths_E
    tokens_M = np.append(np.arange(len(supervised_N)), ahead_E)
    depths_M = np.append(np.zeros_like(supervised_N), depths_E)
    rows_M = np.append(supervised_N, anchors_E) // documents_RT.shape[1]
    order = np.lexsort((depths_M, tokens_M))
    places_M = np.append(places_F[supervised_N], places_E)[order]
    weights_M = _weigh(rows_M, depths_M, tokens)[order]
    tokens_M, depths_M = tokens_M[order], depths_M[order]
    on_device = devices.copy_arrays_to_device(
        (sources_S, positions_S, places_M, tokens_M, depths_M, local_E, depths_E), batch.device
    )
    sources, positions, places, predicted, depths, anchors, own_depths = on_device
    ids = batch.ids_RT.flatten()[sources.clamp_min(0)].where(sources >= 0, mask_token)
    by_document = (each.split(counts_D.tolist()) for each in (anchors, own_depths))
    documents = [
        Document(length, _visible(length, *masks))
        for length, *masks in zip(lengths_D.tolist(), *by_document, strict=True)
    ]
    weights = devices.copy_to_device(torch.from_numpy(weights_M), batch.device)
    return Layout(ids, positions, documents, places, predicted, tokens_M, depths, weights)


def _arrange(
    starts_D: np.ndarray, lengths_D: np.ndarray, counts_D: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the order of the sequence, in which mask tokens follow the text of their document.

    counts_D: mask tokens of each document. size: positions of the flattened rows. Returns the
    position in the rows of each place of the sequence, -1 for mask tokens, and the places of the
    rows' positions and of the mask tokens.
    """
    ends_D = np.cumsum(lengths_D + counts_D)
    firsts_D = ends_D - lengths_D - counts_D
    places_F, sources_S = np.full(size, -1), np.full(ends_D[-1], -1)
    for start, length, first in zip(starts_D, lengths_D, firsts_D, strict=True):
        places_F[start : start + length] = first + np.arange(length)
        sources_S[first : first + length] = start + np.arange(length)
    return sources_S, places_F, np.flatnonzero(sources_S < 0)


def _documents(documents_RT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where documents start in the flattened rows, and their lengths.

    A batch without documents, of a rank without rows, has one of a single padding position.
    """
    starts, _ = document_starts(documents_RT)
    lengths, starts = np.diff(starts), starts[:-1]
    kept = documents_RT.ravel()[starts] > 0
    if not kept.any():
        return np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    return starts[kept], lengths[kept]


def _sample_elements(
    batch: PackedBatch, tokens: int, retention: Retention, key: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the anchors, as rising positions in the flattened rows, and depths of mask tokens."""
    anchors, depths, length = [], [], batch.host.supervised_RT.shape[1]
    for row, supervised_T in enumerate(batch.host.supervised_RT):
        ahead_T = _count_ahead(supervised_T)
        kept_A = np.flatnonzero(supervised_T)
        random = np.random.default_rng([*key, _PURPOSE, *batch.rows[row]])
        kept_A = random.permutation(kept_A)
        for depth in range(1, tokens):
            possible = int((ahead_T > depth).sum())
            count = math.ceil(retention.share(depth) * possible)
            kept_A = kept_A[ahead_T[kept_A] > depth][:count]
            anchors.append(row * length + kept_A)
            depths.append(np.full(len(kept_A), depth))
    flat, depth_E = (np.concatenate([*each, np.empty(0, np.int64)]) for each in (anchors, depths))
    order = np.lexsort((depth_E, flat))
    return flat[order], depth_E[order]


def _count_ahead(supervised_T: np.ndarray) -> np.ndarray:
    """Return the number of supervised positions in a row from each position on, itself included."""
    T = len(supervised_T)
    ends_T = np.where(supervised_T, T, np.arange(T))
    return np.minimum.accumulate(ends_T[::-1])[::-1] - np.arange(T)


def _weigh(rows_M: np.ndarray, depths_M: np.ndarray, tokens: int) -> np.ndarray:
    """Return the weight of each prediction's loss.

    Every depth of a row has the same sum of weights: the row's supervised tokens over `tokens`. The
    loop divides by the supervised tokens of a step, so the loss is a mean over depths of means.
    """
    counts = np.bincount(rows_M * tokens + depths_M, minlength=(rows_M.max(initial=0) + 1) * tokens)
    supervised = counts[rows_M * tokens]
    return supervised / (counts[rows_M * tokens + depths_M] * tokens)


def _visible(length: int, anchors_E: Tensor, depths_E: Tensor) -> Tensor:
    """Return the mask [E, S] of a document: the text up to the anchor, and its mask tokens."""
    text_L = torch.arange(length, device=anchors_E.device)
    group_EE = anchors_E[:, None] == anchors_E
    group_EE &= depths_E <= depths_E[:, None]
    return torch.cat((text_L <= anchors_E[:, None], group_EE), dim=1)
