"""Measurement of a unit: the baseline and every drafter decode each prompt in turn.

Interleaving keeps drafter and baseline within seconds of each other, so a slower machine slows
both. The order rotates from unit to unit. Nothing but decoding happens between two clock
readings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from decoding.costs.contention import UndisturbedClock
from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.rounds.ties import choice_scores, first_difference, top_two_gap
from eval.measure.benchmarks import Benchmark, render_turns
from eval.measure.records import BASELINE, COUPLED, Arm, Condition, Record
from eval.statistics.lossless import is_compared
from jobs.drafter_use import ALONE, DrafterUse
from training.data.readers import Prompt

_Arm = TypeVar("_Arm")
# Fields of a generation that its record keeps.
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
    repeats: int = 1  # runs of each generation; the fastest counts
    # costs that a drafter's stopping rule uses, measured before the run
    costs: dict[tuple[str, Condition], RoundCosts] = field(default_factory=dict)

    def settings_at(self, condition: Condition, arm: Arm) -> Settings:
        """Return the run's settings for one arm under one condition."""
        return dataclasses.replace(
            self.settings,
            temperature=condition.temperature,
            num_draft_tokens=arm.num_draft_tokens,
            verify=self.rule_of(arm),
            **self.use_of(arm).settings,
            costs=self.costs.get((arm.drafter, condition)),
        )

    def use_of(self, arm: Arm) -> DrafterUse:
        """Return the loop options of an arm, the default ones of a baseline."""
        return self.uses.get(arm.drafter, DrafterUse())

    def decode(
        self,
        condition: Condition,
        arm: Arm,
        prompts_ids: Sequence[list[int]],
        request_ids: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Decode prompts as one batch with one arm; request_ids are the noise keys of its rows."""
        target, drafter = self.target, self.drafters.get(arm.drafter)
        if self.is_alone(arm):
            assert isinstance(drafter, ChainDrafter), "jobs.drafters checks it"
            target, drafter = drafter.model, None
        settings = self.settings_at(condition, arm)
        return decode(target, drafter, prompts_ids, settings, request_ids=request_ids)

    def is_alone(self, arm: Arm) -> bool:
        """Return whether the arm is a drafter's model that decodes in place of the target."""
        return self.use_of(arm).schedule == ALONE

    def rule_of(self, arm: Arm) -> str:
        """Return an arm's verification rule at temperatures above 0."""
        return "coupled" if arm == COUPLED else self.use_of(arm).verify or self.verify

    def baselines(self, condition: Condition) -> list[Arm]:
        """Return the baselines of a condition: autoregressive, and a coupled one where needed.

        Speedups are over the first. The coupled one is added at temperatures above 0 if only some
        drafters are coupled, since their text must equal the coupled baseline's.
        """
        some = any(use.verify == "coupled" for use in self.uses.values())
        needed = some and self.verify != "coupled" and condition.temperature > 0
        return [BASELINE, COUPLED] if needed else [BASELINE]

    def reference(self, condition: Condition, arm: Arm) -> Arm:
        """Return the baseline whose text the arm's output must equal."""
        return self.baselines(condition)[-1] if self.rule_of(arm) == "coupled" else BASELINE

    def samples_at(self, condition: Condition) -> int:
        """Return the number of generations of a prompt; one if greedy, as all would be equal."""
        return self.samples if condition.temperature > 0 else 1

    def decodings(self, task: Task, arms: int) -> int:
        """Return the maximum number of batches that a task decodes with `arms` drafters.

        There are fewer if a later turn does not fit into the context.
        """
        sides = len(self.baselines(task.condition)) + arms
        return self.samples_at(task.condition) * self.repeats * task.turns * sides


@dataclass(frozen=True)
class Task:
    """Unit to measure under one condition."""

    condition: Condition
    part: str  # sweep | main
    index: int  # in its part
    unit: int  # its number in the run
    prompts: Sequence[Prompt]

    @property
    def turns(self) -> int:
        return max(len(prompt.turns) for prompt in self.prompts)


def units_of(
    prompts: Sequence[Prompt], batch_size: int, first: int
) -> list[tuple[int, list[Prompt]]]:
    """Return (unit number, prompts) pairs, counted from `first`; drop an incomplete last batch."""
    starts = range(0, len(prompts) - batch_size + 1, batch_size)
    return [
        (first + index, list(prompts[start : start + batch_size]))
        for index, start in enumerate(starts)
    ]


def rotate(arms: Sequence[_Arm], by: int) -> list[_Arm]:
    """Return the arms in rotated order, from the one with the index `by`."""
    shift = by % len(arms)
    return [*arms[shift:], *arms[:shift]]


def measure_unit(
    bench: Bench, task: Task, arms: Sequence[Arm], done: Callable[[Arm, int, float], None]
) -> list[Record]:
    """Decode one unit with every arm, turn by turn, and compare outputs with the baseline's.

    In later turns the history holds the baseline's answers for all arms. done(arm, tokens, seconds)
    is called after every decoded batch, while no clock runs.
    """
    records: list[Record] = []
    for sample in range(bench.samples_at(task.condition)):
        answers: dict[str, list[str]] = {prompt.id: [] for prompt in task.prompts}
        for number in range(task.turns):
            present, prompts_ids = render_turn(bench, task.prompts, number, answers)
            if not present:
                break
            turn = _Turn(bench, task, sample, number, present, prompts_ids)
            turn.decode(arms, done)
            records += turn.records()
            for prompt, row in zip(present, turn.outputs[BASELINE], strict=True):
                answer = bench.tokenizer.decode(row.tokens, skip_special_tokens=True)
                answers[prompt.id].append(answer)
    return records


def render_turn(
    bench: Bench, prompts: Sequence[Prompt], turn: int, answers: dict[str, list[str]]
) -> tuple[list[Prompt], list[list[int]]]:
    """Return the prompts that have this turn, and their token ids.

    A conversation ends at the turn that no longer fits into the context.
    """
    present, ids = [], []
    render = (bench.tokenizer, bench.benchmark.render, bench.benchmark.chat_template)
    for prompt in prompts:
        if turn < len(prompt.turns) and len(answers[prompt.id]) == turn:
            rendered = render_turns(prompt.turns[: turn + 1], answers[prompt.id], *render)
            if len(rendered) + bench.settings.max_new_tokens <= bench.target.max_length:
                present.append(prompt)
                ids.append(rendered)
    return present, ids


@dataclass
class _Turn:
    """One turn of a unit's prompts, decoded by all arms."""

    bench: Bench
    task: Task
    sample: int
    number: int
    prompts: list[Prompt]
    prompts_ids: list[list[int]]
    outputs: dict[Arm, list[Generation]] = field(default_factory=dict)
    cpu_seconds: dict[Arm, float] = field(default_factory=dict)

    def request(self, row: int) -> int:
        """Return a number unique to each generation of a run: the noise key that all arms share."""
        return ((self.sample * 1_000_000 + self.task.unit) * 1_000 + self.number) * 1_000 + row

    def decode(self, arms: Sequence[Arm], done: Callable[[Arm, int, float], None]) -> None:
        """Decode with the baselines and all arms; keep the fastest of the repeats."""
        bench, condition = self.bench, self.task.condition
        everyone = [*bench.baselines(condition), *arms]
        requests = [self.request(row) for row in range(len(self.prompts))]
        differing: dict[Arm, list[Generation]] = {}
        for again in range(bench.repeats):
            for arm in rotate(everyone, self.task.unit + self.number + self.sample + again):
                watch = UndisturbedClock(torch.get_num_threads())
                rows = bench.decode(condition, arm, self.prompts_ids, requests)
                spent = watch.seconds()
                seconds = rows[0].prefill_seconds + _seconds(rows)
                done(arm, sum(len(row.tokens) for row in rows), seconds)
                before = self.outputs.get(arm)
                if before is None or _faster(rows, before):
                    self.outputs[arm], self.cpu_seconds[arm] = rows, spent
                elif _texts(rows) != _texts(before) and self._is_compared(arm):
                    differing[arm] = rows
        # An arm with two different outputs has a wrong one: keep and report that one.
        for arm, rows in differing.items():
            if _texts(self.outputs[arm]) == _texts(self._reference(arm)):
                self.outputs[arm] = rows

    def _is_compared(self, arm: Arm) -> bool:
        return is_compared(self.task.condition.temperature, self.bench.rule_of(arm))

    def _reference(self, arm: Arm) -> list[Generation]:
        return self.outputs[self.bench.reference(self.task.condition, arm)]

    def records(self) -> list[Record]:
        """Return a record for each row of each arm, compared with the row that it must equal."""
        records = []
        for arm, rows in self.outputs.items():
            for index, (row, base) in enumerate(zip(rows, self._reference(arm), strict=True)):
                differs_at, gap = self._difference(arm, index, row, base)
                records.append(
                    Record(
                        part=self.task.part,
                        temperature=self.task.condition.temperature,
                        batch_size=self.task.condition.batch_size,
                        drafter=arm.drafter,
                        num_draft_tokens=arm.num_draft_tokens,
                        unit=self.task.unit,
                        prompt_id=self.prompts[index].id,
                        category=self.prompts[index].category,
                        turn=self.number,
                        prompt_tokens=len(self.prompts_ids[index]),
                        sample=self.sample,
                        cpu_seconds=self.cpu_seconds[arm],
                        differs_at=differs_at,
                        gap=gap,
                        draft_beams=row.draft_frontiers,
                        by_round=row.by_round,
                        **{name: vars(row)[name] for name in COUNTS},
                    )
                )
        return records

    def _difference(
        self, arm: Arm, index: int, row: Generation, base: Generation
    ) -> tuple[int | None, float | None]:
        """Return the index of the first token that differs from the baseline's, and the gap there.

        The gap is the score difference of the target's two best tokens. Returns (None, None) if the
        texts are equal or not compared.
        """
        bench = self.bench
        at = first_difference(row.tokens, base.tokens)
        if bench.is_alone(arm) or not self._is_compared(arm) or at is None:
            return None, None
        before = [*self.prompts_ids[index], *base.tokens[:at]]
        settings = bench.settings_at(self.task.condition, arm)
        return at, top_two_gap(choice_scores(bench.target, before, settings, self.request(index)))


def _seconds(rows: Sequence[Generation]) -> float:
    return max(row.decode_seconds for row in rows)


def _texts(rows: Sequence[Generation]) -> list[list[int]]:
    return [row.tokens for row in rows]


def _faster(rows: Sequence[Generation], before: Sequence[Generation]) -> bool:
    """Return whether `rows` hold the same texts as `before`, decoded in less time."""
    return _texts(rows) == _texts(before) and _seconds(rows) < _seconds(before)
