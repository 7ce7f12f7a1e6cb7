"""Distillation against a cache of the teacher's distributions, without the teacher."""

from typing import Any

from torch import Tensor

from training.data.packing import PackedBatch
from training.features.teacher_cache import TeacherCache
from training.losses.chunked import at_temperature, chunked_loss
from training.losses.config import LossConfig
from training.losses.family import Reference, reference_rows
from training.losses.sparse import TopRows, top_forward_kl_rows
from training.objectives import StaticObjective, drafted_labels, hidden_states


class CachedDistillation(StaticObjective):
    """Forward KL against cached draws, or against the likeliest tokens and a bucket for others.

    The acceptance of a step is that against the draws, and so too low, or counts the bucket as one
    token, and is too high.
    """

    metric_names = ("acceptance",)

    def __init__(self, student: Any, loss: LossConfig, cache: TeacherCache) -> None:
        super().__init__()
        self.student, self.loss, self.cache = student, loss, cache

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return sums over supervised tokens: the loss in nats, and the acceptance [1]."""
        teacher = self.cache.rows(batch)
        hidden_NH = batch.at_supervised(hidden_states(self.student, batch))
        labels_N, token_rows = drafted_labels(self.student, batch)
        draws = reference_rows(self.loss, token_rows)
        likeliest = at_temperature(top_forward_kl_rows, self.loss.temperature)

        def rows(logits_CV: Tensor, known: Any) -> tuple[Tensor, Tensor, Tensor]:
            return (likeliest if isinstance(known, TopRows) else draws)(logits_CV, known)

        def reference(start: int, end: int) -> TopRows | Reference:
            known = teacher(start, end)
            return known if isinstance(known, TopRows) else Reference(labels_N[start:end], known)

        return chunked_loss(hidden_NH, self.student.lm_head.weight, rows, reference)
