"""Figures that show how close a text is to the target's own.

On text of another author a drafter learns from states that never occur in drafting. The target's
mean log-probability of the tokens, and the share of them that are its argmax, show the distance.

Shapes: N supervised tokens, H and G widths of student and teacher.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from decoding.models.draft_vocabulary import token_ids
from training.data.packing import Sample, collate
from training.losses.chunked import chunked_cross_entropy
from training.losses.family import chunked_forward_kl
from training.objectives import hidden_states


@dataclass(frozen=True)
class TextFigures:
    """Means over the supervised tokens of a text, at temperature 1."""

    # log-probability that the target gives to the token, in nats
    log_prob: float
    # share of the tokens that are the target's argmax
    argmax: float
    # KL(target || student), in nats; with a draft vocabulary as in the loss
    kl: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.log_prob:.2f} nats, {self.argmax:.0%} argmax, KL {self.kl:.2f}"

    def values(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)


@torch.no_grad()
def measure_text(
    samples: Sequence[Sample],
    rows: Sequence[Sequence[int]],
    capacity: int,
    student: Any,
    teacher: Any,
    most_tokens: int,
) -> TextFigures:
    """Measure evenly spaced rows with about `most_tokens` tokens, at least one of them.

    A sharded teacher needs all ranks to call it. The student must hold its full weights.
    """
    count = max(1, most_tokens // capacity)
    chosen = rows[:: -(-len(rows) // count)]
    device, ids_V = next(student.parameters()).device, token_ids(student)
    totals, tokens = torch.zeros(3, dtype=torch.float64), 0
    for row in chosen:
        batch = collate(samples, [row], capacity, device)
        teacher_NG = batch.at_supervised(hidden_states(teacher, batch))
        student_NH = batch.at_supervised(hidden_states(student, batch))
        labels_N = batch.at_supervised(batch.next_RT)
        loss, correct = chunked_cross_entropy(teacher_NG, teacher.lm_head.weight, labels_N)
        weights = (student.lm_head.weight, teacher_NG, teacher.lm_head.weight)
        kl, _ = chunked_forward_kl(student_NH, *weights, shortlist_V=ids_V)
        totals += torch.stack([-loss, correct[0], kl]).double().cpu()
        tokens += batch.supervised
    log_prob, argmax, kl_mean = (totals / max(1, tokens)).tolist()
    return TextFigures(log_prob, argmax, kl_mean, tokens)
