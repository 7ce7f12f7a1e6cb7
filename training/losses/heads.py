"""Loss of a drafter that predicts several tokens ahead, over the predictions of all its heads.

The predictions are rows of one chunked loss (training/losses/chunked.py), so an output layer's
gradient is accumulated once and no [heads, tokens, vocabulary] tensor exists, whether heads share a
layer or have one each. Sums by head stay on the device.

Shapes: N predictions of all heads, C rows of a chunk, K heads, E features, V drafted vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.losses.chunked import CHUNK, ChunkedLoss, Outputs, RowLoss


def chunked_by_head(
    features_NE: Tensor,
    outputs: Outputs,
    rows: RowLoss,
    against: Callable[[int, int], Any],
    head_N: Tensor,
    heads: int,
    decay: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return (sum of decay^head x loss over predictions, sums by head [2 K]).

    The first K sums add up the row loss's metric, the others the unweighted loss. against: returns
    the reference of rows [start, end) for `rows`. Gradients reach features and output layers.
    """
    heads_K = torch.arange(heads, device=head_N.device)

    def with_heads(start: int, end: int) -> Any:
        return against(start, end), head_N[start:end]

    def weighted(logits_CV: Tensor, given: Any) -> tuple[Tensor, Tensor, Tensor]:
        of_chunk, head_C = given
        loss_C, gradient_CV, metric_C1 = rows(logits_CV, of_chunk)
        of_head_CK = (head_C[:, None] == heads_K).to(loss_C.dtype)
        weight_C = torch.pow(decay, head_C.to(loss_C.dtype))
        sums_CM = torch.cat((of_head_CK * metric_C1, of_head_CK * loss_C[:, None]), dim=1)
        return loss_C * weight_C, gradient_CV.mul_(weight_C[:, None]), sums_CM

    loss, sums = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        features_NE, with_heads, weighted, chunk, outputs.layers_N, *outputs.weights
    )
    return loss, sums if len(features_NE) else sums.new_zeros(2 * heads)


@torch.no_grad()
def chunked_argmax(features_NE: Tensor, weight_VE: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return the index [N] of every row's largest logit."""
    starts = range(0, len(features_NE), chunk)
    parts = [
        F.linear(features_NE[start : start + chunk], weight_VE).argmax(dim=-1) for start in starts
    ]
    return torch.cat(parts) if parts else features_NE.new_zeros(0, dtype=torch.long)
