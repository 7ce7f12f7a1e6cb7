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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from training.data.packing import PackedBatch
from training.models.attention import document_starts

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
        mixed = []
        for document, q, k, v in zip(self.documents, *by_document, strict=True):
            text_q, text_k, text_v = (each[:, :, : document.length] for each in (q, k, v))
            mixed.append(
                F.scaled_dot_product_attention(
                    text_q, text_k, text_v, is_causal=True, scale=scaling
                )
            )
            if len(document.visible_ES):
                masks, visible = q[:, :, document.length :], document.visible_ES
                mixed.append(
                    F.scaled_dot_product_attention(masks, k, v, attn_mask=visible, scale=scaling)
                )
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
    starts, lengths = _documents(documents_RT)
    supervised = np.flatnonzero(supervised_RT)
    anchors, depths = _sample_elements(batch, tokens, retention, key)
    # mask tokens of each document, and its place in the sequence
    firsts = np.searchsorted(anchors, np.append(starts, documents_RT.size))
    counts = np.diff(firsts)
    offsets = np.cumsum(np.append(0, lengths + counts))
    of_text = np.repeat(offsets[:-1] - starts, lengths)
    text = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths)])
    places = np.full(documents_RT.size, -1)
    places[text] = text + of_text
    document = np.repeat(np.arange(len(starts)), counts)
    ahead = np.arange(len(anchors)) - firsts[document] + (offsets[:-1] + lengths)[document]
    source, positions = np.full((2, offsets[-1]), -1)
    source[places[text]] = text
    positions[places[text]] = text - np.repeat(starts, lengths)
    positions[ahead] = anchors - starts[document] + depths
    # supervised tokens from an anchor on follow each other, so depth d predicts the d-th after it
    predicted = np.append(np.arange(len(supervised)), np.searchsorted(supervised, anchors) + depths)
    at = np.append(places[supervised], ahead)
    depth = np.append(np.zeros(len(supervised), dtype=np.int64), depths)
    weights = _weigh(np.append(supervised, anchors) // documents_RT.shape[1], depth, tokens)
    order = np.lexsort((depth, predicted))
    indices = (source, positions, at[order], predicted[order], depth[order])
    local = (anchors - starts[document], depths)
    source_S, positions_S, places_M, tokens_M, depths_M, anchors_E, depths_E = (
        devices.copy_arrays_to_device((*indices, *local), batch.device)
    )
    ids_S = batch.ids_RT.flatten()[source_S.clamp_min(0)].where(source_S >= 0, mask_token)
    parts = zip(lengths.tolist(), anchors_E.split(counts.tolist()), depths_E.split(counts.tolist()))
    return Layout(
        ids_S,
        positions_S,
        [Document(length, _visible(length, *pair)) for length, *pair in parts],
        places_M,
        tokens_M,
        predicted[order],
        depths_M,
        devices.copy_to_device(torch.from_numpy(weights[order]), batch.device),
    )


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
