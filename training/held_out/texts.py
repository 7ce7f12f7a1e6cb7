"""How close the training data is to the target's own text, measured before the first step.

On text of another author a drafter learns from states that never occur in drafting. The target's
mean log-probability of the tokens, and the share of them that are its likeliest, show the distance.

Shapes: N supervised tokens, H and G widths of student and teacher.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from decoding.models.draft_vocabulary import token_ids
from training.data.packing import PackedData, Sample, best_fit, collate
from training.losses.chunked import chunked_cross_entropy
from training.losses.family import chunked_forward_kl
from training.objectives import hidden_states

MOST_TOKENS = 8192  # of each text that are measured


class Text(NamedTuple):
    """Samples, and the indices of those in each packed row."""

    samples: Sequence[Sample]
    rows: Sequence[Sequence[int]]


@dataclass(frozen=True)
class TextFigures:
    """Means over the supervised tokens of a text, at temperature 1."""

    # log-probability that the target gives to the token, in nats
    log_prob: float
    # share of the tokens that are the target's argmax
    argmax: float
    # KL(target || student), in nats, with a draft vocabulary as in the loss; None without a student
    kl: float | None
    tokens: int

    def values(self) -> dict[str, float]:
        """Return the figures by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def sample_rows(
    rows: Sequence[Sequence[int]], capacity: int, most_tokens: int
) -> Sequence[Sequence[int]]:
    """Return evenly spaced rows of `capacity` tokens with about `most_tokens`, at least one row."""
    count = max(1, most_tokens // capacity)
    return rows[:: max(1, -(-len(rows) // count))]


@torch.no_grad()
def measure_text(
    text: Text, capacity: int, target: Any, student: Any = None, most_tokens: int = MOST_TOKENS
) -> TextFigures:
    """Measure evenly spaced rows with about `most_tokens` tokens, at least one of them.

    A sharded target needs all ranks to call it. The student, if there is one, must hold its full
    weights.
    """
    samples, rows = text
    device = next((target if student is None else student).parameters()).device
    target_VG = target.get_output_embeddings().weight
    totals, tokens = torch.zeros(3, dtype=torch.float64), 0
    for row in sample_rows(rows, capacity, most_tokens):
        batch = collate(samples, [row], capacity, device)
        target_NG = batch.at_supervised(hidden_states(target, batch))
        loss, correct = chunked_cross_entropy(
            target_NG, target_VG, batch.at_supervised(batch.next_RT)
        )
        kl = torch.zeros_like(loss)
        if student is not None:
            student_NH = batch.at_supervised(hidden_states(student, batch))
            weights = (student.lm_head.weight, target_NG, target_VG)
            kl, _ = chunked_forward_kl(student_NH, *weights, shortlist_V=token_ids(student))
        totals += torch.stack([-loss, correct[0], kl]).double().cpu()
        tokens += batch.supervised
    log_prob, argmax, kl_mean = (totals / max(1, tokens)).tolist()
    return TextFigures(log_prob, argmax, None if student is None else kl_mean, tokens)


def measure_texts(
    data: PackedData, answers: Sequence[Sample], target: Any, student: Any = None
) -> dict[str, TextFigures]:
    """Measure the training data and the target's answers, by name. All ranks must call it.

    answers: the target's answers to the held-out prompts.
    """
    of_target = Text(answers, best_fit([len(one.ids) for one in answers], data.capacity))
    texts = {"data": Text(data.samples, data.rows), "target": of_target}
    return {
        name: measure_text(text, data.capacity, target, student) for name, text in texts.items()
    }


def describe_texts(found: Mapping[str, TextFigures], temperatures: Mapping[str, float]) -> str:
    """Return a table of the texts, and how to read it.

    temperatures: those at which the target and the student wrote their texts.
    """
    titles = {"data": "training data"}
    for name, temperature in temperatures.items():
        how = f"temperature {temperature:g}" if temperature else "greedy"
        titles[name] = f"the {name}'s answers, {how}"
    with_kl = any(figures.kl is not None for figures in found.values())
    heads = ["likeliest token", "log-probability", *(["KL to the student"] if with_kl else [])]
    width = max(map(len, titles.values()))
    lines = [
        "texts: how likely the target finds their tokens. The nearer the training data is to the",
        "target's answers, the more a drafter learns from it: distill.regenerate lets the target",
        "answer the data's prompts.",
        f"  {'':{width}}  {'  '.join(heads)}",
    ]
    for name, figures in found.items():
        cells = [f"{figures.argmax:.0%}", f"{figures.log_prob:.2f} nats"]
        if figures.kl is not None:
            cells.append(f"{figures.kl:.2f} nats")
        shown = "  ".join(f"{cell:>{len(head)}}" for cell, head in zip(cells, heads, strict=True))
        lines.append(f"  {titles[name]:{width}}  {shown}")
    return "\n".join(lines)
