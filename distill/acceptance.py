"""Held-out acceptance: the acceptance rate of the student on the target's answers.

The target is frozen, so it answers the held-out prompts once. Every evaluation is one packed
forward pass of the student over these answers. The probability that speculative sampling accepts
the student's draft at a position is sum_v min(p, q) (Leviathan et al. 2023, section 3.3). At
temperature 0 a draft is accepted if argmax p = argmax q.

With known costs of a round, the answers also give the block efficiency and the speedup of a chain
(training/held_out/).

A student with a draft vocabulary has q = 0 for all other tokens. Its *coverage* is the probability
that p gives to the draft vocabulary, an upper bound of acceptance.

Shapes: N supervised tokens, V vocabulary, D tokens that the student drafts, C tokens of a chunk, H
and G hidden sizes of student and teacher, A answers, T tips of the longest answer, K drafted
tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.models.draft_vocabulary import token_ids
from training.data.packing import Sample, best_fit, collate
from training.draft_vocabulary import index_tokens
from training.held_out.rounds import chain_survival
from training.held_out.speedup import SpeedupPrediction
from training.objectives import hidden_states

_CHUNK = 1024
_TINY = 1e-30  # smallest probability of a token that the target wrote


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

    max_length: tokens per packed row. temperature: temperature of p and q (0 is replaced by 1, but
    rounds are then greedy). prediction: predicts the speedup on `answers`, which must then be the
    target's answers at this temperature; None predicts none.
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        answers: Sequence[Sample],
        max_length: int,
        temperature: float,
        prediction: SpeedupPrediction | None = None,
    ) -> None:
        self.student = student
        self.teacher = teacher
        self.temperature, self.greedy = temperature or 1.0, temperature == 0
        self.prediction = prediction
        rows = best_fit([len(sample.ids) for sample in answers], max_length)
        # One row per forward pass needs less memory than a training step.
        self.batches = [
            collate(answers, [row], max_length, next(student.parameters()).device) for row in rows
        ]
        self._teacher_hidden: list[Tensor] = []
        # supervised tokens of each answer, in the order of the batches
        self.lengths = [int(answers[index].mask[1:].sum()) for row in rows for index in row]

    def __call__(self) -> dict[str, float]:
        """Return `acceptance`, `greedy_acceptance` and `score`.

        `acceptance` is the mean of sum_v min(p, q), `greedy_acceptance` the share of positions with
        equal argmaxes. The score is the predicted speedup if there is a prediction, whose figures
        are returned too, and else the acceptance. With a draft vocabulary there are also
        `coverage`, the mean probability of its tokens, and `drafted_tokens`, their share of the
        answers' tokens.
        """
        totals, chances_N = self.evaluate()
        figures = self.first_token_figures(totals)
        if self.prediction is None:
            return figures | {"score": totals.acceptance}
        chances = chances_N.split(self.lengths)
        survival_ATK = chain_survival(chances, self.prediction.draft_tokens)
        return figures | self.prediction.figures(survival_ATK, self.lengths)

    def first_token_figures(self, totals: AcceptanceSums) -> dict[str, float]:
        """Return the figures of the token after each position."""
        figures = {
            "acceptance": totals.acceptance,
            "greedy_acceptance": totals.greedy / totals.tokens,
        }
        if token_ids(self.student) is not None:
            figures |= {
                "coverage": totals.covered / totals.tokens,
                "drafted_tokens": totals.drafted / totals.tokens,
            }
        return figures

    def totals(self) -> AcceptanceSums:
        """Return the sums over all supervised tokens for the current weights of the student."""
        return self.evaluate()[0]

    @torch.no_grad()
    def evaluate(self) -> tuple[AcceptanceSums, Tensor]:
        """Return the sums, and the probability [N] that each token was an accepted draft."""
        totals = torch.zeros(6, dtype=torch.float64)
        chances = []
        for number, batch in enumerate(self.batches):
            student_NH = batch.at_supervised(hidden_states(self.student, batch))
            sums, chances_N = self._overlap(
                student_NH, self.teacher_states(number), batch.at_supervised(batch.next_RT)
            )
            totals += sums
            chances.append(chances_N)
        return AcceptanceSums(*totals.tolist()), torch.cat(chances)

    def teacher_states(self, number: int) -> Tensor:
        """Return the teacher's states [N, G] at the supervised tokens of a batch, read once.

        Batches are read in their order.
        """
        if number == len(self._teacher_hidden):
            batch = self.batches[number]
            self._teacher_hidden.append(batch.at_supervised(hidden_states(self.teacher, batch)))
        return self._teacher_hidden[number]

    def _overlap(
        self, student_NH: Tensor, teacher_NG: Tensor, next_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sums over these tokens, and the probability [N] that each was accepted."""
        ids_D, V = token_ids(self.student), self.teacher.config.vocab_size
        if ids_D is None:
            ids_D = torch.arange(V, device=next_N.device)
        indices_V = index_tokens(ids_D, V)
        totals, found = torch.zeros(6, dtype=torch.float64), []
        chunks = (states.split(_CHUNK) for states in (student_NH, teacher_NG, next_N))
        for student_CH, teacher_CG, next_C in zip(*chunks, strict=True):
            q_logits_CD = F.linear(student_CH, self.student.lm_head.weight).float()
            p_logits_CV = F.linear(teacher_CG, self.teacher.lm_head.weight).float()
            q_CD, p_CV = ((x / self.temperature).softmax(-1) for x in (q_logits_CD, p_logits_CV))
            p_CD, labels_C = p_CV if len(ids_D) == V else p_CV[:, ids_D], indices_V[next_C]
            drafted_C = ids_D[q_logits_CD.argmax(-1)]
            if self.greedy:
                found.append((drafted_C == next_C).float())
            else:
                p_next_C = p_CV.gather(1, next_C[:, None])[:, 0]
                q_next_C = q_CD.gather(1, labels_C.clamp_min(0)[:, None])[:, 0]
                likely_C = (q_next_C / p_next_C.clamp_min(_TINY)).clamp_max(1.0)
                found.append(torch.where(labels_C >= 0, likely_C, 0.0))
            sums = (
                torch.minimum(p_CD, q_CD).sum(),
                (p_logits_CV.argmax(-1) == drafted_C).sum(),
                F.cross_entropy(q_logits_CD, labels_C, reduction="sum", ignore_index=-1),
                p_CD.sum(),
                (labels_C >= 0).sum(),
                torch.tensor(len(next_C), device=next_C.device),
            )
            totals += torch.stack(sums).double().cpu()
        return totals, torch.cat(found) if found else next_N.new_zeros(0, dtype=torch.float32)


def score_mixture(
    answers: HeldOutAcceptance, domains: Mapping[str, HeldOutAcceptance]
) -> dict[str, float]:
    """Score the student on the target's answers and on each domain's held-out text.

    Returns the figures of `answers` and of `score_domains`.
    """
    return answers() | score_domains(domains)


def score_domains(domains: Mapping[str, HeldOutAcceptance]) -> dict[str, float]:
    """Score the student on each domain's held-out text.

    On such text, which the target did not write, acceptance is the mean of sum_v min(p, q) over all
    supervised tokens. Returns acceptance/NAME and loss/NAME (nats per token that the student
    drafts) of each domain, and worst_domain_acceptance.
    """
    sums = {name: held_out.totals() for name, held_out in domains.items()}
    figures: dict[str, float] = {}
    for name, of in sums.items():
        figures |= {
            f"acceptance/{name}": of.acceptance,
            f"loss/{name}": of.loss / max(1, of.drafted),
        }
    return figures | {"worst_domain_acceptance": min(of.acceptance for of in sums.values())}
