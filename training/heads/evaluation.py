"""Held-out evaluation of a head during training: greedy acceptance and accuracy by depth.

`GreedyChain` needs no decoding. The target's answers are fixed and drafting is greedy, so the
tokens that a round accepts depend only on its start: the head drafts at every position of the
answers at once, and the rounds are walked afterwards. On greedy answers these are the rounds of
real decoding with a chain, the first of which begins at the prompt's last token. On sampled answers
they are the rounds of greedy drafts that are verified as point masses.

An evaluation is any callable that returns figures; the last `score` among them selects the
checkpoint.

Shapes: M drafts of a batch, T tokens of an answer with its prompt, F of a batch's one row, C
channels of the target's states, K drafted tokens or heads, k guesses, N predictions, E features.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.costs.prediction import Costs
from training.data.packing import PackedBatch, Sample, best_fit, collate
from training.features.states import TargetStates
from training.heads.positions import Positions, positions
from training.heads.predicting import Context, DraftStarts, PredictingHead, output_layers
from training.held_out.rounds import Rounds, match_survival, walk
from training.held_out.speedup import SpeedupPrediction
from training.losses.chunked import CHUNK

GREEDY = "greedy_acceptance"
Evaluation = Callable[[], dict[str, float]]


def combine(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return an evaluation that runs all of these and merges their figures; later ones prevail."""
    return lambda: {name: figure for each in evaluations for name, figure in each().items()}


class HeldOutRows:
    """Held-out samples in batches of one row, and the target's states there, read only once."""

    def __init__(
        self,
        states: TargetStates,
        samples: Sequence[Sample],
        max_length: int,
        device: torch.device,
    ) -> None:
        """Pack the samples into rows of at most `max_length` tokens."""
        self.states, self.samples = states, samples
        rows = best_fit([len(sample.ids) for sample in samples], max_length)
        self.batches = [collate(samples, [row], max_length, device) for row in rows]
        self._read: list[tuple[Tensor, Tensor]] = []

    def positions(
        self,
        heads: int,
        uses_teacher: bool = False,
        own_tokens: float = 0.0,
        *,
        grouped: bool = False,
        context: bool = False,
    ) -> list[Positions]:
        """Return where each batch is predicted: see `training.heads.positions.positions`."""
        return [
            positions(batch, heads, uses_teacher, own_tokens, grouped=grouped, context=context)
            for batch in self.batches
        ]

    def taps(self, number: int, where: Positions) -> Tensor:
        """Return the states that a head reads at the kept positions of batch `number`, [P, C]."""
        return self._all(number)[0][where.kept_P]

    def final(self, number: int, where: Positions) -> Tensor:
        """Return the states after the target's final norm at the same positions, [P, H]."""
        return self._all(number)[1][where.kept_P]

    def _all(self, number: int) -> tuple[Tensor, Tensor]:
        if number == len(self._read):
            self._read.append(self.states.read_all(self.batches[number]))
        return self._read[number]


