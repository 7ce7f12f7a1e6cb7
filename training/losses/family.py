"""The row loss of a `LossConfig`, for small models and for heads.

Losses against the teacher divide the drafter's logits by `temperature`, the serving temperature,
and take p at `teacher_temperature`, by default the same. The cross-entropy of a mixture is taken at
temperature 1. Sums are not multiplied by temperature^2.

Shapes: C rows of a chunk, G teacher width, H drafter width, N rows, T target vocabulary, V
vocabulary that the drafter proposes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.losses.chunked import (
    RowLoss,
    at_temperature,
    chunked_loss,
    cross_entropy_rows,
)
from training.losses.config import LossConfig, parts_of, uses_teacher
from training.losses.soft import SOFT_LOSSES, soft_rows, weighted_sum
from training.losses.teacher import Teacher, TeacherRows


class Reference(NamedTuple):
    """What the rows of a chunk learn; a loss reads only the part that it needs."""

    # indices of the tokens in the drafter's vocabulary, -1 outside it
    labels_C: Tensor | None = None
    teacher: TeacherRows | None = None


def reference_rows(loss: LossConfig, token_rows: RowLoss = cross_entropy_rows) -> RowLoss:
    """Return the row loss against a `Reference`.

    Its metric is alpha = sum min(p, q) for losses against the teacher, mixtures too; for losses on
    tokens, 1 if the argmax is the label. token_rows: `listed_cross_entropy_rows` for a shortlist.
    """
    weights = parts_of(loss)
    if not uses_teacher(loss):
        return lambda logits_CV, reference: token_rows(logits_CV, reference.labels_C)
    soft = [(SOFT_LOSSES[name](loss), weights[name]) for name in weights if name in SOFT_LOSSES]
    against = at_temperature(soft_rows(weighted_sum(soft)), loss.temperature)
    on_tokens = sum(weight for name, weight in weights.items() if name not in SOFT_LOSSES)

    def rows(logits_CV: Tensor, reference: Reference) -> tuple[Tensor, Tensor, Tensor]:
        loss_C, gradient_CV, alpha_C1 = against(logits_CV, reference.teacher)
        if on_tokens:
            tokens_C, tokens_CV, _ = token_rows(logits_CV, reference.labels_C)
            loss_C, gradient_CV = (
                loss_C + on_tokens * tokens_C,
                gradient_CV.add_(tokens_CV, alpha=on_tokens),
            )
        return loss_C, gradient_CV, alpha_C1

    return rows


def acceptance_rows(loss: LossConfig) -> Callable[[Tensor, Reference], Tensor]:
    """Return a function from logits and reference to each row's chance of acceptance.

    It is sum min(p, q) for losses against the teacher, else q(label).
    """

    def chances(logits_CV: Tensor, reference: Reference) -> Tensor:
        if reference.teacher is not None:
            q_CV = torch.softmax(logits_CV / loss.temperature, dim=-1)
            return torch.minimum(reference.teacher.p_CV, q_CV).sum(dim=-1)
        labels_C = reference.labels_C
        assert labels_C is not None
        q_CV = F.softmax(logits_CV, dim=-1)
        chance_C = q_CV.gather(1, labels_C.clamp_min(0)[:, None]).squeeze(1)
        return chance_C * (labels_C >= 0)

    return chances


def chunked_forward_kl(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    teacher_hidden_NG: Tensor,
    teacher_weight_TG: Tensor,
    chunk: int | None = None,
    temperature: float = 1.0,
    shortlist_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sums over all rows of forward KL in nats and of sum min(p, q) [1].

    temperature: divides the logits of both. shortlist_V: see `Teacher`.
    """
    teacher = Teacher(teacher_hidden_NG, teacher_weight_TG, temperature, shortlist_V)
    rows = reference_rows(LossConfig(temperature=temperature))
    return chunked_loss(
        hidden_NH, weight_VH, rows, lambda a, b: Reference(teacher=teacher.at(a, b)), chunk
    )
