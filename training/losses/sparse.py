"""Forward KL against a part of the teacher's distribution: draws from it, or its likeliest tokens.

Draws give an unbiased estimate of p, in which the loss and its gradient m q - p are linear
(Anshumann et al. 2025, arXiv 2503.16870). The k likeliest tokens and one bucket for all others give
a loss over k + 1 outcomes, which leaves the shares within the bucket to the drafter.

Shapes: C rows of a chunk, D draws, K likeliest tokens, V vocabulary that the drafter proposes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.losses.teacher import TeacherRows

_LEAST = 1e-30  # lower bound of the bucket's probability q


class TopRows(NamedTuple):
    """The teacher's likeliest tokens in the rows of a chunk, and the probability of the others."""

    ids_CK: Tensor  # without repeats
    p_CK: Tensor
    rest_C: Tensor


def draw_tokens(p_CV: Tensor, uniforms_CD: Tensor) -> Tensor:
    """Return tokens [C, D] drawn from p / sum p with replacement, one for each number in [0, 1)."""
    cumulative_CV = p_CV.double().cumsum(dim=-1)
    places_CD = uniforms_CD * cumulative_CV[:, -1:]
    drawn_CD = torch.searchsorted(cumulative_CV, places_CD, right=True)
    return drawn_CD.clamp_max_(p_CV.shape[-1] - 1)


def estimate(ids_CD: Tensor, mass_C: Tensor, negentropy_C: Tensor, vocabulary: int) -> TeacherRows:
    """Return an estimate of the distribution, each draw of which has the probability m / D.

    Its expectation is p; m and sum p log p are exact. Losses that are linear in p are unbiased.
    """
    rows, draws = ids_CD.shape
    p_CV = mass_C.new_zeros(rows, vocabulary)
    p_CV.scatter_add_(1, ids_CD, (mass_C / draws)[:, None].expand(rows, draws))
    return TeacherRows(p_CV, mass_C, negentropy_C)


def likeliest(rows: TeacherRows, count: int) -> TopRows:
    """Return the `count` likeliest tokens of each row."""
    p_CK, ids_CK = rows.p_CV.topk(min(count, rows.p_CV.shape[-1]), dim=-1)
    return TopRows(ids_CK, p_CK, rows.p_CV.scatter(1, ids_CK, 0).sum(dim=-1))


def top_forward_kl_rows(logits_CV: Tensor, teacher: TopRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return m KL(p/m || q) over the k tokens and the bucket, its gradient, and alpha over them.

    The bucket's alpha, min(rest of p, rest of q), is an upper bound of that of its tokens.
    """
    log_q_CV = F.log_softmax(logits_CV, dim=-1)
    log_q_CK = log_q_CV.gather(1, teacher.ids_CK)
    q_CK = log_q_CK.exp()
    others_CV = log_q_CV.exp_().scatter_(1, teacher.ids_CK, 0)  # 1 - sum q would lose its digits
    q_rest_C = others_CV.sum(dim=-1).clamp_min_(_LEAST)
    p_CK, rest_C = teacher.p_CK, teacher.rest_C
    mass_C = p_CK.sum(dim=-1) + rest_C
    loss_C = (torch.xlogy(p_CK, p_CK) - p_CK * log_q_CK).sum(dim=-1)
    loss_C += torch.xlogy(rest_C, rest_C) - rest_C * q_rest_C.log()
    loss_C -= torch.xlogy(mass_C, mass_C)
    pull_C = rest_C / q_rest_C
    gradient_CV = others_CV.mul_((mass_C - pull_C)[:, None])
    gradient_CV.scatter_(1, teacher.ids_CK, mass_C[:, None] * q_CK - p_CK)
    alpha_C = torch.minimum(p_CK, q_CK).sum(dim=-1) + torch.minimum(rest_C, q_rest_C)
    return loss_C, gradient_CV, alpha_C[:, None]
