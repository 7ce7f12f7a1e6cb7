"""Losses over the vocabulary, computed in chunks of rows from hidden states.

A row's loss and its gradient with respect to the logits have closed forms, so one pass computes
both. Nothing of size [tokens, vocabulary] outlives a chunk: neither the logits of student and
teacher nor their gradients. Chunking follows Liger-Kernel's fused linear losses, in plain PyTorch.

Shapes: N supervised tokens, C tokens of a chunk, H student width, G teacher width, V vocabulary, E
trained features of a `SplitWeight`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1024  # most rows whose logits are in memory at once
CHUNK_BYTES = 1 << 28  # most bytes of a chunk's logits in float32

# (student logits_CV in float32, the chunk's reference) -> (loss_C, gradient of its sum with respect
# to logits_CV, metrics_CM)
RowLoss = Callable[[Tensor, Any], tuple[Tensor, Tensor, Tensor]]


def chunk_rows(vocabulary: int) -> int:
    """Return the rows of a chunk: CHUNK, halved until their logits fit into CHUNK_BYTES."""
    rows = CHUNK
    while rows > 1 and rows * vocabulary * 4 > CHUNK_BYTES:
        rows //= 2
    return rows


def cross_entropy_rows(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's cross-entropy -log q(label), its gradient and its metric.

    The gradient with respect to the logits is q - onehot(label). Metric: 1 if the argmax is the
    label, else 0.
    """
    log_q_CV = F.log_softmax(logits_CV, dim=-1)
    loss_C = -log_q_CV.gather(1, labels_C[:, None]).squeeze(1)
    correct_C = (logits_CV.argmax(dim=-1) == labels_C).to(logits_CV.dtype)
    gradient_CV = log_q_CV.exp_()
    gradient_CV.scatter_add_(
        1, labels_C[:, None], torch.full_like(labels_C[:, None], -1, dtype=gradient_CV.dtype)
    )
    return loss_C, gradient_CV, correct_C[:, None]


