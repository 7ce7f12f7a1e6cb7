"""The probability mass that two models give the tokens that their vocabularies share.

It is measured on the target's own text. Every token of a text counts once, with all of its
distribution at temperature 1.

Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from decoding.drafters.other_vocabulary import OtherVocabulary
from decoding.drafters.translation import Translation
from decoding.drafters.with_lookup import LookupFirst
from decoding.interfaces import Target
from decoding.models.prefill import prefill
from eval.measure.benchmarks import render_turns
from eval.measure.measurement import Bench
from eval.measure.records import BASELINE, Record
from eval.statistics.schema import Row

TEXTS = 8  # on which it is measured

Text = tuple[Sequence[int], Sequence[int]]  # a prompt, and the target's answer


@dataclass(frozen=True)
class Coverage:
    """The tokens that a target and a drafter share, and their share of both models' mass."""

    shared_tokens: int
    target_tokens: int
    drafter_tokens: int
    target_mass: float  # mean probability of the shared tokens under the target
    drafter_mass: float  # under the drafter

    def __str__(self) -> str:
        """Describe the coverage in a sentence."""
        return (
            f"{self.shared_tokens:,} tokens are shared, of {self.target_tokens:,} of the target "
            f"and {self.drafter_tokens:,} of the drafter; on the target's text they have "
            f"{100 * self.target_mass:.1f} % of the target's probability and "
            f"{100 * self.drafter_mass:.1f} % of the drafter's"
        )


@torch.inference_mode()
def measure_coverage(target: Target, drafter: OtherVocabulary, texts: Sequence[Text]) -> Coverage:
    """Return the coverage on texts, each with at least one token in prompt and answer.

    It overwrites the caches of both models. Raises ValueError without a text.
    """
    if not texts:
        raise ValueError("coverage is measured on texts, found none. Pass at least one.")
    both = drafter.vocabularies
    masses: list[tuple[float, int]] = []
    own: list[tuple[float, int]] = []
    for prompt, answer in texts:
        masses.append(_mass(target, [*prompt, *answer], len(prompt), both.target_ids_N))
        before, all_of_it = (
            Translation(both).of(text) for text in (list(prompt), [*prompt, *answer])
        )
        all_of_it = all_of_it[: drafter.model.max_length]
        start = max(1, min(len(before), len(all_of_it) - 1))
        if start < len(all_of_it):
            own.append(_mass(drafter.model, all_of_it, start, both.drafter_ids_N))
    return Coverage(
        len(both.target_ids_N),
        target.vocab_size,
        drafter.model.vocab_size,
        _mean(masses),
        _mean(own),
    )


def with_coverage(rows: Sequence[Row], bench: Bench, records: Sequence[Record]) -> list[Row]:
    """Return the rows; those of drafters with another vocabulary have the coverage.

    It is measured on TEXTS of the baseline's texts, after all decoding.
    """
    inner = {
        name: drafter.drafter if isinstance(drafter, LookupFirst) else drafter
        for name, drafter in bench.drafters.items()
    }
    found = {
        name: measure_coverage(bench.target, drafter, texts)
        for name, drafter in inner.items()
        if isinstance(drafter, OtherVocabulary) and (texts := _texts(bench, records))
    }
    return [
        replace(
            row,
            shared_target_mass=found[row.drafter].target_mass,
            shared_drafter_mass=found[row.drafter].drafter_mass,
        )
        if row.drafter in found
        else row
        for row in rows
    ]


def _texts(bench: Bench, records: Sequence[Record]) -> list[Text]:
    """Return the first turns of the baseline's texts, with their prompts."""
    benchmark = bench.benchmark
    prompts = {prompt.id: prompt for prompt in benchmark.prompts}
    firsts = {
        record.prompt_id: record.tokens
        for record in records
        if record.drafter == BASELINE.drafter and not record.turn and record.tokens
    }
    texts: list[Text] = []
    for each, tokens in firsts.items():
        if each in prompts and len(texts) < TEXTS:
            turns, template = prompts[each].turns[:1], benchmark.chat_template
            texts.append(
                (render_turns(turns, [], bench.tokenizer, benchmark.render, template), tokens)
            )
    return texts


def _mass(model: Target, text: Sequence[int], start: int, ids_N: list[int]) -> tuple[float, int]:
    """Return the sum of the mass of some tokens at the text's places from `start`, and the count.

    start: at least 1.
    """
    model.open(1, len(text))
    prefill(model, [list(text[: start - 1])])
    rest_1N = torch.tensor([list(text[start - 1 : -1])], device=model.device)
    logits_NV = model.forward(rest_1N)[0][0].float()
    mass_N = logits_NV.softmax(-1)[:, torch.tensor(ids_N, device=model.device)].sum(-1)
    return float(mass_N.sum()), len(mass_N)


def _mean(sums: Sequence[tuple[float, int]]) -> float:
    count = sum(n for _, n in sums)
    return sum(mass for mass, _ in sums) / count if count else float("nan")
