"""Training objective of a head: a chunked loss over all predictions of a packed batch's drafts.

The published losses of ReDrafter and Medusa are sums over heads of the mean cross-entropy. Here
every head's sum is divided by the global count of supervised tokens (training/loop.py), so no batch
divides by zero. The two differ by the tokens that are too early in a text for a head to predict.
Distillation on the target's tokens (`continuations`) reads and predicts the target's greedy
continuations instead of the text, at the same positions. In on-policy rows the head reads its own
tokens, and the target's distribution after them is the reference (training/heads/on_policy.py).
Gradients reach the head, not the target.

A head that drafts from a list of candidates has two losses: among them, and of the features from
which the list comes (training/heads/candidates.py). A head with a correction may learn the
uncorrected logits first: their loss has the weight l = `base_weight` x the remaining share of the
run, and that of the corrected ones 1 - l (Domino, arXiv 2605.29707). A head that predicts the
target's next states can learn these too, and read states with noise
(training/heads/next_states.py).

Shapes: E features, H hidden size, K heads, N predictions of all heads, P positions of the target
that are read, S states from which it predicts, V drafted vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.bounds import Place
from training.data.packing import PackedBatch, Rows
from training.draft_vocabulary import index_tokens
from training.features.states import TargetStates
from training.heads.candidates import Against, Predictions, among_candidates
from training.heads.loss_config import (
    D_PACE,
    HeadLossConfig,
    depth_shares,
    num_continued_tokens,
    reads_final,
    trained_depths,
)
from training.heads.next_states import smooth_l1_rows, state_noise
from training.heads.on_policy import OnPolicyRows
from training.heads.positions import Positions, positions
from training.heads.predicting import PredictingHead, count_depths
from training.losses.chunked import (
    Outputs,
    cross_entropy_rows,
    listed_cross_entropy_rows,
    split_weight,
    widen,
)
from training.losses.config import teacher_temperature, uses_teacher
from training.losses.family import Reference, acceptance_rows, reference_rows
from training.losses.heads import (
    chunked_by_head,
    chunked_chances,
    d_pace_weights,
    decay_weights,
)
from training.losses.teacher import Teacher
from training.objectives import StaticObjective


class HeadObjective(StaticObjective):
    """Loss of a head over all its predictions in a batch."""

    indices_V: Tensor | None
    keeps_weights = True  # drafts attend in chunks, whose number differs between ranks

    def __init__(
        self,
        kind: PredictingHead,
        head: Any,
        states: TargetStates,
        loss: HeadLossConfig,
        on_policy: OnPolicyRows | None = None,
        seed: int = 0,
    ) -> None:
        """Store the head and what it learns.

        on_policy: the rows in which it learns the target's distribution after its own tokens, with
        a loss that reads only this distribution; None: no rows. seed: of all that is sampled, which
        is drafts and their depths, masks, drafts with own tokens, and noise on states.
        """
        super().__init__()
        self.kind, self.head, self.states, self.loss = kind, head, states, loss
        self.on_policy, self.seed, self.step = on_policy, seed, 0
        self._base_share = loss.base_weight
        self.depths = count_depths(kind, trained_depths(loss))
        measured = "acceptance" if uses_teacher(loss) else "top1"
        heads = range(self.depths)
        self.metric_names = (
            *(f"{kind.label}{i}_{measured}" for i in heads),
            *(f"{kind.label}{i}_loss" for i in heads),
            *(f"{kind.label}{i}_state_loss" for i in heads if loss.state_weight),
            # of the logits from which candidates come, not of the drafted tokens
            *(f"{kind.label}{i}_base_{measured}" for i in heads if kind.candidates(head)),
        )
        self.register_buffer("indices_V", _indices(head, states), persistent=False)

    def begin(self, step: int, place: Place, rows: Rows) -> None:
        self.step = step
        self._base_share = self.loss.base_weight * (1 - place.share())
        if self.on_policy is not None:
            self.on_policy.begin(step, rows)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return (sum over heads of weight x loss in nats, sums by head [2 K]).

        The first K sums count correct tokens or acceptance of what the head drafts, the others add
        up the unweighted loss. With a loss of states there are K more, its unweighted sums; with
        candidates there are K more, the first sums of the features from which these come.
        """
        drafted, others = self.on_policy.split(batch) if self.on_policy is not None else ([], [])
        if not drafted:
            return self._on_text(batch)
        parts = [self._on_drafts(batch.row(index)) for index in drafted]
        parts += [self._on_text(batch.select(others))] if others else []
        losses, sums = zip(*parts)
        return sum(losses[1:], losses[0]), sum(sums[1:], sums[0])

    def _on_drafts(self, row: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the sums of `forward` over one row, after tokens that the head drafts."""
        assert self.on_policy is not None
        drafted = self.on_policy.draft(self.kind, self.head, self.states, row, self.depths)
        return self._sums(row, drafted.where, drafted.states_PC, drafted.final_SH)

    def _on_text(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the sums of `forward` over rows of the data."""
        where, states_PC = self.read_target(batch)
        final_PH = self.states.select_final(states_PC) if reads_final(self.loss) else None
        return self._sums(batch, where, states_PC, final_PH)

    def read_target(self, batch: PackedBatch) -> tuple[Positions, Tensor]:
        """Return the predictions in rows of the data, and the target's states there, [P, C].

        States come from the store if there is one; those that it lacks are computed and stored.
        """
        loss, states = self.loss, self.states
        where = positions(
            batch,
            self.depths,
            reads_final(loss),
            loss.own_tokens,
            (self.seed, self.step),
            grouped=self.kind.layer_per_depth(self.head),
            context=self.kind.reads_context,
            drafts_per_row=loss.drafts_per_row,
            shares_K=depth_shares(loss, self.depths),
            random_masks=self.kind.random_masks(self.head),
        )
        if count := num_continued_tokens(loss):
            states_PC, tokens_PK = states.continue_greedily(batch, where, count)
            return where.with_tokens(tokens_PK[where.drafts_M]), states_PC
        return where, states(batch, where)

    def _sums(
        self, batch: PackedBatch, where: Positions, states_PC: Tensor, final_SH: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of `forward` over these predictions.

        final_SH: the states of which where.targets_N are indices, where the target predicts; None
        for a loss that does not read them.
        """
        loss, states, heads = self.loss, self.states, self.depths
        read_PC = states.select_taps(states_PC)
        if loss.state_noise:
            read_PC = read_PC + state_noise(
                batch, where.kept_P, read_PC, loss.state_noise, (self.seed, self.step)
            )
        features_NE = self.kind.features(self.head, states, batch, where, read_PC)
        logits_N = self.kind.chance_logits(self.head, features_NE)
        drafted, first = self._predictions(features_NE, where, self._reference(final_SH, where))
        chances_N = None
        if loss.depth_weights == D_PACE or logits_N is not None:
            chances_N = chunked_chances(
                drafted.features_NE, drafted.outputs, acceptance_rows(loss), drafted.against
            )
        weights_N = self._weights(where, chances_N, widen(features_NE).dtype)
        if where.scale_N is not None:
            weights_N = weights_N * where.scale_N
        total, sums = self._sum(drafted, where, weights_N)
        base_K = sums.new_zeros(0)
        if first is not None:  # the metrics are those of the drafted tokens
            more, of_first = self._sum(first, where, weights_N)
            if self.kind.candidates(self.head) is None:
                total = (1 - self._base_share) * total + self._base_share * more
            else:
                base_K, loss_K = of_first.split(heads)
                total, sums = total + more, sums + F.pad(loss_K, (heads, 0))
        if logits_N is not None and chances_N is not None:
            total = total + F.binary_cross_entropy_with_logits(
                widen(logits_N), chances_N, weights_N, reduction="sum"
            )
        total = total * loss.token_weight
        if loss.state_weight:
            assert final_SH is not None
            of_states_N = smooth_l1_rows(features_NE, final_SH[where.targets_N])
            total = total + loss.state_weight * (weights_N * of_states_N).sum()
            seen_N = of_states_N.detach()
            if where.figure_scale_N is not None:
                seen_N = seen_N * where.figure_scale_N
            of_heads_K = sums.new_zeros(heads).index_add(0, where.head_N, seen_N)
            sums = torch.cat((sums, of_heads_K))
        return total, torch.cat((sums, base_K))

    def _predictions(
        self, features_NE: Tensor, where: Positions, against: Against
    ) -> tuple[Predictions, Predictions | None]:
        """Return the predictions from which tokens are drafted, and those of the first features.

        The latter are those of candidates or of uncorrected logits, or None without a loss of them.
        """
        kind, head = self.kind, self.head
        weights, candidates = kind.outputs(head, self.states), kind.candidates(head)
        if candidates is None:
            layers = where.heads if len(weights) > 1 else None
            drafted = Predictions(features_NE, Outputs(weights, layers), against)
            if not (self._base_share and kind.corrects(head)):
                return drafted, None
            weight = split_weight(weights[0])
        else:
            weight = split_weight(weights[0])
            drafted = among_candidates(candidates, features_NE, weight, against)
        first_NE, _ = weight.split(features_NE)
        return drafted, Predictions(first_NE, Outputs([weight.frozen_VH]), against)

    def _sum(self, part: Predictions, where: Positions, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted loss of predictions, and their sums by head [2 K]."""
        listed = self.indices_V is not None or self.kind.candidates(self.head) is not None
        tokens = listed_cross_entropy_rows if listed else cross_entropy_rows
        rows = reference_rows(self.loss, tokens)
        return chunked_by_head(
            part.features_NE,
            part.outputs,
            rows,
            part.against,
            where.head_N,
            self.depths,
            weights_N,
            figure_scale_N=where.figure_scale_N,
        )

    def _reference(self, final_SH: Tensor | None, where: Positions) -> Against:
        """Return a function from predictions [start, end) to what they learn."""
        labels_N = where.labels_N if self.indices_V is None else self.indices_V[where.labels_N]
        if final_SH is None or not uses_teacher(self.loss):
            return lambda start, end: Reference(labels_N[start:end])
        teacher = Teacher(
            final_SH, self.states.lm_head, teacher_temperature(self.loss), self.head.token_ids_V
        ).shared(where.targets_N, where.targets)
        return lambda start, end: Reference(labels_N[start:end], teacher(start, end))

    def _weights(self, where: Positions, chances_N: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the weight of each prediction's loss, [N].

        chances_N: the predictions' chances of acceptance, for D-PACE.
        """
        loss = self.loss
        if loss.depth_weights != D_PACE:
            weights_N = decay_weights(where.head_N, loss.decay, dtype)
            if where.masked_N is not None:  # 1 / t: training/heads/masks.py
                weights_N = weights_N * self.depths / where.masked_N
            return weights_N
        assert chances_N is not None
        drafts, heads = len(where.drafts_M), self.depths
        return d_pace_weights(
            chances_N, where.draft_N, where.head_N, drafts, heads, loss.d_pace_alpha
        )


def _indices(head: Any, states: TargetStates) -> Tensor | None:
    """Return the indices of the target's tokens in the head's logits; None if all are drafted."""
    if head.token_ids_V is None:
        return None
    return index_tokens(head.token_ids_V, states.vocab_size)
