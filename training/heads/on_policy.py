"""Rows in which a head trains on what it drafts itself, scored by the target.

In training, the heads read the text's tokens; in drafting, they read their own. `loss.own_tokens`
lets a draft continue from its own tokens but keeps the labels of the text, which follow other
tokens. Here the target reads the drafted tokens too, so every depth learns the target's
distribution after the very tokens that the head has drafted. This is on-policy distillation
(DistillSpec, Zhou et al. 2024, arXiv 2310.08461) over the few tokens of a draft.

The head drafts from every position of such a row at which it trains, with the weights of the step;
nothing is stored. The target scores all drafts of a row in one pass over its cached text.

Shapes: D = K - 1 drafted tokens that are read, E features, K heads, M drafts, N predictions of all
heads, P hidden states, V drafted vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decoding.sampling import noise
from training.data.packing import PackedBatch, Rows
from training.features.cached_text import CachedText
from training.features.states import TargetStates
from training.heads.positions import Positions, positions
from training.heads.predicting import (
    Choose,
    Context,
    DraftStarts,
    PredictingHead,
    choose_likeliest,
)
from training.losses.chunked import Weight
from training.losses.heads import chunked_sample
from training.on_policy import OnPolicyOptions, ShareSchedule

_PURPOSE = 4  # part of the keys, which differs from those of decoding (decoding/sampling/noise.py)


@dataclass(frozen=True)
class DraftedRow:
    """A row's predictions after tokens of the head, and what the target predicts there."""

    # the text's positions; tokens_MK are the tips and the drafted tokens, targets_N are indices
    # into final_SH, and the labels have no meaning
    where: Positions
    states_PC: Tensor  # at where.kept_P
    final_SH: Tensor  # the target's states after the tip and after each drafted token, S = M K


class OnPolicyRows:
    """The rows of a step that a head drafts from, and the tokens that it drafts."""

    def __init__(self, options: OnPolicyOptions, rows_per_step: int, seed: int) -> None:
        self.options, self.seed = options, seed
        self.schedule = ShareSchedule(options, rows_per_step)
        self._step = 0
        self._rows: frozenset[tuple[int, ...]] = frozenset()

    def begin(self, step: int, rows: Rows) -> None:
        """Choose the last rows of the step, as many as the schedule gives it."""
        self._step, first = step, max(0, len(rows) - self.schedule.rows_in(step))
        self._rows = frozenset(map(tuple, rows[first:]))

    def split(self, batch: PackedBatch) -> tuple[list[int], list[int]]:
        """Return the indices of the batch's rows with drafts, and of those without."""
        drafted = [index for index, row in enumerate(batch.rows) if row in self._rows]
        return drafted, [index for index in range(len(batch.rows)) if index not in drafted]

    def draft(
        self, kind: PredictingHead, head: Any, states: TargetStates, row: PackedBatch, heads: int
    ) -> DraftedRow:
        """Let a head draft from the positions of a row, and let the target score the drafts.

        row: a batch of one row. heads: K.
        """
        where = positions(
            row,
            heads,
            uses_teacher=False,
            grouped=kind.layer_per_depth(head),
            by_draft=True,
            context=kind.reads_context,
        )
        text = CachedText(states.target, row, states.layers)
        states_PC, places_M = text.states_TC[where.kept_P], where.kept_P[where.drafts_M]
        tapped_PC, tips_M = states.select_taps(states_PC), places_M + 1
        context = Context(row, where.kept_P, tapped_PC, tips_M) if kind.reads_context else None
        starts = DraftStarts(where.tokens_MK[:, 0], tapped_PC[where.drafts_M], context)
        choose = self._choose(row.rows[0], places_M)
        with torch.no_grad():
            drafted_MD = kind.draft(head, states, starts, heads - 1, choose)
        scored_MDH = text.score(tips_M, drafted_MD)
        final_MKH = torch.cat((text.final_TH[tips_M, None], scored_MDH), dim=1)
        tokens_MK = torch.cat((where.tokens_MK[:, :1], drafted_MD), dim=1)
        return DraftedRow(
            replace(where, tokens_MK=tokens_MK), states_PC, final_MKH.flatten(end_dim=1)
        )

    def _choose(self, row: Sequence[int], places_M: Tensor) -> Choose:
        """Return how tokens are chosen: noise depends on seed, step, row, position and depth."""
        temperature = self.options.temperature
        if not temperature:
            return choose_likeliest
        state = noise.key(self.seed, self._step, _PURPOSE, *row)
        scaled_M = noise.scaled_ids(places_M)

        def sample(features_ME: Tensor, weight_VE: Weight, depth: int) -> Tensor:
            key = noise.signed(noise.extend(state, depth))
            uniforms_M = noise.uniforms(torch.full_like(scaled_M, key), scaled_M)
            return chunked_sample(features_ME, weight_VE, temperature, uniforms_M)

        return sample
