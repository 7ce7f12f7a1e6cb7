"""The training objective of the head: every draft of a packed batch unrolled over the heads, and
one chunked loss over all predictions.

The published loss is the sum over heads of the mean cross-entropy; here every head's sum is divided
by the one global count of supervised tokens (training/loop.py), so that no batch divides by zero.
The two differ by tokens that stand too early in a text for a head to predict. The paper's
distillation (`continuations`) takes in and predicts what the target goes on with in place of the
text's tokens, at the same positions.

Gradients flow through the recurrence over all heads, and not into the target. With `own_tokens`,
drafts go on from the head's own likeliest token instead of the true one (training-time test, after
EAGLE-3, arXiv 2503.01840), and are held against the same tokens or the same distribution.

Shapes: M drafts of a batch, O of them with own tokens, K heads, N predictions of all heads, H the
target's hidden size, E the head's width, V drafted vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from recurrent_drafting.head import Context, RecurrentHead
from training.bounds import Place
from training.data.packing import Batch
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig, judged, tokens_said
from training.heads.positions import Positions, positions
from training.losses.chunked import RowLoss, cross_entropy_rows
from training.losses.heads import (
    at_temperature,
    chunked_argmax,
    chunked_by_head,
    listed_cross_entropy_rows,
)
from training.losses.soft import Teacher, kl_rows, lk_hybrid_rows, lk_rows
from training.objectives import Constant


class HeadTraining(Constant):
    """Loss of the head over all its predictions in a batch."""

    indices_V: Tensor | None

    def __init__(self, head: RecurrentHead, states: TargetStates, loss: HeadLossConfig) -> None:
        super().__init__()
        self.head, self.states, self.loss = head, states, loss
        self.step = 0
        measured = "acceptance" if judged(loss) else "top1"
        heads = range(loss.predict_n_tokens)
        self.metric_names = (
            *(f"redrafter{i}_{measured}" for i in heads),
            *(f"redrafter{i}_loss" for i in heads),
        )
        self.register_buffer("indices_V", _indices(head), persistent=False)

    def begin(self, step: int, place: Place) -> None:
        self.step = step

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum over heads of weight x loss in nats, [2 K]: by head the tokens predicted or the
        acceptance, then the loss).
        """
        where = positions(
            batch, self.loss.predict_n_tokens, judged(self.loss), self.loss.own_tokens, self.step
        )
        said = tokens_said(self.loss)
        if said:
            hidden_PH, said_PK = self.states.go_on(batch, where, said)
            where = where.with_tokens(said_PK[where.drafts_M])
        else:
            hidden_PH = self.states(batch, where)
        features_NE = predictions(self.head, self.states, hidden_PH, where)
        rows, against = self._held_against(hidden_PH, where)
        return chunked_by_head(
            features_NE,
            self.head.output,
            rows,
            against,
            where.head_N,
            self.loss.predict_n_tokens,
            self.loss.decay,
        )

    def _held_against(self, hidden_PH: Tensor, where: Positions) -> tuple[RowLoss, Any]:
        """(the loss of a row, what gives rows [start, end) what they are held against)."""
        if not judged(self.loss):
            labels_N = where.labels_N if self.indices_V is None else self.indices_V[where.labels_N]
            rows = cross_entropy_rows if self.indices_V is None else listed_cross_entropy_rows
            return rows, lambda start, end: labels_N[start:end]
        temperature = self.loss.temperature
        teacher = Teacher(hidden_PH, self.states.lm_head, temperature, self.head.token_ids_V)
        kinds: dict[str, RowLoss] = {
            "forward_kl": kl_rows,
            "lk": lk_rows,
            "lk_hybrid": lk_hybrid_rows(self.loss.lk_eta),
        }
        return at_temperature(kinds[self.loss.name], temperature), teacher.shared(
            where.judges_N, where.judges
        )


def predictions(
    head: RecurrentHead, states: TargetStates, hidden_PH: Tensor, where: Positions
) -> Tensor:
    """The features of all predictions [N, E]; the first linear map of the hidden states is made
    once a draft.
    """
    context = head.context(hidden_PH[where.drafts_M])
    state_MH = head.start(states.embed(where.tokens_MK[:, 0]))
    reached = [state_MH]
    for number in range(1, len(where.counts_K)):
        tokens_M = where.tokens_MK[:, number]
        if where.asks_own:
            said_O = _likeliest_of(where.own_O, head, context, state_MH)
            tokens_M = tokens_M.index_copy(0, where.own_O, said_O)
        state_MH = head.advance(state_MH, states.embed(tokens_M))
        reached.append(state_MH)
    state_NH = torch.cat(reached).index_select(
        0, where.head_N * len(where.drafts_M) + where.draft_N
    )
    return head.features(context.select(where.draft_N), state_NH)


@torch.no_grad()
def likeliest(head: RecurrentHead, context: Context, state_MH: Tensor) -> Tensor:
    """The head's own next token for every draft, as ids of the target [M]."""
    return head.to_target_ids(chunked_argmax(head.features(context, state_MH), head.output))


@torch.no_grad()
def _likeliest_of(
    drafts_O: Tensor, head: RecurrentHead, context: Context, state_MH: Tensor
) -> Tensor:
    """The same for some of the drafts [O]."""
    return likeliest(head, context.select(drafts_O), state_MH.index_select(0, drafts_O))


def _indices(head: RecurrentHead) -> Tensor | None:
    """Token id of the target -> its index in the head's logits, -1 where it is not drafted; None
    without a shortlist.
    """
    if head.token_ids_V is None:
        return None
    indices_V = torch.full((head.config.vocab_size,), -1, device=head.token_ids_V.device)
    indices_V[head.token_ids_V] = torch.arange(
        len(head.token_ids_V), device=head.token_ids_V.device
    )
    return indices_V