def listed_cross_entropy_rows(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `cross_entropy_rows`, but with label -1 for tokens outside the draft vocabulary.

    A row with label -1 has no loss and no gradient, and counts as a wrong prediction.
    """
    known_C = (labels_C >= 0).to(logits_CV.dtype)
    loss_C, gradient_CV, metric_C1 = cross_entropy_rows(logits_CV, labels_C.clamp_min(0))
    return loss_C * known_C, gradient_CV.mul_(known_C[:, None]), metric_C1 * known_C[:, None]


def at_temperature(rows: RowLoss, temperature: float) -> RowLoss:
    """Return `rows` of logits / temperature, without a factor temperature^2 on the loss."""
    if temperature == 1.0:
        return rows

    def scaled(logits_CV: Tensor, reference: Any) -> tuple[Tensor, Tensor, Tensor]:
        loss_C, gradient_CV, metric_CM = rows(logits_CV / temperature, reference)
        return loss_C, gradient_CV.div_(temperature), metric_CM

    return scaled


def widen(values: Tensor) -> Tensor:
    """Return float64 values unchanged and others in float32."""
    return values if values.dtype == torch.float64 else values.float()


@dataclass(frozen=True)
class SplitWeight:
    """An output layer [V, H + E] whose weights of the first H features are frozen.

    Its logits are the sum of two products, so its parts are never joined and the frozen one has no
    gradient.
    """

    frozen_VH: Tensor
    trained_VE: Tensor

    def __len__(self) -> int:
        return len(self.trained_VE)

    def split(self, features_NF: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [N, H] of the frozen part and those of the trained one, [N, E]."""
        width = self.frozen_VH.shape[1]
        return features_NF[:, :width], features_NF[:, width:]


Weight = Tensor | SplitWeight


def split_weight(weight: Weight) -> SplitWeight:
    """Return the output layer of a head with a correction, which is in two parts."""
    assert isinstance(weight, SplitWeight), "a correction needs frozen weights and its own"
    return weight


def trained_part(weight: Weight) -> Tensor:
    """Return the part of an output layer that may need a gradient; it reads the last features."""
    return weight if isinstance(weight, Tensor) else weight.trained_VE


def linear(hidden_CH: Tensor, weight: Weight) -> Tensor:
    """Return the logits [C, V] of an output layer."""
    if isinstance(weight, Tensor):
        return F.linear(hidden_CH, weight)
    first_CH, others_CE = weight.split(hidden_CH)
    return torch.addmm(F.linear(first_CH, weight.frozen_VH), others_CE, weight.trained_VE.T)


def _through(gradient_CV: Tensor, weight: Weight) -> Tensor:
    """Return the gradient of an output layer's inputs from that of its logits."""
    if isinstance(weight, Tensor):
        return gradient_CV @ weight
    return torch.cat((gradient_CV @ weight.frozen_VH, gradient_CV @ weight.trained_VE), 1)


@dataclass(frozen=True)
class Outputs:
    """Output layers of the rows: one that all rows share, or several.

    With several, the rows of one layer must be contiguous in every chunk. The layer of each row is
    known on the host, so nothing waits for the device, and a row's logits are computed for its own
    layer only.
    """

    # [V, H] each
    weights: Sequence[Weight]
    # index of each row's layer; None: the first layer for all rows
    layers_N: np.ndarray | None = None

    def spans(self, start: int, end: int) -> list[tuple[int, slice]]:
        """Return (layer, its rows counted from `start`) of rows [start, end)."""
        if self.layers_N is None:
            return [(0, slice(0, end - start))]
        part = self.layers_N[start:end]
        edges = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]
        return [(int(part[first]), slice(first, last)) for first, last in pairwise(edges)]

    def logits(self, hidden_NH: Tensor, start: int, end: int) -> Tensor:
        """Return the logits [C, V] of rows [start, end)."""
        part_CH = hidden_NH[start:end]
        parts = [linear(part_CH[one], self.weights[layer]) for layer, one in self.spans(start, end)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _slabs(weight_VH: Tensor) -> Iterator[slice]:
    """Yield slices of the vocabulary whose weights take at most CHUNK_BYTES."""
    vocabulary, width = weight_VH.shape
    rows = max(1, CHUNK_BYTES // (width * weight_VH.element_size()))
    for start in range(0, vocabulary, rows):
        yield slice(start, min(start + rows, vocabulary))


class ChunkedLoss(torch.autograd.Function):
    """Sum of a row loss over all rows, whose gradient is computed in the forward pass.

    trained: the `trained_part` of every output layer.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_NH: Tensor,
        reference: Callable[[int, int], Any],
        rows: RowLoss,
        chunk: int,
        outputs: Outputs,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        wide = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        grad_hidden_NH = torch.zeros_like(hidden_NH) if need_hidden else None
        grads = [
            torch.zeros_like(weight_VE, dtype=wide) if need else None
            for weight_VE, need in zip(trained, need_weights, strict=True)
        ]
        loss = torch.zeros((), dtype=wide, device=hidden_NH.device)
        metrics: Tensor | None = None
        for start in range(0, len(hidden_NH), chunk):
            end = min(start + chunk, len(hidden_NH))
            part_CH = hidden_NH[start:end]
            logits_CV = widen(outputs.logits(hidden_NH, start, end))
            loss_C, gradient_CV, metric_CM = rows(logits_CV, reference(start, end))
            loss += loss_C.sum()
            metrics = metric_CM.sum(dim=0) if metrics is None else metrics + metric_CM.sum(dim=0)
            del logits_CV  # its memory is free for the products
            gradient_CV = gradient_CV.to(hidden_NH.dtype)
            for layer, one in outputs.spans(start, end):
                if grad_hidden_NH is not None:
                    grad_hidden_NH[start:end][one] = _through(
                        gradient_CV[one], outputs.weights[layer]
                    )
                if (grad_VE := grads[layer]) is not None:
                    part_CE = part_CH[one, -grad_VE.shape[1] :]
                    for slab in _slabs(trained[layer]):
                        grad_VE[slab] += gradient_CV[one, slab].T @ part_CE
            del gradient_CV  # its memory is free for the next chunk
        kept = [
            None if grad_VE is None else grad_VE.to(weight_VE.dtype)
            for grad_VE, weight_VE in zip(grads, trained, strict=True)
        ]
        ctx.save_for_backward(grad_hidden_NH, *kept)
        metrics = loss.new_zeros(1) if metrics is None else metrics
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden_NH, *grads = [
            None if grad is None else (grad * grad_loss).to(grad.dtype)
            for grad in ctx.saved_tensors
        ]
        return grad_hidden_NH, None, None, None, None, *grads


def chunked_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    rows: RowLoss,
    reference: Callable[[int, int], Any],
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sums over all rows of a row loss in nats and of its metrics [M].

    reference: returns what `rows` compares rows [start, end) with, such as the teacher's
    distribution, which is then computed chunk by chunk too. chunk: rows; None: `chunk_rows`.
    """
    chunk = chunk or chunk_rows(len(weight_VH))
    outputs = Outputs([weight_VH])
    return ChunkedLoss.apply(hidden_NH, reference, rows, chunk, outputs, weight_VH)  # type: ignore[no-untyped-call]


def chunked_cross_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    chunk: int | None = None,
    rows: RowLoss = cross_entropy_rows,
) -> tuple[Tensor, Tensor]:
    """Return (sum of -log q(label) in nats, number of correct argmaxes [1]) over all rows.

    rows: `listed_cross_entropy_rows` for a draft vocabulary.
    """
    return chunked_loss(hidden_NH, weight_VH, rows, lambda a, b: labels_N[a:b], chunk)
