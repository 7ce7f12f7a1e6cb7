"""Losses against a teacher's distribution p, row by row: forward KL and losses on acceptance.

Speculative sampling accepts a token sampled from q with probability alpha = sum_v min(p_v, q_v) =
1 - TV(p, q) (Leviathan et al. 2023, section 3.3). LK losses (arXiv 2602.23881) train on it: -log
alpha, or KL that gives way to TV as alpha grows. All have gradients in closed form, so they run in
chunks (training/losses/chunked.py).

If q covers a shortlist of the vocabulary, p holds its true probabilities there, which sum to less
than 1: tokens outside can never be accepted, and KL weights a row by its mass on the shortlist.

Several rows may share one distribution (all heads that predict a token do), which is computed once.

Shapes: C rows of a chunk, P positions of the teacher, V vocabulary that q covers.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.losses.chunked import CHUNK, ChunkedLoss, RowLoss, at_temperature, widen

_LEAST = 1e-30  # lower bound of alpha that keeps its logarithm finite


class TeacherRows(NamedTuple):
    """The teacher's distribution p in the rows of a chunk."""

    p_CV: Tensor
    mass_C: Tensor  # sum p: 1 over a full vocabulary
    negentropy_C: Tensor  # sum p log p

    def select(self, index_C: Tensor) -> "TeacherRows":
        """Return the distributions of these rows."""
        return TeacherRows(*(part.index_select(0, index_C) for part in self))


def kl_rows(logits_CV: Tensor, teacher: TeacherRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return mass x KL(p / mass || q), its gradient mass q - p, and alpha as the metric."""
    p_CV, mass_C, negentropy_C = teacher
    log_q_CV = F.log_softmax(logits_CV, dim=-1)
    loss_C = negentropy_C - (p_CV * log_q_CV).sum(dim=-1) - mass_C * mass_C.clamp_min(_LEAST).log()
    q_CV = log_q_CV.exp_()
    alpha_C = torch.minimum(p_CV, q_CV).sum(dim=-1)
    return loss_C, q_CV.mul_(mass_C[:, None]).sub_(p_CV), alpha_C[:, None]


def lk_rows(logits_CV: Tensor, teacher: TeacherRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return -log alpha, its gradient (d TV / dlogits) / alpha, and alpha as the metric."""
    alpha_C, slope_CV = _acceptance(logits_CV, teacher.p_CV)
    kept_C = alpha_C.clamp_min(_LEAST)
    return -kept_C.log(), slope_CV.div_(-kept_C[:, None]), alpha_C[:, None]


def lk_hybrid_rows(eta: float) -> RowLoss:
    """Return the row loss lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha).

    No gradient flows through lambda. Metric: alpha.
    """

    def rows(logits_CV: Tensor, teacher: TeacherRows) -> tuple[Tensor, Tensor, Tensor]:
        kl_C, gradient_CV, metric_C1 = kl_rows(logits_CV, teacher)
        alpha_C, slope_CV = _acceptance(logits_CV, teacher.p_CV)
        share_C = torch.exp(-eta * alpha_C)
        gradient_CV.mul_(share_C[:, None]).sub_(slope_CV.mul_((1 - share_C)[:, None]))
        return share_C * kl_C + (1 - share_C) * (1 - alpha_C), gradient_CV, metric_C1

    return rows


def _acceptance(logits_CV: Tensor, p_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and its gradient q (m - sum m q) with respect to the logits; m marks q < p."""
    q_CV = torch.softmax(logits_CV, dim=-1)
    alpha_C = torch.minimum(p_CV, q_CV).sum(dim=-1)
    below_CV = torch.where(q_CV < p_CV, q_CV, 0)
    slope_CV = below_CV - q_CV.mul_(below_CV.sum(dim=-1, keepdim=True))
    return alpha_C, slope_CV


class Teacher:
    """The teacher's distribution, computed on demand from its hidden states."""

    def __init__(
        self,
        hidden_PG: Tensor,
        weight_VG: Tensor,
        temperature: float = 1.0,
        shortlist_V: Tensor | None = None,
    ) -> None:
        """Store the teacher's hidden states and output weights.

        temperature: divides the teacher's logits. shortlist_V: the rising ids that q covers; None:
        the full vocabulary.
        """
        self.hidden_PG, self.weight_VG = hidden_PG, weight_VG
        self.temperature, self.shortlist_V = temperature, shortlist_V

    def at(self, start: int, end: int) -> TeacherRows:
        """Return the distributions at positions [start, end)."""
        logits_CV = widen(F.linear(self.hidden_PG[start:end], self.weight_VG))
        log_p_CV = F.log_softmax(logits_CV / self.temperature, dim=-1)
        if self.shortlist_V is not None:
            log_p_CV = log_p_CV.index_select(1, self.shortlist_V)
        p_CV = log_p_CV.exp()
        return TeacherRows(p_CV, p_CV.sum(dim=-1), log_p_CV.mul_(p_CV).sum(dim=-1))

    def shared(self, targets_N: Tensor, places: np.ndarray) -> Callable[[int, int], TeacherRows]:
        """Return a function from rows [start, end) to the distributions at their positions.

        targets_N: the position of each row. places: the same on the host. All positions between the
        first and the last of a chunk are computed, so rows of a chunk should have close positions.
        """

        def rows(start: int, end: int) -> TeacherRows:
            first, last = int(places[start:end].min()), int(places[start:end].max())
            return self.at(first, last + 1).select(targets_N[start:end] - first)

        return rows


def chunked_kl_on_tokens(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    teacher_hidden_NG: Tensor,
    teacher_weight_TG: Tensor,
    shortlist_V: Tensor,
    chunk: int = CHUNK,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return (sum of the loss of `kl_rows`, sum of sum_v min(p, q) [1]) over all rows.

    teacher_weight_TG: over the full vocabulary of T tokens. shortlist_V: the rising ids that q
    covers. The teacher's logits are computed chunk by chunk, without gradient. temperature: divides
    the logits of both.
    """
    teacher = Teacher(teacher_hidden_NG, teacher_weight_TG, temperature, shortlist_V)
    rows = at_temperature(kl_rows, temperature)
    return ChunkedLoss.apply(hidden_NH, teacher.at, rows, chunk, None, weight_VH)  # type: ignore[no-untyped-call]
