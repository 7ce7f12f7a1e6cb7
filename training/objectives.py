"""What is trained: a language model on its text, or a student on its teacher. Both return sums,
never means.

Shapes: R rows, T tokens, N supervised tokens, H and G widths of student and teacher.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from training.bounds import Place
from training.data.packing import Batch
from training.losses.chunked import chunked_cross_entropy, chunked_forward_kl
from training.models.attention import document_mask
from training.optimizer import Rate


def hidden_states(model: Any, batch: Batch) -> Tensor:
    """Hidden states after the final norm [R, T, H] of a Hugging Face causal LM built with packed
    attention.
    """
    bias = document_mask(batch.documents_RT, model.dtype)
    return model.model(
        batch.ids_RT, position_ids=batch.positions_RT, attention_bias=bias, use_cache=False
    ).last_hidden_state


class Constant(nn.Module):
    """An objective that is the same at every step, for weights that all move alike."""

    rates: Mapping[str, Rate] = {}

    def begin(self, step: int, place: Place) -> None:
        """Nothing changes from step to step."""


class LanguageModelling(Constant):
    """Cross-entropy of the next token: the objective of `distill.pretrain`."""

    metric_names = ("accuracy",)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum of -log q in nats, number of right argmaxes [1]) over supervised tokens."""
        hidden_NH = batch.at_supervised(hidden_states(self.model, batch))
        return chunked_cross_entropy(
            hidden_NH, self.model.lm_head.weight, batch.at_supervised(batch.next_RT)
        )


class Frozen:
    """A model that an objective reads and does not own: no submodule, so in no optimizer, gradient
    exchange or checkpoint.

    A copy of the objective, as ranks that cut it make, reads the same model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> "Frozen":
        return self


class Distillation(Constant):
    """Forward KL from a frozen teacher at the supervised positions."""

    metric_names = ("acceptance",)

    def __init__(
        self,
        student: Any,
        teacher: Any,
        temperature: float = 1.0,
        states: "TeacherStates | None" = None,
    ) -> None:
        """states: the teacher's, where they are remembered, over several students too; None reads
        each batch with the teacher.
        """
        super().__init__()
        self.student = student
        self._teacher = Frozen(teacher)
        self.temperature = temperature
        self._states = states or TeacherStates(teacher, 0)

    @property
    def teacher(self) -> Any:
        return self._teacher.model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum of KL(teacher || student) in nats, sum of min(p, q) [1]) over supervised tokens."""
        teacher_NG = self._states(batch)
        hidden_NH = batch.at_supervised(hidden_states(self.student, batch))
        return chunked_forward_kl(
            hidden_NH,
            self.student.lm_head.weight,
            teacher_NG,
            self.teacher.lm_head.weight,
            temperature=self.temperature,
        )


class TeacherStates:
    """The frozen teacher's hidden states at supervised positions, remembered row by row up to a
    number of bytes.

    Rows are packed once and come again every epoch, and with every student of the same samples; a
    small student's step is then mostly the teacher's forward, which memory saves. With memory, the
    teacher reads one row a forward, so that a row's states do not hang on its neighbours and a
    resumed run equals a straight one bit for bit.
    """

    def __init__(self, teacher: Any, limit_bytes: int) -> None:
        self._teacher = Frozen(teacher)
        self.free_bytes = limit_bytes
        self.remember = limit_bytes > 0
        self.tokens_read = 0  # positions that the teacher ran over
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "TeacherStates":
        """Itself: whoever copies the objective reads the same teacher."""
        return self

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """[N, G], in the order of `Batch.at_supervised`."""
        if not self.remember:
            return self._read(batch)
        return torch.cat([self._row(batch, index) for index in range(len(batch.rows))])

    def _row(self, batch: Batch, index: int) -> Tensor:
        key = batch.rows[index]
        if key in self._known:
            return self._known[key]
        states_NG = self._read(batch.row(index))
        size = states_NG.numel() * states_NG.element_size()
        if size <= self.free_bytes:
            self.free_bytes -= size
            self._known[key] = states_NG
        return states_NG

    def _read(self, batch: Batch) -> Tensor:
        self.tokens_read += batch.ids_RT.numel()
        return batch.at_supervised(hidden_states(self._teacher.model, batch))


def freeze(model: Any) -> Any:
    """The model in eval mode with no parameter that asks for a gradient, its lm_head included."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model
