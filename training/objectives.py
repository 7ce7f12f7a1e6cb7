"""Training objectives: a language model on text, or a student on its teacher.

All return sums over supervised tokens. Shapes: R rows, T tokens, N supervised tokens, H and G
widths of student and teacher.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decoding.models.draft_vocabulary import token_ids
from training.bounds import Place
from training.data.packing import PackedBatch, Rows
from training.draft_vocabulary import index_tokens
from training.features.stores import MemoryStore, RowStates
from training.losses.chunked import (
    RowLoss,
    chunked_cross_entropy,
    chunked_loss,
    cross_entropy_rows,
    listed_cross_entropy_rows,
)
from training.losses.config import LossConfig, teacher_temperature
from training.losses.family import Reference, reference_rows
from training.losses.teacher import Teacher, TeacherRows
from training.models.attention import inside_documents
from training.optimizer import Rate


def hidden_states(model: Any, batch: PackedBatch) -> Tensor:
    """Return the states after the final norm [R, T, H] of a causal LM with packed attention."""
    given = {"position_ids": batch.positions_RT, "use_cache": False}
    return model.model(batch.ids_RT, **given, **inside_documents(model, batch)).last_hidden_state


class StaticObjective(nn.Module):
    """An objective without a schedule, whose weights all share one learning rate."""

    rates: Mapping[str, Rate] = {}
    keeps_weights = False

    def begin(self, step: int, place: Place, rows: Rows) -> None:
        """Do nothing: every step is the same."""


class LanguageModelling(StaticObjective):
    """Cross-entropy of the next token: the objective of `distill.pretrain`."""

    metric_names = ("accuracy",)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return (sum of -log q in nats, number of correct argmaxes [1]) over supervised tokens.

        A token outside the model's draft vocabulary has no loss and counts as wrong.
        """
        hidden_NH = batch.at_supervised(hidden_states(self.model, batch))
        labels_N, rows = drafted_labels(self.model, batch)
        return chunked_cross_entropy(hidden_NH, self.model.lm_head.weight, labels_N, rows=rows)


def drafted_labels(model: Any, batch: PackedBatch) -> tuple[Tensor, RowLoss]:
    """Return the supervised tokens as indices of the model's logits, and the cross-entropy of rows.

    The index of a token outside the model's draft vocabulary is -1.
    """
    labels_N, ids_V = batch.at_supervised(batch.next_RT), token_ids(model)
    if ids_V is None:
        return labels_N, cross_entropy_rows
    return index_tokens(ids_V, model.config.vocab_size)[labels_N], listed_cross_entropy_rows


class Distillation(StaticObjective):
    """A loss against a frozen teacher at the supervised positions (training/losses/soft.py)."""

    metric_names = ("acceptance",)

    def __init__(
        self,
        student: Any,
        teacher: Any,
        loss: LossConfig | None = None,
        states: "TeacherStates | None" = None,
    ) -> None:
        """Store the models.

        loss: settings of a loss that reads the teacher; None: forward KL. states: a cache of the
        teacher's states that several students share; None: no cache.
        """
        super().__init__()
        self.student = student
        self.loss = loss or LossConfig()
        self._states = states or TeacherStates(teacher, 0)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return sums over supervised tokens: the loss in nats, and alpha = sum min(p, q) [1]."""
        teacher = self._teacher(batch)
        hidden_NH = batch.at_supervised(hidden_states(self.student, batch))
        labels_N, token_rows = drafted_labels(self.student, batch)

        def reference(start: int, end: int) -> Reference:
            return Reference(labels_N[start:end], teacher(start, end))

        rows = reference_rows(self.loss, token_rows)
        return chunked_loss(hidden_NH, self.student.lm_head.weight, rows, reference)

    def _teacher(self, batch: PackedBatch) -> Callable[[int, int], TeacherRows]:
        """Return a function from supervised tokens [start, end) to the teacher's distributions."""
        weight_TG = self._states.teacher.lm_head.weight
        temperature, ids_V = teacher_temperature(self.loss), token_ids(self.student)
        return Teacher(self._states(batch), weight_TG, temperature, ids_V).at


class TeacherStates:
    """Cache of the frozen teacher's hidden states at supervised positions, limited in bytes.

    Rows are packed once and recur in every epoch and for every student. The teacher's forward takes
    most of a small student's step, and the cache saves it. With a cache the teacher reads one row
    at a time, so that a row's states do not depend on its batch and a resumed run equals an
    uninterrupted one bit for bit.
    """

    def __init__(self, teacher: Any, limit_bytes: int, recurring: float = math.inf) -> None:
        """Store the teacher.

        recurring: number of samples whose rows recur. Rows with later samples, whose numbers are
        used again for other text, are not cached.
        """
        self.teacher = teacher
        self.caches = limit_bytes > 0
        self._recurring = recurring
        self.tokens_read = 0  # positions that the teacher has read
        self._store = MemoryStore(limit_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TeacherStates":
        """Return self: copies of an objective share the teacher."""
        return self

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> Tensor:
        """Return states [N, G] in the order of `PackedBatch.at_supervised`."""
        if not self.caches:
            return self._read(batch)
        return torch.cat([self._row(batch, index) for index in range(len(batch.rows))])

    def _row(self, batch: PackedBatch, index: int) -> Tensor:
        key = batch.rows[index]
        recurs = all(sample < self._recurring for sample in key)
        if recurs and (found := self._store.get(key)) is not None:
            return found.states_PC
        states_NG = self._read(batch.row(index))
        if recurs:
            self._store.put(key, RowStates(states_NG))
        return states_NG

    def _read(self, batch: PackedBatch) -> Tensor:
        self.tokens_read += batch.ids_RT.numel()
        return batch.at_supervised(hidden_states(self.teacher, batch))


def freeze(model: Any) -> Any:
    """Put a model in eval mode, disable its gradients (lm_head included) and return it."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model
