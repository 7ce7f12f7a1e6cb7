"""Losses of a drafter's distribution q against a teacher's distribution p, with their gradients.

Speculative sampling accepts a token sampled from q with probability alpha = sum_v min(p_v, q_v) =
1 - TV(p, q) (Leviathan et al. 2023, section 3.3). `tv` and the LK losses (arXiv 2602.23881) train
on alpha itself. The others are divergences of q from p.

If q covers a shortlist, p sums to m < 1 there. tv, lk and alpha take p as it is: a token outside
can never be accepted, so tv is the distance over the full vocabulary. A divergence compares q with
p / m, and m multiplies it: a row counts by the probability that the shortlist can serve it.

A loss returns its value and its gradient with respect to the logits of q. A loss whose derivative
with respect to q_v is s_v has the gradient q (s - sum q s). Plain formulas of all losses, with
autograd, are in training/losses/eager.py; a test compares them.

Shapes: C rows of a chunk, V vocabulary that q covers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.losses.chunked import RowLoss
from training.losses.config import LossConfig
from training.losses.teacher import TeacherRows

_LEAST = 1e-30  # lower bound of arguments of a logarithm


class Distributions(NamedTuple):
    """The drafter's distribution q beside the teacher's p, in the rows of a chunk."""

    q_CV: Tensor
    log_q_CV: Tensor
    p_CV: Tensor
    mass_C: Tensor  # sum p
    negentropy_C: Tensor  # sum p log p
    alpha_C: Tensor  # sum min(p, q)


# -> (loss_C, gradient of its sum with respect to the logits of q, in memory of its own)
SoftLoss = Callable[[Distributions], tuple[Tensor, Tensor]]


def soft_rows(loss: SoftLoss) -> RowLoss:
    """Return the row loss of a loss against `TeacherRows`; its metric is alpha."""

    def rows(logits_CV: Tensor, teacher: TeacherRows) -> tuple[Tensor, Tensor, Tensor]:
        log_q_CV = F.log_softmax(logits_CV, dim=-1)
        q_CV = log_q_CV.exp()
        alpha_C = torch.minimum(teacher.p_CV, q_CV).sum(dim=-1)
        loss_C, gradient_CV = loss(Distributions(q_CV, log_q_CV, *teacher, alpha_C))
        return loss_C, gradient_CV, alpha_C[:, None]

    return rows


def forward_kl(both: Distributions) -> tuple[Tensor, Tensor]:
    """Return m KL(p/m || q) and its gradient m q - p."""
    gradient_CV = (both.q_CV * both.mass_C[:, None]).sub_(both.p_CV)
    return _kl_to(both.log_q_CV, both), gradient_CV


def reverse_kl(both: Distributions) -> tuple[Tensor, Tensor]:
    """Return m KL(q || p/m) and its gradient; derivative: m (log q - log p)."""
    mass_C = both.mass_C
    slope_CV = both.p_CV.clamp_min(_LEAST).log_().neg_().add_(both.log_q_CV)
    mean_C, gradient_CV = _through_softmax(slope_CV, both.q_CV)
    return mass_C * mean_C + _times_log(mass_C), gradient_CV.mul_(mass_C[:, None])


def jsd(beta: float) -> SoftLoss:
    """Return m (beta KL(p/m || r) + (1 - beta) KL(q || r)), r = beta p/m + (1 - beta) q.

    Derivative: m (1 - beta) (log q - log r). Agarwal et al. 2024 (arXiv 2306.13649), section 2.
    """

    def loss(both: Distributions) -> tuple[Tensor, Tensor]:
        mass_C, log_r_CV = both.mass_C, _mix(both, beta).log_()
        kl_C = _kl_to(log_r_CV, both)
        slope_CV = log_r_CV.neg_().add_(both.log_q_CV)
        mean_C, gradient_CV = _through_softmax(slope_CV, both.q_CV)
        gradient_CV.mul_((1 - beta) * mass_C[:, None])
        return beta * kl_C + (1 - beta) * mass_C * mean_C, gradient_CV

    return loss


def skewed_kl(alpha: float) -> SoftLoss:
    """Return m KL(p/m || r), r = alpha p/m + (1 - alpha) q.

    Derivative: -(1 - alpha) p / r. Ko et al. 2024 (DistiLLM, arXiv 2402.03898), section 3.1.
    """

    def loss(both: Distributions) -> tuple[Tensor, Tensor]:
        r_CV = _mix(both, alpha)
        kl_C = _kl_to(r_CV.log(), both)
        slope_CV = r_CV.reciprocal_().mul_(both.p_CV)
        _, gradient_CV = _through_softmax(slope_CV, both.q_CV)
        return kl_C, gradient_CV.mul_(alpha - 1)

    return loss


def skewed_reverse_kl(alpha: float) -> SoftLoss:
    """Return m KL(q || r), r = (1 - alpha) p/m + alpha q.

    Derivative: m (log q - log r - alpha q / r). DistiLLM, section 3.1.
    """

    def loss(both: Distributions) -> tuple[Tensor, Tensor]:
        mass_C, r_CV = both.mass_C, _mix(both, 1 - alpha)
        slope_CV = r_CV.log().neg_().add_(both.log_q_CV)
        kl_C = (both.q_CV * slope_CV).sum(dim=-1)
        slope_CV.addcdiv_(both.q_CV, r_CV, value=-alpha)
        _, gradient_CV = _through_softmax(slope_CV, both.q_CV)
        return mass_C * kl_C, gradient_CV.mul_(mass_C[:, None])

    return loss


def tv(both: Distributions) -> tuple[Tensor, Tensor]:
    """Return 1 - alpha, the total variation distance, and its gradient.

    Derivative: -1 where q < p, else 0.
    """
    slope_CV = (both.q_CV < both.p_CV).to(both.q_CV.dtype).neg_()
    _, gradient_CV = _through_softmax(slope_CV, both.q_CV)
    return 1 - both.alpha_C, gradient_CV


def lk(both: Distributions) -> tuple[Tensor, Tensor]:
    """Return -log alpha and its gradient, that of `tv` divided by alpha."""
    alpha_C = both.alpha_C.clamp_min(_LEAST)
    _, gradient_CV = tv(both)
    return -alpha_C.log(), gradient_CV.div_(alpha_C[:, None])


def lk_hybrid(eta: float) -> SoftLoss:
    """Return lambda forward_kl + (1 - lambda) tv with lambda = exp(-eta alpha).

    No gradient flows through lambda.
    """

    def loss(both: Distributions) -> tuple[Tensor, Tensor]:
        (kl_C, gradient_CV), (tv_C, tv_gradient_CV) = forward_kl(both), tv(both)
        share_C = torch.exp(-eta * both.alpha_C)
        gradient_CV.mul_(share_C[:, None]).addcmul_(tv_gradient_CV, (1 - share_C)[:, None])
        return share_C * kl_C + (1 - share_C) * tv_C, gradient_CV

    return loss


# name -> constructor from the settings
SOFT_LOSSES: dict[str, Callable[[LossConfig], SoftLoss]] = {
    "forward_kl": lambda config: forward_kl,
    "reverse_kl": lambda config: reverse_kl,
    "jsd": lambda config: jsd(config.jsd_beta),
    "skewed_kl": lambda config: skewed_kl(config.skew_alpha),
    "skewed_reverse_kl": lambda config: skewed_reverse_kl(config.skew_alpha),
    "tv": lambda config: tv,
    "lk": lambda config: lk,
    "lk_hybrid": lambda config: lk_hybrid(config.lk_eta),
}


def weighted_sum(parts: Sequence[tuple[SoftLoss, float]]) -> SoftLoss:
    """Return the sum of losses, each times its weight."""
    (first, first_weight), *others = parts
    if not others and first_weight == 1:
        return first

    def loss(both: Distributions) -> tuple[Tensor, Tensor]:
        loss_C, gradient_CV = first(both)
        loss_C, gradient_CV = loss_C * first_weight, gradient_CV.mul_(first_weight)
        for part, weight in others:
            part_C, part_CV = part(both)
            loss_C, gradient_CV = loss_C + weight * part_C, gradient_CV.add_(part_CV, alpha=weight)
        return loss_C, gradient_CV

    return loss


def _through_softmax(slope_CV: Tensor, q_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum q s, and the gradient q (s - sum q s) in the memory of s."""
    weighted_CV = slope_CV.mul_(q_CV)
    mean_C = weighted_CV.sum(dim=-1)
    return mean_C, weighted_CV.addcmul_(q_CV, mean_C[:, None], value=-1)


def _mix(both: Distributions, share: float) -> Tensor:
    """Return share p/m + (1 - share) q, at least _LEAST."""
    mass_C1 = both.mass_C.clamp_min(_LEAST)[:, None]
    r_CV = (both.q_CV * (1 - share)).addcdiv_(both.p_CV, mass_C1, value=share)
    return r_CV.clamp_min_(_LEAST)


def _kl_to(log_r_CV: Tensor, both: Distributions) -> Tensor:
    """Return m KL(p/m || r)."""
    cross_C = (both.p_CV * log_r_CV).sum(dim=-1)
    return both.negentropy_C - cross_C - _times_log(both.mass_C)


def _times_log(mass_C: Tensor) -> Tensor:
    """Return m log m."""
    return mass_C * mass_C.clamp_min(_LEAST).log()
