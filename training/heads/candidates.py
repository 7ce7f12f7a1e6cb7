"""Heads that draft each token from a short list: the likeliest tokens by a part of their features.

The candidates of a prediction are the tokens with the largest logits of its first features. Their
logits of all features decide among them, and no other token is drafted. A loss has two terms of the
same kind: one of the first features over the whole vocabulary, from which the candidates come, and
one of all features among the candidates. A token that is no candidate has no part in the second
(DFlash2 of z-lab, 2026).

Shapes: N predictions, E features, V drafted vocabulary, C candidates, R rows of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.losses.chunked import Outputs, SplitWeight, chunk_rows, split_weight, widen
from training.losses.family import Reference
from training.losses.teacher import TeacherRows

ROWS = 512  # predictions whose listed output weights are gathered at once

Against = Callable[[int, int], Reference]  # what the predictions [start, end) learn


@dataclass(frozen=True)
class Candidates:
    """The restriction of predictions to their likeliest tokens by the frozen part of the logits."""

    count: int  # C

    @torch.no_grad()
    def choose(self, features_NE: Tensor, weight: SplitWeight) -> Tensor:
        """Return the indices [N, C] of the candidates, the likeliest first."""
        first_NE, count = weight.split(features_NE)[0], min(self.count, len(weight))
        parts = [
            F.linear(part_RE, weight.frozen_VH).topk(count, dim=-1).indices
            for part_RE in first_NE.split(chunk_rows(len(weight)))
        ]
        return torch.cat(parts)

    def logits(self, features_NE: Tensor, weight: SplitWeight, indices_NC: Tensor) -> Tensor:
        """Return the logits [N, C] of these candidates, by all features."""
        first_NE, others_NE = weight.split(features_NE)
        found_NC = _ListedLogits.apply(first_NE, weight.frozen_VH, indices_NC)  # type: ignore[no-untyped-call]
        more_NC = _ListedLogits.apply(others_NE, weight.trained_VE, indices_NC)  # type: ignore[no-untyped-call]
        return widen(found_NC + more_NC)


@dataclass(frozen=True)
class RestrictedOutputs(Outputs):
    """An output layer whose logits are -inf, except those of each row's candidates."""

    candidates: Candidates | None = None

    def logits(self, hidden_NH: Tensor, start: int, end: int) -> Tensor:
        logits_RV = super().logits(hidden_NH, start, end)
        if self.candidates is None:
            return logits_RV
        indices_RC = self.candidates.choose(hidden_NH[start:end], split_weight(self.weights[0]))
        return keep_listed(logits_RV, indices_RC)


def keep_listed(logits_RV: Tensor, indices_RC: Tensor) -> Tensor:
    """Return logits with -inf in place of those that are not listed."""
    others_RV = torch.full_like(logits_RV, float("-inf"))
    return others_RV.scatter(1, indices_RC, logits_RV.gather(1, indices_RC))


def choose_among(
    choose: Callable[[Tensor, Tensor, int], Tensor],
    candidates: Candidates,
    features_NE: Tensor,
    weight: SplitWeight,
    depth: int,
) -> Tensor:
    """Return the indices [N] of the tokens that `choose` takes from each row's candidates."""
    indices_NC = candidates.choose(features_NE, weight)
    logits_NC = candidates.logits(features_NE, weight, indices_NC)
    chosen_N = choose(logits_NC, _identity(logits_NC), depth)
    return indices_NC.gather(1, chosen_N[:, None]).squeeze(1)


@dataclass(frozen=True)
class Predictions:
    """Predictions of a head, and what they learn."""

    features_NE: Tensor
    outputs: Outputs
    against: Against


def among_candidates(
    candidates: Candidates, features_NE: Tensor, weight: SplitWeight, against: Against
) -> Predictions:
    """Return predictions among the candidates, whose features are the candidates' logits.

    against: what the predictions over the whole vocabulary learn.
    """
    indices_NC = candidates.choose(features_NE, weight)
    logits_NC = candidates.logits(features_NE, weight, indices_NC)
    N, chunk = len(indices_NC), chunk_rows(len(weight))
    parts = [
        _listed(against(start, min(start + chunk, N)), indices_NC[start : start + chunk])
        for start in range(0, N, chunk)
    ]
    labels = [part.labels_C for part in parts if part.labels_C is not None]
    teachers = [part.teacher for part in parts if part.teacher is not None]
    labels_N = torch.cat(labels) if labels else None
    teacher = TeacherRows(*map(torch.cat, zip(*teachers, strict=True))) if teachers else None

    def listed(start: int, end: int) -> Reference:
        return Reference(
            None if labels_N is None else labels_N[start:end],
            None if teacher is None else TeacherRows(*(part[start:end] for part in teacher)),
        )

    return Predictions(logits_NC, Outputs([_identity(logits_NC)]), listed)


def _listed(reference: Reference, indices_RC: Tensor) -> Reference:
    """Return what predictions learn among their candidates; label -1 for a token that is none."""
    labels_R, teacher = reference
    if labels_R is not None:
        same_RC = indices_RC == labels_R[:, None]
        labels_R = same_RC.long().argmax(dim=1).where(same_RC.any(dim=1), -1)
    if teacher is not None:
        p_RC = teacher.p_CV.gather(1, indices_RC)
        teacher = TeacherRows(p_RC, p_RC.sum(dim=-1), torch.xlogy(p_RC, p_RC).sum(dim=-1))
    return Reference(labels_R, teacher)


def _identity(logits_NC: Tensor) -> Tensor:
    """Return output weights [C, C] that leave logits as they are."""
    return torch.eye(logits_NC.shape[1], dtype=logits_NC.dtype, device=logits_NC.device)


class _ListedLogits(torch.autograd.Function):
    """Logits [N, C] of listed rows of the output weights, gathered for some predictions at once."""

    @staticmethod
    def forward(ctx: Any, features_NE: Tensor, weight_VE: Tensor, indices_NC: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(features_NE, weight_VE, indices_NC)
        parts = [
            torch.einsum("re,rce->rc", part_RE, weight_VE[indices_RC])
            for part_RE, indices_RC in _chunks(features_NE, indices_NC)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient_NC: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        features_NE, weight_VE, indices_NC = ctx.saved_tensors
        of_features = [
            torch.einsum("rc,rce->re", part_RC, weight_VE[indices_RC])
            for part_RC, indices_RC in _chunks(gradient_NC, indices_NC)
        ]
        if not ctx.needs_input_grad[1]:
            return torch.cat(of_features), None, None
        of_weight_VE = torch.zeros_like(weight_VE)
        for (part_RE, indices_RC), (part_RC, _) in zip(
            _chunks(features_NE, indices_NC), _chunks(gradient_NC, indices_NC), strict=True
        ):
            outer_RCE = part_RC[:, :, None] * part_RE[:, None]
            of_weight_VE.index_add_(0, indices_RC.flatten(), outer_RCE.flatten(0, 1))
        return torch.cat(of_features), of_weight_VE, None


def _chunks(values_Nx: Tensor, indices_NC: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the rows in chunks, with their listed indices."""
    return list(zip(values_Nx.split(ROWS), indices_NC.split(ROWS), strict=True))
