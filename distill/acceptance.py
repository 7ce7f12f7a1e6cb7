"""Held-out acceptance: the acceptance rate of the student on the target's answers.

The target is frozen, so it answers the held-out prompts once. Every evaluation is one packed
forward pass of the student over these answers. The probability that speculative sampling accepts
the student's draft at a position is sum_v min(p, q) (Leviathan et al. 2023, section 3.3). At
temperature 0 a draft is accepted if argmax p = argmax q.

Shapes: N answer tokens, V vocabulary, C tokens of a chunk, H and G hidden sizes of student and
teacher.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data.packing import Sample, best_fit, collate
from training.objectives import hidden_states

_CHUNK = 1024


@dataclass
class AcceptanceSums:
    """Sums over held-out tokens."""

    # sum_v min(p, q)
    accepted: float
    # tokens at which p and q have the same argmax
    greedy: float
    # -log q of the actual token in nats, at temperature 1
    loss: float
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
        equal argmaxes. All checkpoints of a run cost the same, so acceptance is their score.
        """
        totals = self.totals()
        return {
            "acceptance": totals.acceptance,
            "greedy_acceptance": totals.greedy / totals.tokens,
            "score": totals.acceptance,
        }

    @torch.no_grad()
    def totals(self) -> AcceptanceSums:
        """Return the sums over all supervised tokens for the current weights of the student."""
        totals = torch.zeros(4, dtype=torch.float64)
        for number, batch in enumerate(self.batches):
            if number == len(self._teacher_hidden):
                self._teacher_hidden.append(batch.at_supervised(hidden_states(self.teacher, batch)))
            student_NH = batch.at_supervised(hidden_states(self.student, batch))
            totals += self._overlap(
                student_NH, self._teacher_hidden[number], batch.at_supervised(batch.next_RT)
            )
        return AcceptanceSums(*totals.tolist())

    def _overlap(self, student_NH: Tensor, teacher_NG: Tensor, next_N: Tensor) -> Tensor:
        totals = torch.zeros(4, dtype=torch.float64)
        chunks = (states.split(_CHUNK) for states in (student_NH, teacher_NG, next_N))
        for student_CH, teacher_CG, next_C in zip(*chunks, strict=True):
            q_logits_CV = F.linear(student_CH, self.student.lm_head.weight).float()
            p_logits_CV = F.linear(teacher_CG, self.teacher.lm_head.weight).float()
            accepted = sum_accepted(p_logits_CV, q_logits_CV, self.temperature)
            greedy = sum_accepted(p_logits_CV, q_logits_CV, 0.0)
            loss = F.cross_entropy(q_logits_CV, next_C, reduction="sum")
            count = torch.tensor(len(next_C), device=next_C.device)
            totals += torch.stack([accepted, greedy, loss, count]).double().cpu()
        return totals


def score_mixture(
    answers: HeldOutAcceptance, domains: Mapping[str, HeldOutAcceptance]
) -> dict[str, float]:
    """Score the student on the target's answers and on each domain's held-out text.

    On a domain's text, which the target did not write, acceptance is the mean of sum_v min(p, q)
    over all supervised tokens. Returns the figures of `answers`, acceptance/NAME and loss/NAME
    (nats per token) of each domain, and worst_domain_acceptance.
    """
    sums = {name: held_out.totals() for name, held_out in domains.items()}
    figures = answers()
    for name, of in sums.items():
        figures |= {f"acceptance/{name}": of.acceptance, f"loss/{name}": of.loss / of.tokens}
    return figures | {"worst_domain_acceptance": min(of.acceptance for of in sums.values())}
