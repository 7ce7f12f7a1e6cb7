"""Predictions of EAGLE heads in training (training/heads/predicting.py), without Hydra imports.

Shapes: M drafts, N predictions of all steps, O drafts with own tokens, P positions, H the target's
hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.eagle.drafts import Drafts
from heads.eagle.model import EagleHead
from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.heads.positions import Positions
from training.heads.predicting import (
    Choose,
    DraftStarts,
    PredictingHead,
    choose_likeliest,
    spread,
)


class EaglePredictions(PredictingHead):
    """Predictions of EAGLE heads in training."""

    label, reads_context = "eagle", True

    def outputs(self, head: EagleHead, states: TargetStates) -> Sequence[Tensor]:
        """Return the head's output layer, or the target's lm_head for EAGLE-1."""
        return (states.lm_head if head.config.predicts_states else head.lm_head.weight,)

    def features(
        self,
        head: EagleHead,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return the inputs (N, H) of the lm_head for all steps of the training-time test."""
        (weight_VH,) = self.outputs(head, states)
        steps, tips_M = len(where.counts_K), where.kept_P[where.drafts_M] + 1
        drafts = _begin(head, states, batch, where.kept_P, states_PC, tips_M, steps)
        reached: list[Tensor] = []
        for step in range(steps):
            tokens_M = where.tokens_MK[:, step]
            if step and where.continues_own:
                own_OH = reached[-1].detach().index_select(0, where.own_O)
                own_O = _ids(head, choose_likeliest(own_OH, weight_VH, step - 1))
                tokens_M = tokens_M.index_copy(0, where.own_O, own_O)
            reached.append(_advance(head, states, drafts, tokens_M, step))
        return torch.cat(reached).index_select(0, where.head_N * len(tips_M) + where.draft_N)

    @torch.no_grad()
    def draft(
        self,
        head: EagleHead,
        states: TargetStates,
        tips: DraftStarts,
        count: int,
        choose: Choose = choose_likeliest,
    ) -> Tensor:
        text, (weight_VH,) = tips.context, self.outputs(head, states)
        assert text is not None
        drafts = _begin(head, states, text.batch, text.kept_P, text.states_PC, text.tips_M, count)
        drafted, tokens_M = [], tips.tokens_M
        for depth in range(count):
            features_MH = _advance(head, states, drafts, tokens_M, depth)
            tokens_M = _ids(head, choose(features_MH, weight_VH, depth))
            drafted.append(tokens_M)
        return torch.stack(drafted, dim=1)


def _begin(
    head: EagleHead,
    states: TargetStates,
    batch: PackedBatch,
    kept_P: Tensor,
    states_PC: Tensor,
    tips_M: Tensor,
    depth: int,
) -> Drafts:
    """Return drafts of at most `depth` steps from these tips of a batch."""
    embedded_RTH, states_RTC = states.embed(batch.ids_RT), spread(batch, kept_P, states_PC)
    return Drafts(head, batch, embedded_RTH, states_RTC, tips_M, depth)


def _advance(
    head: EagleHead, states: TargetStates, drafts: Drafts, tokens_M: Tensor, step: int
) -> Tensor:
    """Add an element to each draft, with these tokens or a mask; return the lm_head's inputs."""
    if step and head.config.parallel:
        mask = torch.full((), head.config.mask_token_id, device=tokens_M.device)
        return drafts.advance_masked(states.embed(mask))
    return drafts.advance(states.embed(tokens_M))


def _ids(head: EagleHead, indices: Tensor) -> Tensor:
    """Return the target's ids of indices into the draft vocabulary."""
    ids_V = head.token_ids_V
    return indices if ids_V is None else ids_V[indices]
