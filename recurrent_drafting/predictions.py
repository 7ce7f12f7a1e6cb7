"""Predictions of recurrent heads in training (training/heads/kind.py), without Hydra imports.

One output layer predicts each token of a draft from the draft's state, which then advances by one
token. Gradients flow through the recurrence of all states. With `own_tokens`, drafts continue from
the head's likeliest token instead of the true one (training-time test, after EAGLE-3, arXiv
2503.01840); the labels stay the same.

Shapes: C = H the target's hidden size, E the head's width, K drafted tokens, M drafts of a batch, N
predictions of all heads, O drafts with own tokens, P positions, V drafted vocabulary.
"""

import torch
from torch import Tensor

from recurrent_drafting.head import Context, RecurrentHead
from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.heads.positions import Positions
from training.heads.predicting import Choose, DraftStarts, PredictingHead, choose_likeliest


class RecurrentPredictions(PredictingHead):
    """Predictions of recurrent heads in training."""

    label, reads_context, computes_states = "redrafter", False, False

    def outputs(self, head: RecurrentHead, states: TargetStates) -> tuple[Tensor]:
        return (head.output,)

    def features(
        self,
        head: RecurrentHead,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return the inputs (N, E) of the output layer; each hidden state is mapped only once."""
        context = head.context(states_PC[where.drafts_M])
        state_MH = head.start(states.embed(where.tokens_MK[:, 0]))
        reached = [state_MH]
        for number in range(1, len(where.counts_K)):
            tokens_M = where.tokens_MK[:, number]
            if where.continues_own:
                own_O = where.own_O
                state_OH = state_MH.index_select(0, own_O)
                best_O = next_tokens(head, context.select(own_O), state_OH, number - 1)
                tokens_M = tokens_M.index_copy(0, own_O, best_O)
            state_MH = head.advance(state_MH, states.embed(tokens_M))
            reached.append(state_MH)
        state_NH = torch.cat(reached).index_select(
            0, where.head_N * len(where.drafts_M) + where.draft_N
        )
        return head.features(context.select(where.draft_N), state_NH)

    def draft(
        self,
        head: RecurrentHead,
        states: TargetStates,
        tips: DraftStarts,
        count: int,
        choose: Choose = choose_likeliest,
    ) -> Tensor:
        context, state_MH = head.context(tips.states_MC), head.start(states.embed(tips.tokens_M))
        drafted = [next_tokens(head, context, state_MH, 0, choose)]
        for depth in range(1, count):
            state_MH = head.advance(state_MH, states.embed(drafted[-1]))
            drafted.append(next_tokens(head, context, state_MH, depth, choose))
        return torch.stack(drafted, dim=1)


@torch.no_grad()
def next_tokens(
    head: RecurrentHead,
    context: Context,
    state_MH: Tensor,
    depth: int,
    choose: Choose = choose_likeliest,
) -> Tensor:
    """Return the next token of each draft, by default the likeliest, as ids [M] of the target."""
    return head.to_target_ids(choose(head.features(context, state_MH), head.output, depth))


PREDICTIONS = RecurrentPredictions()
