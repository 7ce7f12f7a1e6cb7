"""Predictions of block drafters in training (training/heads/predicting.py), without Hydra imports.

The blocks of a row attend to the context of the row, which is computed once. They run in chunks, so
the attention's scores need memory for some blocks at a time. Depth k of a draft whose tip is at
position p predicts the token at p + 1 + k in both layouts: the layouts differ in the number of
slots, and in which of them predicts it.

Shapes: R rows, T tokens of a row, A blocks of a row, S slots, F = R T, M drafts, N predictions of
all depths, O drafts with own tokens, P positions, K drafted tokens, H the target's hidden size, X
channels of all taps, E features, V drafted vocabulary.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from heads.block.corrections import Selector, features_of_text
from heads.block.denoising import denoise, find_surest
from heads.block.model import BlockHead, after
from heads.block.shape import ANCHOR_FIRST, FILL_IN
from heads.drafts_in_rows import DraftsInRows
from heads.layers import rope_at
from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.heads.candidates import Candidates, choose_among
from training.heads.positions import Positions
from training.heads.predicting import (
    Choose,
    DraftStarts,
    PredictingHead,
    choose_likeliest,
    spread,
)
from training.losses.chunked import SplitWeight, Weight, chunk_rows, linear, split_weight


class BlockPredictions(PredictingHead):
    """Predictions of block drafters in training."""

    label, reads_context = "block", True

    def outputs(self, head: BlockHead, states: TargetStates) -> Sequence[Weight]:
        """Return the target's output layer, joined by the correction's if there is one."""
        weight_VH, correction = states.lm_head, head.correction
        if head.token_ids_V is not None:
            weight_VH = weight_VH[head.token_ids_V]
        return [weight_VH if correction is None else SplitWeight(weight_VH, correction.weight)]

    def features(
        self,
        head: BlockHead,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return the inputs (N, E) of the output layer."""
        tips_M = where.kept_P[where.drafts_M] + 1
        tokens_MK, depths = where.tokens_MK, len(where.counts_K)
        context_RTX = spread(batch, where.kept_P, states_PC)
        hidden_MKH = predict(
            head, states, batch, context_RTX, tips_M, tokens_MK[:, 0], where.filled_MK
        )
        if head.correction is None:
            return hidden_MKH[where.draft_N, where.head_N]
        if where.continues_own:
            continued_O = where.own_O
            with torch.no_grad():
                drafted_OK = self._continue(
                    head, states, hidden_MKH[continued_O], tokens_MK[continued_O, 0], depths - 1
                )
            tokens_OK = torch.cat((tokens_MK[continued_O, :1], drafted_OK), 1)
            tokens_MK = tokens_MK.index_copy(0, continued_O, tokens_OK)
        features_MKE = features_of_text(head.correction, hidden_MKH, tokens_MK, states.embed)
        return torch.cat((hidden_MKH[:, :depths], features_MKE), 2)[where.draft_N, where.head_N]

    def other_layouts(self, head: BlockHead) -> Mapping[str, BlockHead]:
        """Return the head of the other layout; none for a layout that drafts nothing."""
        shape = head.config
        other = ANCHOR_FIRST if shape.layout == FILL_IN else FILL_IN
        read = copy.copy(head)
        read.config = replace(shape, layout=other, temperatures=())
        return {other: read} if read.config.num_drafts and shape.passes == 1 else {}

    def random_masks(self, head: BlockHead) -> bool:
        return head.config.denoising_steps > 0

    def candidates(self, head: BlockHead) -> Candidates | None:
        correction = head.correction
        if not isinstance(correction, Selector):
            return None
        return Candidates(correction.candidates)

    def corrects(self, head: BlockHead) -> bool:
        return head.correction is not None and self.candidates(head) is None

    def chance_logits(self, head: BlockHead, features_NE: Tensor) -> Tensor | None:
        return None if head.confidence is None else head.confidence(features_NE)

    def has_confidence(self, head: BlockHead) -> bool:
        return head.confidence is not None and head.config.passes == 1

    def draft(
        self,
        head: BlockHead,
        states: TargetStates,
        tips: DraftStarts,
        count: int,
        choose: Choose = choose_likeliest,
    ) -> Tensor:
        text = tips.context
        assert text is not None, "a head with reads_context drafts from a text"
        context_RTX, ids_V = text.spread(), head.token_ids_V

        def run(filled_MK: Tensor | None) -> Tensor:
            given = (text.batch, context_RTX, text.tips_M, tips.tokens_M, filled_MK)
            return predict(head, states, *given)

        def fill(hidden_MKH: Tensor) -> tuple[Tensor, Tensor]:
            (weight_VH,) = self.outputs(head, states)
            drafts = max(1, chunk_rows(len(weight_VH)) // hidden_MKH.shape[1])
            found = [find_surest(linear(part, weight_VH)) for part in hidden_MKH.split(drafts)]
            best_MK, chances_MK = (torch.cat(part) for part in zip(*found, strict=True))
            return best_MK if ids_V is None else ids_V[best_MK], chances_MK

        hidden_MKH = denoise(head.config.denoising_steps or 1, run, fill)
        return self._continue(head, states, hidden_MKH, tips.tokens_M, count, choose)

    def _continue(
        self,
        head: BlockHead,
        states: TargetStates,
        hidden_MKH: Tensor,
        tips_M: Tensor,
        count: int,
        choose: Choose = choose_likeliest,
    ) -> Tensor:
        """Return the ids [M, count] of the chains that follow from the backbone's states."""
        (weight_VE,) = self.outputs(head, states)
        candidates = self.candidates(head)
        tokens, state = tips_M, None
        drafted = []
        for depth in range(count):
            features_ME = hidden_MKH[:, depth]
            if head.correction is not None:
                state = head.correction.advance(state, tokens, states.embed)
                more_ME = head.correction.features(features_ME, state, depth)
                features_ME = torch.cat((features_ME, more_ME), 1)
            if candidates is None:
                tokens = choose(features_ME, weight_VE, depth)
            else:
                weight = split_weight(weight_VE)
                tokens = choose_among(choose, candidates, features_ME, weight, depth)
            if head.token_ids_V is not None:
                tokens = head.token_ids_V[tokens]
            drafted.append(tokens)
        return torch.stack(drafted, 1)


def predict(
    head: BlockHead,
    states: TargetStates,
    batch: PackedBatch,
    context_RTX: Tensor,
    tips_M: Tensor,
    tokens_M: Tensor,
    filled_MK: Tensor | None = None,
) -> Tensor:
    """Return the states (M, K, H) that predict the K tokens after each tip.

    context_RTX: the target's states. tips_M: the tips' places in the flattened batch. tokens_M:
    the tips' ids. filled_MK: see `BlockHead.block_ids`.
    """
    S = head.config.block_size
    tables = head.rope_tables(batch.ids_RT.shape[1] + S)
    join = after(head.context(context_RTX, rope_at(tables, batch.positions_RT)))
    drafts = DraftsInRows(batch, tips_M, head.block_ids(tokens_M, filled_MK))
    found = []
    for ids_RaS, positions_RaS, visible_RaT in drafts.chunks(S):
        rope = rope_at(tables, positions_RaS.flatten(1))
        found.append(head(states.embed(ids_RaS), rope, join, visible_RaT))
    return drafts.join(found)
