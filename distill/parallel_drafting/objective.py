"""Objective of a student that drafts in parallel: the predictions of its text and its mask tokens.

Shapes: N supervised tokens, M predictions of all depths, C of a chunk, K depths, H student width, V
drafted vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from decoding.models.draft_vocabulary import token_ids
from distill.parallel_drafting.layout import Layout, Retention, lay_out
from training.bounds import Place
from training.data.packing import PackedBatch, Rows
from training.losses.chunked import chunked_loss
from training.losses.config import LossConfig, teacher_temperature, uses_teacher
from training.losses.family import Reference, reference_rows
from training.losses.teacher import Teacher
from training.objectives import StaticObjective, TeacherStates, drafted_labels


class ParallelDistillation(StaticObjective):
    """A loss on the target's distribution or on the text, a mean over depths of mean losses.

    Depth 0 is the loss of a student that drafts token by token.
    """

    def __init__(
        self,
        student: Any,
        tokens: int,
        mask_token: int,
        retention: Retention,
        loss: LossConfig,
        states: TeacherStates,
        seed: int = 0,
    ) -> None:
        """Store the models and the settings.

        tokens: depths. states: the frozen target, which is read only if the loss needs it. seed: of
        the anchors that train a depth.
        """
        super().__init__()
        self.student, self.loss, self._states = student, loss, states
        self.tokens, self.mask_token, self.retention = tokens, mask_token, retention
        self._seed, self._step = seed, 0
        measured = "acceptance" if uses_teacher(loss) else "accuracy"
        ahead = range(1, tokens)
        self.metric_names = (measured, *(f"depth{depth}_{measured}" for depth in ahead))

    def begin(self, step: int, place: Place, rows: Rows) -> None:
        self._step = step

    def layout(self, batch: PackedBatch) -> Layout:
        """Return the layout of a batch in the current step."""
        key = (self._seed, self._step)
        return lay_out(batch, self.tokens, self.mask_token, self.retention, key)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the loss in nats and the metric of each depth [K], times the supervised tokens."""
        layout = self.layout(batch)
        states_MH = layout.states(self.student)
        labels_N, token_rows = drafted_labels(self.student, batch)
        labels_M, depths_K = (
            labels_N[layout.tokens_M],
            torch.arange(self.tokens, device=batch.device),
        )
        loss_rows, teacher = reference_rows(self.loss, token_rows), self._teacher(batch, layout)

        def reference(start: int, end: int) -> Any:
            known = None if teacher is None else teacher(start, end)
            depths_C, weights_C = (each[start:end] for each in (layout.depths_M, layout.weights_M))
            return Reference(labels_M[start:end], known), depths_C, weights_C

        def rows(logits_CV: Tensor, given: Any) -> tuple[Tensor, Tensor, Tensor]:
            known, depths_C, weights_C = given
            loss_C, gradient_CV, metric_C1 = loss_rows(logits_CV, known)
            weights_C1 = weights_C[:, None].to(loss_C.dtype)
            metric_CK = metric_C1 * weights_C1 * self.tokens * (depths_C[:, None] == depths_K)
            return loss_C * weights_C1[:, 0], gradient_CV.mul_(weights_C1), metric_CK

        loss, metrics = chunked_loss(states_MH, self.student.lm_head.weight, rows, reference)
        return loss, metrics if len(states_MH) else metrics.new_zeros(self.tokens)

    def _teacher(self, batch: PackedBatch, layout: Layout) -> Any:
        """Return a function from predictions [start, end) to the target's distributions, or None.

        It is None for a loss on the text.
        """
        if not uses_teacher(self.loss):
            return None
        weight_TG = self._states.teacher.lm_head.weight
        temperature, ids_V = teacher_temperature(self.loss), token_ids(self.student)
        teacher = Teacher(self._states(batch), weight_TG, temperature, ids_V)
        return teacher.shared(layout.tokens_M, layout.tokens)
