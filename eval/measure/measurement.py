"""Measurement of a unit: the baseline and every drafter decode each prompt in turn.

Interleaving keeps drafter and baseline within seconds of each other, so that a machine that slows
down slows both. The order rotates from unit to unit. Nothing but decoding happens between two clock
readings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.rounds.ties import choice_scores, first_difference, top_two_gap
from eval.measure.benchmarks import Benchmark, render_turns
from eval.measure.cpu_contention import UndisturbedClock
from eval.measure.records import BASELINE, COUPLED, Arm, Condition, Record
from eval.statistics.lossless import is_compared
from jobs.drafter_use import ALONE, DrafterUse
from training.data.readers import Prompt

# What a generation says of itself, and its record keeps.
COUNTS = tuple(
    {field.name for field in fields(Generation)} & {field.name for field in fields(Record)}
)


@dataclass(frozen=True)
class Bench:
    """Models, prompts and settings that stay the same over a run."""

    target: Target
    drafters: dict[str, Drafter]
    tokenizer: Any
    benchmark: Benchmark
    settings: Settings
    verify: str  # the rule where temperature > 0, of the baseline and of drafters that name none
    uses: dict[str, DrafterUse]  # how the loop uses each drafter
    samples: int = 1  # generations of a prompt where temperature > 0
    repeats: int = 1  # times that each is run; the fastest counts
    # of a drafter, frozen first
    costs: dict[tuple[str, Condition], RoundCosts] = field(default_factory=dict)

    def settings_at(self, condition: Condition, arm: Arm) -> Settings:
        """Return the run's settings for one arm under one condition."""
        return dataclasses.replace(
            self.settings,
            temperature=condition.temperature,
            num_draft_tokens=arm.num_draft_tokens,
            verify=self.rule_of(arm),
            **self.uses.get(arm.drafter, DrafterUse()).settings,
            costs=self.costs.get((arm.drafter, condition)),
        )

    def decode(
        self,
        condition: Condition,
        arm: Arm,
        prompts_ids: Sequence[list[int]],
        request_ids: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Decode prompts with one arm."""
        target, drafter = self.target, self.drafters.get(arm.drafter)
        if self.is_alone(arm):
            assert isinstance(drafter, ChainDrafter), "jobs.drafters makes sure of it"
            target, drafter = drafter.model, None
        return decode(
            target, drafter, prompts_ids, self.settings_at(condition, arm), request_ids=request_ids
        )

    def is_alone(self, arm: Arm) -> bool:
        """Return whether the arm is another model than the target."""
        return self.uses.get(arm.drafter, DrafterUse()).schedule == ALONE

    def rule_of(self, arm: Arm) -> str:
        """Return the rule by which an arm decodes where temperature > 0."""
        return (
            "coupled"
            if arm == COUPLED
            else self.uses.get(arm.drafter, DrafterUse()).verify or self.verify
        )

    def baselines(self, condition: Condition) -> list[Arm]:
        """Return the baselines of a condition: autoregressive, and a coupled one where needed.

        Speedups are over the first. The coupled one is added if only some drafters are coupled,
        since their text must equal it.
        """
        some = self.verify != "coupled" and any(
            use.verify == "coupled" for use in self.uses.values()
        )
        return [BASELINE, COUPLED] if some and condition.temperature > 0 else [BASELINE]

    def reference(self, condition: Condition, arm: Arm) -> Arm:
        """Return the baseline whose text the arm's output must equal."""
        return self.baselines(condition)[-1] if self.rule_of(arm) == "coupled" else BASELINE


def units_of(
    prompts: Sequence[Prompt], batch_size: int, first: int
) -> list[tuple[int, list[Prompt]]]:
    """Return (unit number, prompts) pairs; prompts that do not fill a batch are left out."""
    whole = len(prompts) // batch_size
    return [
        (first + index, list(prompts[index * batch_size : (index + 1) * batch_size]))
        for index in range(whole)
    ]


def rotate(arms: Sequence[Arm], by: int) -> list[Arm]:
    """Return the arms in an order that starts at another one for each unit."""
    shift = by % len(arms)
    return [*arms[shift:], *arms[:shift]]


def measure_unit(
    bench: Bench,
    condition: Condition,
    part: str,
    unit: int,
    prompts: Sequence[Prompt],
    arms: Sequence[Arm],
    done: Callable[[Arm, int, float], None],
) -> list[Record]:
    """Decode one unit with every arm, turn by turn, and compare outputs with the baseline's.

    In later turns the history holds the baseline's answers for all arms. done(arm, tokens, seconds)
    is called after every generation, between the clock readings.
    """
    records: list[Record] = []
    for sample in range(samples_at(bench, condition)):
        records += _measure_sample(bench, condition, part, unit, sample, prompts, arms, done)
    return records


def samples_at(bench: Bench, condition: Condition) -> int:
    """Return the number of generations of a prompt; one if greedy, as all would be equal."""
    return bench.samples if condition.temperature > 0 else 1


def runs_at(bench: Bench, condition: Condition) -> int:
    """Return how many times an arm decodes a prompt, repeats included."""
    return samples_at(bench, condition) * bench.repeats


def decodings(bench: Bench, condition: Condition, prompts: Sequence[Prompt], arms: int) -> int:
    """Return the most batches that a unit decodes with the baselines and a number of arms.

    There are fewer if a later turn does not fit into the context.
    """
    return runs_at(bench, condition) * _turns(prompts) * (len(bench.baselines(condition)) + arms)


def _turns(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.turns) for prompt in prompts)


