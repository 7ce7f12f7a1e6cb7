"""Held-out acceptance: the acceptance rate of the student on the target's answers.

The target is frozen, so it answers the held-out prompts once. Every evaluation is one packed
forward pass of the student over these answers. The probability that speculative sampling accepts
the student's draft at a position is sum_v min(p, q) (Leviathan et al. 2023, section 3.3). At
temperature 0 a draft is accepted if argmax p = argmax q.

A student with a draft vocabulary has q = 0 for all other tokens. Its *coverage* is the probability
that p gives to the draft vocabulary, an upper bound of acceptance.

Shapes: N answer tokens, V vocabulary, D tokens that the student drafts, C tokens of a chunk, H and
G hidden sizes of student and teacher.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.models.draft_vocabulary import token_ids
from training.data.packing import Sample, best_fit, collate
from training.draft_vocabulary import index_tokens
from training.objectives import hidden_states

_CHUNK = 1024


@dataclass
class AcceptanceSums:
    """Sums over held-out tokens."""

    # sum_v min(p, q)
    accepted: float
    # tokens at which p and q have the same argmax
    greedy: float
    # -log q of the actual token in nats, at temperature 1, over the tokens that the student drafts
    loss: float
    # sum of p over the tokens that the student drafts
    covered: float
    # tokens that the student drafts
    drafted: float
    tokens: float

    @property
    def acceptance(self) -> float:
        return self.accepted / self.tokens


def sum_accepted(p_logits_CV: Tensor, q_logits_CV: Tensor, temperature: float) -> Tensor:
    """Return the sum of the acceptance probabilities over the C positions, a scalar.

    At temperature 0 this is the number of positions with equal argmaxes.
    """
    if temperature == 0:
        return (p_logits_CV.argmax(-1) == q_logits_CV.argmax(-1)).sum()
    p_CV, q_CV = ((logits / temperature).softmax(-1) for logits in (p_logits_CV, q_logits_CV))
    return torch.minimum(p_CV, q_CV).sum()


class HeldOutAcceptance:
    """Callable that scores the current weights of the student on the target's answers.

    max_length: tokens per packed row. temperature: temperature of p and q (0 is replaced by 1).
    """

    def __init__(
        self, student: Any, teacher: Any, answers: list[Sample], max_length: int, temperature: float
    ) -> None:
        self.student = student
        self.teacher = teacher
        self.temperature = temperature or 1.0
        rows = best_fit([len(sample.ids) for sample in answers], max_length)
        # One row per forward pass needs less memory than a training step.
        self.batches = [
            collate(answers, [row], max_length, next(student.parameters()).device) for row in rows
        ]
        self._teacher_hidden: list[Tensor] = []

    def __call__(self) -> dict[str, float]:
        """Return `acceptance`, `greedy_acceptance` and `score`.

        `acceptance` is the mean of sum_v min(p, q), `greedy_acceptance` the share of positions with
        equal argmaxes. All checkpoints of a run cost the same, so acceptance is their score. With a
        draft vocabulary there are also `coverage`, the mean probability of its tokens, and
        `drafted_tokens`, their share of the answers' tokens.
        """
        totals = self.totals()
        figures = {
            "acceptance": totals.acceptance,
            "greedy_acceptance": totals.greedy / totals.tokens,
        }
        if token_ids(self.student) is not None:
            figures |= {
                "coverage": totals.covered / totals.tokens,
                "drafted_tokens": totals.drafted / totals.tokens,
            }
        return figures | {"score": totals.acceptance}

    @torch.no_grad()
    def totals(self) -> AcceptanceSums:
        """Return the sums over all supervised tokens for the current weights of the student."""
        totals = torch.zeros(6, dtype=torch.float64)
        for number, batch in enumerate(self.batches):
            if number == len(self._teacher_hidden):
                self._teacher_hidden.append(batch.at_supervised(hidden_states(self.teacher, batch)))
            student_NH = batch.at_supervised(hidden_states(self.student, batch))
            totals += self._overlap(
                student_NH, self._teacher_hidden[number], batch.at_supervised(batch.next_RT)
            )
        return AcceptanceSums(*totals.tolist())

    def _overlap(self, student_NH: Tensor, teacher_NG: Tensor, next_N: Tensor) -> Tensor:
        ids_D, V = token_ids(self.student), self.teacher.config.vocab_size
        if ids_D is None:
            ids_D = torch.arange(V, device=next_N.device)
        indices_V = index_tokens(ids_D, V)
        totals = torch.zeros(6, dtype=torch.float64)
        chunks = (states.split(_CHUNK) for states in (student_NH, teacher_NG, next_N))
        for student_CH, teacher_CG, next_C in zip(*chunks, strict=True):
            q_logits_CD = F.linear(student_CH, self.student.lm_head.weight).float()
            p_logits_CV = F.linear(teacher_CG, self.teacher.lm_head.weight).float()
            q_CD, p_CV = ((x / self.temperature).softmax(-1) for x in (q_logits_CD, p_logits_CV))
            p_CD, labels_C = p_CV if len(ids_D) == V else p_CV[:, ids_D], indices_V[next_C]
            sums = (
                torch.minimum(p_CD, q_CD).sum(),
                (p_logits_CV.argmax(-1) == ids_D[q_logits_CD.argmax(-1)]).sum(),
                F.cross_entropy(q_logits_CD, labels_C, reduction="sum", ignore_index=-1),
                p_CD.sum(),
                (labels_C >= 0).sum(),
                torch.tensor(len(next_C), device=next_C.device),
            )
            totals += torch.stack(sums).double().cpu()
        return totals


def score_mixture(
    answers: HeldOutAcceptance, domains: Mapping[str, HeldOutAcceptance]
) -> dict[str, float]:
    """Score the student on the target's answers and on each domain's held-out text.

    On a domain's text, which the target did not write, acceptance is the mean of sum_v min(p, q)
    over all supervised tokens. Returns the figures of `answers`, acceptance/NAME and loss/NAME
    (nats per token that the student drafts) of each domain, and worst_domain_acceptance.
    """
    sums = {name: held_out.totals() for name, held_out in domains.items()}
    figures = answers()
    for name, of in sums.items():
        figures |= {
            f"acceptance/{name}": of.acceptance,
            f"loss/{name}": of.loss / max(1, of.drafted),
        }
    return figures | {"worst_domain_acceptance": min(of.acceptance for of in sums.values())}
