"""Loss of a drafter that predicts several tokens ahead, over the predictions of all its heads.

The predictions are rows of one chunked loss (training/losses/chunked.py), so an output layer's
gradient is accumulated once and no [heads, tokens, vocabulary] tensor exists, whether heads share a
layer or have one each. Sums by head stay on the device.

Shapes: N predictions of all heads, C rows of a chunk, K heads, M drafts, E features, V drafted
vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decoding.sampling.warpers import draw_at
from training.losses.chunked import (
    ChunkedLoss,
    Outputs,
    RowLoss,
    Weight,
    chunk_rows,
    linear,
    trained_part,
    widen,
)


def chunked_by_head(
    features_NE: Tensor,
    outputs: Outputs,
    rows: RowLoss,
    against: Callable[[int, int], Any],
    head_N: Tensor,
    heads: int,
    weights_N: Tensor,
    chunk: int | None = None,
    figure_scale_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (sum of weight x loss over predictions, sums by head [2 K]).

    The first K sums add up the row loss's metric, the others the unweighted loss. against: returns
    the reference of rows [start, end) for `rows`. weights_N: see `decay_weights` and
    `d_pace_weights`. figure_scale_N: factor of each prediction in the sums by head; None: 1.
    Gradients reach features and output layers, of a `SplitWeight` its trained part.
    """
    heads_K = torch.arange(heads, device=head_N.device)

    def with_heads(start: int, end: int) -> Any:
        scale_C1 = None if figure_scale_N is None else figure_scale_N[start:end, None]
        return against(start, end), head_N[start:end], weights_N[start:end], scale_C1

    def weighted(logits_CV: Tensor, given: Any) -> tuple[Tensor, Tensor, Tensor]:
        of_chunk, head_C, weight_C, scale_C1 = given
        loss_C, gradient_CV, metric_C1 = rows(logits_CV, of_chunk)
        of_head_CK = (head_C[:, None] == heads_K).to(loss_C.dtype)
        if scale_C1 is not None:
            of_head_CK = of_head_CK * scale_C1
        sums_CM = torch.cat((of_head_CK * metric_C1, of_head_CK * loss_C[:, None]), dim=1)
        return loss_C * weight_C, gradient_CV.mul_(weight_C[:, None]), sums_CM

    loss, sums = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        features_NE,
        with_heads,
        weighted,
        chunk or chunk_rows(len(outputs.weights[0])),
        outputs,
        *map(trained_part, outputs.weights),
    )
    return loss, sums if len(features_NE) else sums.new_zeros(2 * heads)


def decay_weights(head_N: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """Return the weight decay^head of each prediction [N]."""
    return torch.pow(decay, head_N.to(dtype))


def d_pace_weights(
    chances_N: Tensor, draft_N: Tensor, head_N: Tensor, drafts: int, heads: int, alpha: float
) -> Tensor:
    """Return D-PACE's weight of each prediction [N] (arXiv 2605.18810).

    The weight at depth k is sum_{m >= k} prod_{i <= m} a_i with a = (1 - alpha) chance + alpha:
    the derivative of the draft's expected accepted length with respect to log a_k. Depths without a
    prediction, whose token is not supervised, have a = 1 and add nothing to the length. chances_N:
    each prediction's chance of acceptance, without gradient. draft_N: its draft, from 0 to
    drafts - 1.
    """
    smooth_MK = chances_N.new_ones(drafts, heads)
    present_MK = chances_N.new_zeros(drafts, heads)
    smooth_MK[draft_N, head_N] = (1 - alpha) * chances_N + alpha
    present_MK[draft_N, head_N] = 1
    reached_MK = smooth_MK.cumprod(dim=1) * present_MK
    length_MK = reached_MK.flip(1).cumsum(dim=1).flip(1)
    return length_MK[draft_N, head_N]


@torch.no_grad()
def chunked_chances(
    features_NE: Tensor,
    outputs: Outputs,
    chances: Callable[[Tensor, Any], Tensor],
    against: Callable[[int, int], Any],
    chunk: int | None = None,
) -> Tensor:
    """Return each prediction's chance of acceptance [N], without gradient.

    chances: function of logits and reference (training/losses/family.py).
    """
    chunk = chunk or chunk_rows(len(outputs.weights[0]))
    parts = [
        chances(
            widen(outputs.logits(features_NE, start, min(start + chunk, len(features_NE)))),
            against(start, min(start + chunk, len(features_NE))),
        )
        for start in range(0, len(features_NE), chunk)
    ]
    return torch.cat(parts) if parts else widen(features_NE.new_zeros(0))


@torch.no_grad()
def chunked_sample(
    features_NE: Tensor,
    weight_VE: Weight,
    temperature: float,
    uniforms_N: Tensor,
    chunk: int | None = None,
) -> Tensor:
    """Return an index [N] sampled from the softmax of every row's logits / temperature.

    uniforms_N: float64 numbers in (0, 1). A row of NaN gives the last index; the loss finds NaN.
    """
    chunk = chunk or chunk_rows(len(weight_VE))
    parts = []
    for start in range(0, len(features_NE), chunk):
        logits_CV = widen(linear(features_NE[start : start + chunk], weight_VE))
        p_CV = torch.softmax(logits_CV / temperature, dim=-1)
        parts.append(draw_at(p_CV, uniforms_N[start : start + chunk, None]))
    return torch.cat(parts).clamp_(max=len(weight_VE) - 1) if parts else uniforms_N.long()


@torch.no_grad()
def chunked_argmax(features_NE: Tensor, weight_VE: Weight, chunk: int | None = None) -> Tensor:
    """Return the index [N] of every row's largest logit."""
    chunk = chunk or chunk_rows(len(weight_VE))
    starts = range(0, len(features_NE), chunk)
    parts = [
        linear(features_NE[start : start + chunk], weight_VE).argmax(dim=-1) for start in starts
    ]
    return torch.cat(parts) if parts else features_NE.new_zeros(0, dtype=torch.long)