def _measure_sample(
    bench: Bench,
    condition: Condition,
    part: str,
    unit: int,
    sample: int,
    prompts: Sequence[Prompt],
    arms: Sequence[Arm],
    done: Callable[[Arm, int, float], None],
) -> list[Record]:
    answers: dict[str, list[str]] = {prompt.id: [] for prompt in prompts}
    records: list[Record] = []
    for turn in range(_turns(prompts)):
        present, prompts_ids = _turn(bench, prompts, turn, answers)
        if not present:
            break
        outputs: dict[Arm, list[Generation]] = {}
        busy: dict[Arm, float] = {}
        differing: dict[Arm, list[Generation]] = {}
        requests = [_request(sample, unit, turn, row) for row in range(len(present))]
        for again in range(bench.repeats):
            for arm in rotate([*bench.baselines(condition), *arms], unit + turn + sample + again):
                watch = UndisturbedClock(torch.get_num_threads())
                rows = bench.decode(condition, arm, prompts_ids, requests)
                spent = watch.seconds()
                done(
                    arm,
                    sum(len(row.tokens) for row in rows),
                    rows[0].prefill_seconds + _seconds(rows),
                )
                if arm not in outputs or _faster(rows, outputs[arm]):
                    outputs[arm], busy[arm] = rows, spent
                elif _texts(rows) != _texts(outputs[arm]) and is_compared(
                    condition.temperature, bench.rule_of(arm)
                ):
                    differing[arm] = rows
        # An arm that says two things is wrong in one of them: that one is kept, and told.
        for arm, rows in differing.items():
            if _texts(outputs[arm]) == _texts(outputs[bench.reference(condition, arm)]):
                outputs[arm] = rows
        records += _records(
            bench, condition, part, unit, sample, turn, present, prompts_ids, outputs, busy
        )
        for prompt, row in zip(present, outputs[BASELINE], strict=True):
            answers[prompt.id].append(bench.tokenizer.decode(row.tokens, skip_special_tokens=True))
    return records


def _seconds(rows: Sequence[Generation]) -> float:
    return max(row.decode_seconds for row in rows)


def _texts(rows: Sequence[Generation]) -> list[list[int]]:
    return [row.tokens for row in rows]


def _faster(rows: Sequence[Generation], before: Sequence[Generation]) -> bool:
    """Return whether the same text took less time; another text is no better measurement of it."""
    return _texts(rows) == _texts(before) and _seconds(rows) < _seconds(before)


def _request(sample: int, unit: int, turn: int, row: int) -> int:
    """Return a unique number for each generation of a run; all arms share it as the noise key."""
    return ((sample * 1_000_000 + unit) * 1_000 + turn) * 1_000 + row


def _turn(
    bench: Bench, prompts: Sequence[Prompt], turn: int, answers: dict[str, list[str]]
) -> tuple[list[Prompt], list[list[int]]]:
    """Return the prompts that have this turn, and their token ids.

    A conversation ends at the turn that no longer fits into the context.
    """
    present, ids = [], []
    for prompt in prompts:
        if turn < len(prompt.turns) and len(answers[prompt.id]) == turn:
            rendered = render_turns(
                prompt.turns[: turn + 1],
                answers[prompt.id],
                bench.tokenizer,
                bench.benchmark.render,
                bench.benchmark.chat_template,
            )
            if len(rendered) + bench.settings.max_new_tokens <= bench.target.max_length:
                present.append(prompt)
                ids.append(rendered)
    return present, ids


def _records(
    bench: Bench,
    condition: Condition,
    part: str,
    unit: int,
    sample: int,
    turn: int,
    present: Sequence[Prompt],
    prompts_ids: Sequence[list[int]],
    outputs: dict[Arm, list[Generation]],
    busy: dict[Arm, float],
) -> list[Record]:
    """Return a record for each row of each arm, compared with the row that it must equal."""
    records = []
    for arm, rows in outputs.items():
        for number, (row, base, prompt, ids) in enumerate(
            zip(rows, outputs[bench.reference(condition, arm)], present, prompts_ids, strict=True)
        ):
            request = _request(sample, unit, turn, number)
            differs_at, gap = _difference(bench, condition, arm, row, base, ids, request)
            records.append(
                Record(
                    part=part,
                    temperature=condition.temperature,
                    batch_size=condition.batch_size,
                    drafter=arm.drafter,
                    num_draft_tokens=arm.num_draft_tokens,
                    unit=unit,
                    prompt_id=prompt.id,
                    category=prompt.category,
                    turn=turn,
                    prompt_tokens=len(ids),
                    sample=sample,
                    cpu_seconds=busy[arm],
                    differs_at=differs_at,
                    gap=gap,
                    draft_beams=row.draft_frontiers,
                    **{name: vars(row)[name] for name in COUNTS},
                )
            )
    return records


def _difference(
    bench: Bench,
    condition: Condition,
    arm: Arm,
    row: Generation,
    base: Generation,
    ids: list[int],
    request: int,
) -> tuple[int | None, float | None]:
    """Return the first token that differs from the baseline's, and the score gap there.

    The gap is between the target's two best tokens. (None, None) if equal or not compared.
    """
    if bench.is_alone(arm) or not is_compared(condition.temperature, bench.rule_of(arm)):
        return None, None
    at = first_difference(row.tokens, base.tokens)
    if at is None:
        return None, None
    before = [*ids, *base.tokens[:at]]
    return at, top_two_gap(
        choice_scores(bench.target, before, bench.settings_at(condition, arm), request)
    )
