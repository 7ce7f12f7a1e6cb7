"""Training objective of a head: a chunked loss over all predictions of a packed batch's drafts.

The published losses of ReDrafter and Medusa are sums over heads of the mean cross-entropy. Here
every head's sum is divided by the global count of supervised tokens (training/loop.py), so no batch
divides by zero. The two differ by the tokens that are too early in a text for a head to predict.
Distillation on the target's tokens (`continuations`) reads and predicts the target's greedy
continuations instead of the text, at the same positions. Gradients reach the head, not the target.

Shapes: E features, K heads, N predictions of all heads, P positions of the target that are read, V
drafted vocabulary.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from training.bounds import Place
from training.data.packing import PackedBatch
from training.draft_vocabulary import index_tokens
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig, num_continued_tokens, uses_teacher
from training.heads.positions import Positions, positions
from training.heads.predicting import PredictingHead
from training.losses.chunked import (
    Outputs,
    RowLoss,
    at_temperature,
    cross_entropy_rows,
    listed_cross_entropy_rows,
)
from training.losses.heads import chunked_by_head
from training.losses.soft import Teacher, kl_rows, lk_hybrid_rows, lk_rows
from training.objectives import StaticObjective


class HeadObjective(StaticObjective):
    """Loss of a head over all its predictions in a batch."""

    indices_V: Tensor | None

    def __init__(
        self, kind: PredictingHead, head: Any, states: TargetStates, loss: HeadLossConfig
    ) -> None:
        super().__init__()
        self.kind, self.head, self.states, self.loss = kind, head, states, loss
        self.step = 0
        measured = "acceptance" if uses_teacher(loss) else "top1"
        heads = range(loss.predict_n_tokens)
        self.metric_names = (
            *(f"{kind.label}{i}_{measured}" for i in heads),
            *(f"{kind.label}{i}_loss" for i in heads),
        )
        self.register_buffer("indices_V", _indices(head, states), persistent=False)

    def begin(self, step: int, place: Place) -> None:
        self.step = step

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return (sum over heads of weight x loss in nats, sums by head [2 K]).

        The first K sums count correct tokens or acceptance, the others add up the unweighted loss.
        """
        loss, states = self.loss, self.states
        weights = self.kind.outputs(self.head, states)
        several, heads = len(weights) > 1, loss.predict_n_tokens
        where = positions(
            batch, heads, uses_teacher(loss), loss.own_tokens, self.step, grouped=several
        )
        if count := num_continued_tokens(loss):
            states_PC, tokens_PK = states.continue_greedily(batch, where, count)
            where = where.with_tokens(tokens_PK[where.drafts_M])
        else:
            states_PC = states(batch, where)
        features_NE = self.kind.features(
            self.head, states, batch, where, states.select_taps(states_PC)
        )
        outputs = Outputs(weights, where.heads if several else None)
        rows, against = self._reference(states_PC, where)
        return chunked_by_head(features_NE, outputs, rows, against, where.head_N, heads, loss.decay)

    def _reference(
        self, states_PC: Tensor, where: Positions
    ) -> tuple[RowLoss, Callable[[int, int], Any]]:
        """Return the row loss, and a function from (start, end) to the reference of these rows."""
        if not uses_teacher(self.loss):
            labels_N = where.labels_N if self.indices_V is None else self.indices_V[where.labels_N]
            rows = cross_entropy_rows if self.indices_V is None else listed_cross_entropy_rows
            return rows, lambda start, end: labels_N[start:end]
        temperature, final_PH = self.loss.temperature, self.states.select_final(states_PC)
        teacher = Teacher(final_PH, self.states.lm_head, temperature, self.head.token_ids_V)
        kinds: dict[str, RowLoss] = {
            "forward_kl": kl_rows,
            "lk": lk_rows,
            "lk_hybrid": lk_hybrid_rows(self.loss.lk_eta),
        }
        return at_temperature(kinds[self.loss.name], temperature), teacher.shared(
            where.targets_N, where.targets
        )


def _indices(head: Any, states: TargetStates) -> Tensor | None:
    """Return the indices of the target's tokens in the head's logits; None if all are drafted."""
    if head.token_ids_V is None:
        return None
    return index_tokens(head.token_ids_V, states.vocab_size)
