"""Held-out figures of a head by the depth of its draft, over all places of the target's answers.

A draft begins at every place of an answer and reads the answer's tokens as its own, as if they were
accepted. The head has the distribution q at a depth, and the target p, both at one temperature.

- `argmax_match/k`: share of the drafts at whose depth k p and q have the same likeliest token.
- `recall_topC/k`: share of them where the target's is among the head's C likeliest tokens: an upper
  bound of greedy acceptance in a tree with C children, and of a selector's with C candidates.
- `sampled_acceptance/k`: sum_x min(p(x), q(x)), the probability that token verification accepts a
  sampled draft (Leviathan et al. 2023, arXiv 2211.17192, section 3.3), of drafts that reach depth
  k. The answer's tokens x before it do so with the product of min(1, q(x) / p(x)).
- `coverage`: the target's probability of the draft vocabulary, the largest possible acceptance.
- `simulated_tau`: expected tokens of a round of sampled drafts that begins at any place, the bonus
  included.

Answers at this temperature are samples of p, so the last two are then unbiased.

Shapes: M drafts, K drafted tokens, N predictions, P positions of a batch, V the target's
vocabulary, D drafted vocabulary, C rows of a chunk, U target positions of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.draft_vocabulary import index_tokens
from training.heads.evaluation import HeldOutRows
from training.heads.positions import Positions
from training.heads.predicting import PredictingHead, count_depths, output_layers
from training.losses.chunked import chunk_rows, widen

RECALLS = (4, 8)  # children of a node
SAMPLED, ARGMAX, RECALL = "sampled_acceptance", "argmax_match", "recall_top"
TAU, COVERAGE = "simulated_tau", "coverage"


class DepthFigures:
    """Held-out evaluation of acceptance, argmax matches and recalls by depth."""

    def __init__(
        self,
        kind: PredictingHead,
        head: Any,
        answers: HeldOutRows,
        draft_tokens: int,
        temperature: float,
    ) -> None:
        """Prepare the batches.

        answers: of a prompt with the target's answer each, which alone is supervised.
        draft_tokens: K. temperature: of p and q; 0 is replaced by 1.
        """
        self.kind, self.head, self.answers, self.states = kind, head, answers, answers.states
        self.draft_tokens, self.temperature = draft_tokens, temperature or 1.0
        candidates = kind.candidates(head)
        self.recalls = sorted({*RECALLS, *([candidates.count] if candidates else [])})
        self._where = answers.positions(
            count_depths(kind, draft_tokens),
            uses_teacher=True,
            grouped=kind.layer_per_depth(head),
            context=kind.reads_context,
        )

    def __call__(self) -> dict[str, float]:
        """Return the figures of the module's docstring, with depths from 1."""
        found = [self._by_draft(number) for number in range(len(self._where))]
        accepted_MK, overlap_MK, covered_MK, match_MK, *recalls, known_MK = (
            torch.cat(each) for each in zip(*found, strict=True)
        )
        reached_MK = torch.ones_like(accepted_MK)
        reached_MK[:, 1:] = accepted_MK[:, :-1].cumprod(dim=1)
        tested_K = (known_MK * reached_MK).sum(dim=0)
        survived_K = (known_MK * reached_MK * overlap_MK).sum(dim=0)
        known_K = known_MK.sum(dim=0).clamp_min(1)
        by_name = {SAMPLED: survived_K / tested_K.clamp_min(1e-30)}
        by_name[ARGMAX] = (known_MK * match_MK).sum(dim=0) / known_K
        for count, recall_MK in zip(self.recalls, recalls, strict=True):
            by_name[f"{RECALL}{count}"] = (known_MK * recall_MK).sum(dim=0) / known_K
        figures = {
            f"{name}/{depth}": share
            for name, shares_K in by_name.items()
            for depth, share in enumerate(shares_K.tolist(), start=1)
        }
        figures[TAU] = 1 + float((survived_K / known_K).sum())
        if self.head.token_ids_V is not None:
            figures[COVERAGE] = float((known_MK * covered_MK)[:, 0].sum() / known_K[0])
        return figures

    @torch.no_grad()
    def _by_draft(self, number: int) -> list[Tensor]:
        """Return [M, K] each of a batch's drafts: figures, and last whether a token is known."""
        batch, where = self.answers.batches[number], self._where[number]
        taps_PC, final_PH = self.answers.taps(number, where), self.answers.final(number, where)
        features_NE = self.kind.features(self.head, self.states, batch, where, taps_PC)
        outputs = output_layers(self.kind, self.head, self.states, where)
        parts = []
        for start in range(0, len(features_NE), size := chunk_rows(self.states.vocab_size)):
            end = min(start + size, len(features_NE))
            logits_CD = widen(outputs.logits(features_NE, start, end))
            parts.append(self._compare(logits_CD, final_PH, where, start, end))
        columns = [torch.cat(each).double().cpu() for each in zip(*parts, strict=True)]
        shape = (len(where.drafts_M), len(where.counts_K))
        at = (where.draft_N.cpu(), where.head_N.cpu())
        values = [
            torch.zeros(shape, dtype=torch.float64).index_put(at, each)
            for each in (*columns, torch.ones(len(features_NE), dtype=torch.float64))
        ]
        if self.kind.computes_states:
            begins_M = where.kept_P[where.drafts_M]
            documents_M = batch.documents_RT.flatten()[begins_M]
            values = self._ahead(values, begins_M.cpu(), documents_M.cpu())
        return [*values[:-1], values[-1].cumprod(dim=1)]

    def _ahead(self, values: list[Tensor], begins_M: Tensor, documents_M: Tensor) -> list[Tensor]:
        """Return [M, K] of values [M, 1]: those of the drafts that begin k places later."""
        ahead_K = torch.arange(self.draft_tokens)
        later_MK = (torch.arange(len(begins_M))[:, None] + ahead_K).clamp_max(len(begins_M) - 1)
        begins_there = begins_M[later_MK] == begins_M[:, None] + ahead_K
        known_MK = begins_there & (documents_M[later_MK] == documents_M[:, None])
        return [each[:, 0][later_MK] * known_MK for each in values]

    def _compare(
        self, logits_CD: Tensor, final_PH: Tensor, where: Positions, start: int, end: int
    ) -> list[Tensor]:
        """Return [C] each: min(1, q / p) of the token, sum min(p, q), coverage, match, recalls."""
        ids_D, labels_C = self.head.token_ids_V, where.labels_N[start:end]
        targets_U, places_C = where.targets_N[start:end].unique(return_inverse=True)
        p_logits_UV = widen(F.linear(final_PH[targets_U], self.states.lm_head))
        p_CV = (p_logits_UV / self.temperature).softmax(dim=-1)[places_C]
        q_CD = (logits_CD / self.temperature).softmax(dim=-1)
        p_label_C = p_CV.gather(1, labels_C[:, None])[:, 0]
        likeliest_C = p_logits_UV.argmax(dim=-1)[places_C]
        p_CD, drafted_C = p_CV, torch.ones_like(labels_C, dtype=torch.bool)
        if ids_D is not None:
            indices_V = index_tokens(ids_D, self.states.vocab_size)
            p_CD, labels_C, likeliest_C = (
                p_CV[:, ids_D],
                indices_V[labels_C],
                indices_V[likeliest_C],
            )
            drafted_C = likeliest_C >= 0
        q_label_C = q_CD.gather(1, labels_C.clamp_min(0)[:, None])[:, 0] * (labels_C >= 0)
        accepted_C = (q_label_C / p_label_C.clamp_min(1e-30)).clamp_max(1)
        best_C1 = logits_CD.gather(1, likeliest_C.clamp_min(0)[:, None])
        drafted_C &= best_C1[:, 0] > -torch.inf  # else it is no candidate
        rank_C = (logits_CD > best_C1).sum(dim=-1)
        recalls = [(rank_C < count) & drafted_C for count in (1, *self.recalls)]
        overlap_C = torch.minimum(p_CD, q_CD).sum(dim=-1)
        return [accepted_C, overlap_C, p_CD.sum(dim=-1), *recalls]
