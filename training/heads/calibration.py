"""Held-out evaluation that calibrates a head's confidences (training/heads/temperatures.py).

The text is the target's held-out answers. Greedy answers survive as long as the head's greedy draft
equals them, and the confidences read that draft. Under sampling an answer's token x was an accepted
draft with probability min(1, q(x) / p(x)), as in training/held_out/rounds.py, and the confidences
read the answer, as in training.

Shapes: M drafts, K drafted tokens, N predictions, P positions of a batch, E features, V drafted
vocabulary, C rows of a chunk.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data.packing import PackedBatch
from training.draft_vocabulary import index_tokens
from training.heads.evaluation import HeldOutRows
from training.heads.positions import Positions
from training.heads.predicting import PredictingHead, output_layers
from training.heads.temperatures import Drafts, calibrate
from training.losses.chunked import chunk_rows, widen


class Calibration:
    """Held-out evaluation that fits the temperatures of a head's confidences."""

    def __init__(
        self,
        kind: PredictingHead,
        head: Any,
        answers: HeldOutRows,
        heads: int,
        temperature: float,
    ) -> None:
        """Prepare the batches.

        answers: of a prompt with the target's answer each, which alone is supervised. heads: K.
        temperature: that of the answers.
        """
        self.kind, self.head, self.temperature = kind, head, temperature
        self.answers, self.states = answers, answers.states
        own_tokens = 0.0 if temperature else 1.0
        self._where = answers.positions(heads, True, own_tokens, context=kind.reads_context)
        self._log_p: list[Tensor] = []  # of each batch, at its kept positions

    def __call__(self) -> dict[str, float]:
        """Return the figures of `calibrate`."""
        return calibrate(self.collect())

    @torch.no_grad()
    def collect(self) -> Drafts:
        """Return the drafts from all places of the answers, in the order of the packed rows."""
        parts = []
        for number, where in enumerate(self._where):
            batch, taps_PC = self.answers.batches[number], self.answers.taps(number, where)
            features_NE = self.kind.features(self.head, self.states, batch, where, taps_PC)
            logits_N = self.kind.chance_logits(self.head, features_NE)
            assert logits_N is not None, "a head without confidences is not calibrated"
            accepted_N = self._accepted(number, features_NE)
            parts.append(_by_draft(batch, where, logits_N, accepted_N))
        return Drafts(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def _accepted(self, number: int, features_NE: Tensor) -> Tensor:
        """Return the chance [N] that verification accepts the text's token as a draft."""
        where = self._where[number]
        ids_V, labels_N = self.head.token_ids_V, where.labels_N
        if ids_V is not None:
            labels_N = index_tokens(ids_V, self.states.vocab_size)[labels_N]
        outputs = output_layers(self.kind, self.head, self.states, where)
        parts = []
        for start, end in _chunks(len(features_NE), len(outputs.weights[0])):
            logits_CV, labels_C = outputs.logits(features_NE, start, end), labels_N[start:end]
            if self.temperature:
                log_q_CV = F.log_softmax(widen(logits_CV) / self.temperature, dim=-1)
                log_q_C = log_q_CV.gather(1, labels_C.clamp_min(0)[:, None]).squeeze(1)
                parts.append(log_q_C.masked_fill(labels_C < 0, -math.inf))
            else:
                parts.append((logits_CV.argmax(dim=-1) == labels_C).float())
        found_N = torch.cat(parts) if parts else features_NE.new_zeros(0)
        if not self.temperature:
            return found_N
        return (found_N - self._target_log_p(number)[where.targets_N]).exp().clamp_max(1)

    def _target_log_p(self, number: int) -> Tensor:
        """Return the log probability that the target gives to the token after each position [P].

        It is computed only once.
        """
        if number == len(self._log_p):
            where, lm_head_VH = self._where[number], self.states.lm_head
            final_PH = self.answers.final(number, where)
            next_P = self.answers.batches[number].next_RT.flatten()[where.kept_P]
            parts = []
            for start, end in _chunks(len(final_PH), len(lm_head_VH)):
                logits_CV = widen(F.linear(final_PH[start:end], lm_head_VH)) / self.temperature
                log_p_CV = F.log_softmax(logits_CV, dim=-1)
                parts.append(log_p_CV.gather(1, next_P[start:end, None]).squeeze(1))
            self._log_p.append(torch.cat(parts))
        return self._log_p[number]


def _chunks(rows: int, vocabulary: int) -> list[tuple[int, int]]:
    """Return the spans of rows whose logits are in memory at once."""
    size = chunk_rows(vocabulary)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _by_draft(
    batch: PackedBatch, where: Positions, logits_N: Tensor, accepted_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Drafts` from those of predictions in one packed row of answers."""
    shape = (len(where.drafts_M), len(where.counts_K))
    at = (where.draft_N.cpu(), where.head_N.cpu())
    known_MK = torch.zeros(shape, dtype=torch.long).index_put(at, torch.tensor(1)).cumprod(1) > 0
    logits_MK, accepted_MK = (
        torch.zeros(shape, dtype=torch.float64).index_put(at, each_N.double().cpu())
        for each_N in (logits_N, accepted_N)
    )
    documents_F = torch.from_numpy(batch.host.documents_RT).flatten()  # from 1
    numbers_M = documents_F[where.kept_P[where.drafts_M].cpu()] - 1
    answers_M = torch.tensor(batch.rows[0])[numbers_M]
    return logits_MK, accepted_MK.cumprod(dim=1), known_MK, answers_M
