"""Eager references of all losses: their formulas on full logits, with autograd.

Training computes the same losses in chunks with closed gradients (chunked.py, soft.py, family.py,
heads.py); tests compare values and gradients in float64. Read this module to learn what a loss is.

p and q are probabilities over the V tokens that the drafter proposes. q sums to 1. p sums to
m <= 1: with a shortlist it holds the teacher's true probabilities of these tokens.

Shapes: N rows, V vocabulary that the drafter proposes, T the teacher's, M drafts, K depths.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from training.losses.config import LossConfig, parts_of, teacher_temperature


def kl(a_NV: Tensor, b_NV: Tensor) -> Tensor:
    """Return KL(a || b) = sum a log(a / b) of each row; terms with a = 0 are 0."""
    return (torch.xlogy(a_NV, a_NV) - torch.xlogy(a_NV, b_NV)).sum(dim=-1)


def overlap(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Return alpha = sum min(p, q), the chance that a token sampled from q is accepted."""
    return torch.minimum(p_NV, q_NV).sum(dim=-1)


def forward_kl(p_NV: Tensor, q_NV: Tensor, loss: LossConfig) -> Tensor:
    """Return m KL(p/m || q)."""
    m_N = p_NV.sum(dim=-1)
    return m_N * kl(p_NV / m_N[:, None], q_NV)


def reverse_kl(p_NV: Tensor, q_NV: Tensor, loss: LossConfig) -> Tensor:
    """Return m KL(q || p/m)."""
    m_N = p_NV.sum(dim=-1)
    return m_N * kl(q_NV, p_NV / m_N[:, None])


def jsd(p_NV: Tensor, q_NV: Tensor, loss: LossConfig) -> Tensor:
    """Return m (beta KL(p/m || r) + (1 - beta) KL(q || r)), r = beta p/m + (1 - beta) q."""
    m_N, beta = p_NV.sum(dim=-1), loss.jsd_beta
    inside_NV = p_NV / m_N[:, None]
    r_NV = beta * inside_NV + (1 - beta) * q_NV
    return m_N * (beta * kl(inside_NV, r_NV) + (1 - beta) * kl(q_NV, r_NV))


def skewed_kl(p_NV: Tensor, q_NV: Tensor, loss: LossConfig) -> Tensor:
    """Return m KL(p/m || alpha p/m + (1 - alpha) q)."""
    m_N, alpha = p_NV.sum(dim=-1), loss.skew_alpha
    inside_NV = p_NV / m_N[:, None]
    return m_N * kl(inside_NV, alpha * inside_NV + (1 - alpha) * q_NV)


def skewed_reverse_kl(p_NV: Tensor, q_NV: Tensor, loss: LossConfig) -> Tensor:
    """Return m KL(q || alpha q + (1 - alpha) p/m)."""
    m_N, alpha = p_NV.sum(dim=-1), loss.skew_alpha
    return m_N * kl(q_NV, alpha * q_NV + (1 - alpha) * p_NV / m_N[:, None])


def tv(p_NV: Tensor, q_NV: Tensor, loss: LossConfig) -> Tensor:
    """Return the total variation distance over the full vocabulary, with q = 0 outside."""
    return ((p_NV - q_NV).abs().sum(dim=-1) + 1 - p_NV.sum(dim=-1)) / 2


def lk(p_NV: Tensor, q_NV: Tensor, loss: LossConfig) -> Tensor:
    """Return -log alpha."""
    return -overlap(p_NV, q_NV).log()


def lk_hybrid(p_NV: Tensor, q_NV: Tensor, loss: LossConfig) -> Tensor:
    """Return lambda forward_kl + (1 - lambda) tv; lambda = exp(-eta alpha) has no gradient."""
    share_N = torch.exp(-loss.lk_eta * overlap(p_NV, q_NV).detach())
    return share_N * forward_kl(p_NV, q_NV, loss) + (1 - share_N) * tv(p_NV, q_NV, loss)


SOFT: dict[str, Callable[[Tensor, Tensor, LossConfig], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "skewed_kl": skewed_kl,
    "skewed_reverse_kl": skewed_reverse_kl,
    "tv": tv,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Return -log q(label); 0 for a label of -1, outside the shortlist."""
    log_q_NV = torch.log_softmax(logits_NV, dim=-1)
    label_N = log_q_NV.gather(1, labels_N.clamp_min(0)[:, None])[:, 0]
    return torch.where(labels_N >= 0, -label_N, 0)


def p_and_q(
    loss: LossConfig, logits_NV: Tensor, teacher_NT: Tensor, shortlist_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return p and q at their temperatures from the logits of teacher and drafter."""
    p_NT = torch.softmax(teacher_NT / teacher_temperature(loss), dim=-1)
    p_NV = p_NT if shortlist_V is None else p_NT[:, shortlist_V]
    return p_NV, torch.softmax(logits_NV / loss.temperature, dim=-1)


def row_losses(
    loss: LossConfig,
    logits_NV: Tensor,
    teacher_NT: Tensor | None = None,
    labels_N: Tensor | None = None,
    shortlist_V: Tensor | None = None,
) -> Tensor:
    """Return the loss of each row [N].

    logits_NV, teacher_NT: logits of drafter and teacher. labels_N: indices into the shortlist.
    """
    total_N = logits_NV.new_zeros(len(logits_NV))
    for name, weight in parts_of(loss).items():
        if name in SOFT:
            assert teacher_NT is not None
            total_N = total_N + weight * SOFT[name](
                *p_and_q(loss, logits_NV, teacher_NT, shortlist_V), loss
            )
        else:
            assert labels_N is not None
            total_N = total_N + weight * cross_entropy(logits_NV, labels_N)
    return total_N


def d_pace(chances_MK: Tensor, present_MK: Tensor, alpha: float) -> Tensor:
    """Return the weight [M, K] of each depth of each draft: sum_{m >= k} prod_{i <= m} a_i.

    a = (1 - alpha) chance + alpha. Depths without a prediction have a = 1 and add nothing.
    """
    weights_MK = torch.zeros_like(chances_MK)
    for draft, chances_K in enumerate(chances_MK):
        survives = 1.0
        for depth, chance in enumerate(chances_K):
            if not present_MK[draft, depth]:
                continue
            survives = survives * ((1 - alpha) * float(chance) + alpha)
            weights_MK[draft, : depth + 1] += survives
    return weights_MK


def top_forward_kl(p_NV: Tensor, q_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Return m KL(p/m || q) over the tokens `ids_NK` and one bucket for all others."""
    m_N = p_NV.sum(dim=-1)
    p_NK, q_NK = p_NV.gather(1, ids_NK), q_NV.gather(1, ids_NK)
    p_NB = torch.cat((p_NK, (m_N - p_NK.sum(dim=-1))[:, None].clamp_min(0)), dim=-1)
    q_NB = torch.cat((q_NK, (1 - q_NK.sum(dim=-1))[:, None].clamp_min(1e-30)), dim=-1)
    return m_N * kl(p_NB / m_N[:, None], q_NB)