class GreedyChain:
    """Acceptance rate and block efficiency of a greedy chain on the target's answers."""

    def __init__(
        self,
        kind: PredictingHead,
        head: Any,
        answers: HeldOutRows,
        draft_tokens: int,
        max_new_tokens: int,
        costs: Costs | None = None,
    ) -> None:
        """Prepare the batches.

        answers: of a prompt with the target's answer each, which alone is supervised. draft_tokens:
        length of the chain. max_new_tokens: the limit at which answers were cut off. costs: of a
        round; None predicts no speedup.
        """
        self.kind, self.head, self.answers = kind, head, answers
        self.draft_tokens, self.max_new_tokens = draft_tokens, max_new_tokens
        self.lengths = [len(one.ids) - _prompt(one) for one in answers.samples]
        self.prediction = (
            None if costs is None else SpeedupPrediction(costs, max_new_tokens, draft_tokens)
        )
        self._where = answers.positions(1, context=kind.reads_context)

    def __call__(self) -> dict[str, float]:
        """Return `acceptance` (accepted / tested draft tokens), `block_efficiency` and `score`.

        `greedy_acceptance/k` is the acceptance at depth k, from 1, of the depths that are reached.
        Block efficiency is tokens per target forward, the bonus included. The score is the
        predicted speedup if costs are known, with the figures of the prediction, and else the block
        efficiency.
        """
        survival_ATK = self._survival()
        rounds = self._rounds(survival_ATK)
        figures = {
            "acceptance": rounds.acceptance,
            "block_efficiency": rounds.block_efficiency,
            "score": rounds.block_efficiency,
            **rounds.acceptance_by_depth(GREEDY),
        }
        if self.prediction is None:
            return figures
        return figures | self.prediction.figures(survival_ATK, self.lengths)

    def counts(self) -> list[tuple[int, int, int, int]]:
        """Return (rounds, emitted, accepted, tested) of every answer, in order."""
        found = self._rounds(self._survival())
        accepted_A, tested_A = found.accepted_AK.sum(axis=1), found.tested_AK.sum(axis=1)
        rows = zip(found.rounds_A, found.emitted_A, accepted_A, tested_A, strict=True)
        return [(int(a), int(b), int(c), int(d)) for a, b, c, d in rows]

    def _rounds(self, survival_ATK: np.ndarray) -> Rounds:
        return walk(survival_ATK, self.lengths, self.draft_tokens, self.max_new_tokens)

    def _survival(self) -> np.ndarray:
        """Return whether the first k + 1 tokens drafted after each tip are right, [A, T, K]."""
        found: dict[int, np.ndarray] = {}
        samples = self.answers.samples
        for number, where in enumerate(self._where):
            batch = self.answers.batches[number]
            row = batch.rows[0]
            ends = np.cumsum([len(samples[index].ids) for index in row]).tolist()
            begins = [0, *ends[:-1]]
            alone = [
                begin
                for begin, index in zip(begins, row, strict=True)
                if _prompt(samples[index]) == 1
            ]
            matches_F = self._matches(batch, where, self.answers.taps(number, where), alone)
            for begin, end, index in zip(begins, ends, row, strict=True):
                first = begin + _prompt(samples[index]) - 1
                found[index] = matches_F[first : end - 1]
        matches = [found[index] for index in range(len(samples))]
        return match_survival(matches, self.draft_tokens)

    @torch.no_grad()
    def _matches(
        self, batch: PackedBatch, where: Positions, states_PC: Tensor, alone: list[int]
    ) -> np.ndarray:
        """Return [F]: how many drafted tokens after each tip are correct before the first error.

        It is 0 where no round can begin. alone: tips that are their prompt's only token, from which
        the head drafts with a zero state.
        """
        ids_F = F.pad(batch.ids_RT[0], (0, self.draft_tokens), value=-1)
        tips_M = torch.cat(
            (where.kept_P[where.drafts_M] + 1, devices.tensor(alone, batch.device, torch.long))
        )
        before_MC = torch.cat(
            (states_PC[where.drafts_M], states_PC.new_zeros(len(alone), states_PC.shape[1]))
        )
        context = None
        if self.kind.reads_context:
            context = Context(batch, where.kept_P, states_PC, tips_M)
        tips = DraftStarts(ids_F[tips_M], before_MC, context)
        drafted_MK = self.kind.draft(self.head, self.answers.states, tips, self.draft_tokens)
        ahead_K = torch.arange(1, 1 + self.draft_tokens, device=batch.device)
        right_MK = drafted_MK == ids_F[tips_M[:, None] + ahead_K]
        matches_M = right_MK.long().cumprod(dim=1).sum(dim=1)
        matches_F = np.zeros(batch.ids_RT.shape[1], dtype=np.int64)
        tip_list, matches = devices.read(tips_M, matches_M)
        matches_F[tip_list] = matches
        return matches_F


def _prompt(answer: Sample) -> int:
    """Return the number of tokens of an answer's prompt."""
    return int(np.argmax(answer.mask))


class HeadAccuracy:
    """Accuracy of each head's k likeliest tokens, k = 1 .. top_k, given the true tokens before.

    Teacher-forced, as published: `accuracy/{label}{i}_top{k}` compares heads with published ones
    and is not an acceptance rate.
    """

    def __init__(
        self,
        kind: PredictingHead,
        head: Any,
        texts: HeldOutRows,
        heads: int,
        top_k: int,
    ) -> None:
        self.kind, self.head, self.texts = kind, head, texts
        self.heads, self.top_k = heads, top_k
        self._where = texts.positions(
            heads, grouped=kind.layer_per_depth(head), context=kind.reads_context
        )

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        right_Kk, counts_K = torch.zeros(self.heads, self.top_k), torch.zeros(self.heads)
        states = self.texts.states
        for number, where in enumerate(self._where):
            batch, taps_PC = self.texts.batches[number], self.texts.taps(number, where)
            features_NE = self.kind.features(self.head, states, batch, where, taps_PC)
            outputs = output_layers(self.kind, self.head, states, where)
            for start in range(0, len(features_NE), CHUNK):
                end = min(start + CHUNK, len(features_NE))
                logits_CV = outputs.logits(features_NE, start, end)
                right_Kk = right_Kk.to(batch.device) + self._right(
                    logits_CV, where.labels_N[start:end], where.head_N[start:end]
                )
            counts_K += torch.tensor(where.counts_K)
        shares_Kk = right_Kk.cpu() / counts_K.clamp_min(1)[:, None]
        return {
            f"accuracy/{self.kind.label}{i}_top{k + 1}": float(shares_Kk[i, k])
            for i in range(self.heads)
            for k in range(self.top_k)
        }

    def _right(self, logits_CV: Tensor, labels_C: Tensor, head_C: Tensor) -> Tensor:
        """Return the numbers of correct predictions in a chunk by head and guesses, [K, k]."""
        best_Ck = logits_CV.topk(self.top_k, dim=-1).indices
        if self.head.token_ids_V is not None:
            best_Ck = self.head.token_ids_V[best_Ck]
        right_Ck = (best_Ck == labels_C[:, None]).cumsum(dim=-1).float()
        of_head_CK = (head_C[:, None] == torch.arange(self.heads, device=head_C.device)).float()
        return of_head_CK.T @ right_Ck
