"""Measurement of a run: sweep, choice of lengths and main part, saved unit by unit.

What the run folder already holds is not measured again, so an interrupted run continues with the
next unit. Under a bound in seconds (max_seconds) the conditions alternate, prompt by prompt in a
shuffled order, until no other prompt fits (eval/measure/deadline.py).
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decoding.errors import UserError
from eval.config import EvalConfig
from eval.measure.benchmarks import spread
from eval.measure.deadline import Deadline
from eval.measure.lengths import longest, swept
from eval.measure.measurement import decodings, measure_unit, units_of
from eval.measure.parts import (
    UNITS_A_SLICE,
    Slice,
    append_slices,
    frozen_costs,
    read_slices,
    time_slice,
)
from eval.measure.records import (
    Arm,
    Condition,
    Record,
    append_records,
    record_from,
    stalled,
    write_records,
)
from eval.measure.setup import Loaded, conditions, middle_prompt, warm_up, widths
from eval.statistics.prediction import predicted_speedup
from eval.statistics.rows import pool_of
from jobs.drafter_use import ALONE
from jobs.progress import ProgressBar
from jobs.run_files import read_journal_lines
from training.data.readers import Prompt

ATTEMPTS = 3  # at a unit during which the machine stands still
Group = tuple[int, list[Prompt]]  # the number of a unit and its prompts


@dataclass(frozen=True)
class Task:
    """Unit to measure under one condition."""

    condition: Condition
    part: str  # sweep | main
    index: int  # in its part
    unit: int
    prompts: list[Prompt]


class Session:
    """Records and part times of a run folder, and the measurement of missing ones."""

    def __init__(self, cfg: EvalConfig, loaded: Loaded, folder: Path, deadline: Deadline) -> None:
        self.cfg, self.loaded, self.deadline = cfg, loaded, deadline
        self.records_file, self.slices_file = folder / "records.jsonl", folder / "parts.jsonl"
        self._costs_file = folder / "costs.json"
        found = read_journal_lines(self.records_file, record_from)
        found.report(self.records_file, "its unit is measured again")
        self.records: list[Record] = found.records
        self.slices: list[Slice] = read_slices(self.slices_file)
        # Whole lines again, should some be torn or damaged.
        write_records(self.records_file, self.records)
        self.slices_file.unlink(missing_ok=True)
        append_slices(self.slices_file, self.slices)
        self._prompt = middle_prompt(loaded.bench)
        self._known_arms: dict[tuple[Condition, str], list[Arm]] = {}

    def measure(self) -> None:
        """Measure everything that is missing."""
        bench, cfg = self.loaded.bench, self.cfg
        total = sum(generations(cfg, self.loaded).values())
        deepest = {name: longest(facts, cfg) for name, facts in self.loaded.facts.items()}
        # minutes, with many drafters
        print("eval: timing the steps that drafters weigh, and warming up", file=sys.stderr)
        seconds = self.deadline.costs_seconds
        frozen_costs(bench, conditions(cfg), self._prompt, deepest, self._costs_file, seconds)
        warm_up(self.loaded, self.cfg)
        with ProgressBar("eval", total) as bar:
            progress = _Progress(bar, total, self.deadline)
            measured = dict.fromkeys(("sweep", "main"), 0)
            for tasks in blocks(cfg, self.loaded):
                part, missing = (
                    tasks[0].part,
                    [task for task in tasks if not self._records_of(task)],
                )
                # A block that was begun is finished: all conditions have the same prompts.
                if len(missing) == len(tasks) and not self.deadline.has_room(part, measured[part]):
                    continue
                began = self.deadline.seconds
                for task in tasks:
                    self._measure_unit(task, progress)
                measured[part] += 1
                if missing and self.deadline.bounds:
                    self.deadline.count(part, self.deadline.seconds - began)
            progress.end()

    def _arms(self, condition: Condition, part: str) -> list[Arm]:
        """Return the arms of a part besides the baselines; the main part needs a finished sweep."""
        place = (condition, part)
        if place not in self._known_arms:
            everyone = self.loaded.facts.items()
            swept_arms = [
                Arm(name, gamma) for name, facts in everyone for gamma in swept(facts, self.cfg)
            ]
            self._known_arms[place] = (
                swept_arms if part == "sweep" else self._chosen_arms(condition)
            )
        return self._known_arms[place]

    def _records_of(self, task: Task) -> list[Record]:
        place = (task.condition, task.part, task.unit)
        return [
            record
            for record in self.records
            if (record.condition, record.part, record.unit) == place
        ]

    def _measure_unit(self, task: Task, progress: _Progress) -> None:
        bench, condition, part = self.loaded.bench, task.condition, task.part
        arms, have = self._arms(condition, part), self._records_of(task)
        if _complete(have, [*bench.baselines(condition), *arms]):
            # Damage may have taken all that were timed.
            if not self._timed(condition, part):
                self._time_parts(condition, part)
            progress.skip(decodings(bench, condition, task.prompts, len(arms)))
            return
        # A unit that a killed run wrote in part is measured again as a whole: its pairs must be
        # neighbours in time.
        if have:
            self.records = [record for record in self.records if record not in have]
            write_records(self.records_file, self.records)
        if task.index % UNITS_A_SLICE == 0:
            self._time_parts(condition, part)
        before = [
            record
            for record in self.records
            if (record.condition, record.part) == (condition, part)
        ]
        for attempt in range(1, ATTEMPTS + 1):
            new = measure_unit(bench, condition, part, task.unit, task.prompts, arms, progress.done)
            new = [dataclasses.replace(record, attempt=attempt) for record in new]
            if attempt == ATTEMPTS or not stalled(new, before):
                break
            progress.skip(-decodings(bench, condition, task.prompts, len(arms)))
        self.records += new
        append_records(self.records_file, new)

    def _timed(self, condition: Condition, part: str) -> bool:
        """Return whether the run folder holds a slice of every drafter."""
        place = (part, *dataclasses.astuple(condition))
        timed = {
            one.drafter
            for one in self.slices
            if (one.part, one.temperature, one.batch_size) == place
        }
        return timed >= self.loaded.bench.drafters.keys()

    def _time_parts(self, condition: Condition, part: str) -> None:
        bench, repeats = self.loaded.bench, self.cfg.timing_repeats
        new = time_slice(
            bench, condition, part, self._prompt, widths(self.cfg, self.loaded), repeats
        )
        self.slices += new
        append_slices(self.slices_file, new)

    def _chosen_arms(self, condition: Condition) -> list[Arm]:
        """Return the arms of the main part: each drafter at the lengths set by its rule."""
        facts = self.loaded.facts
        names = drafting(self.loaded)
        arms = [Arm(name, 0) for name in facts if name not in names]
        return arms + [
            Arm(name, gamma) for name in names for gamma in self._lengths(name, condition)
        ]

    def _lengths(self, name: str, condition: Condition) -> list[int]:
        rule, own_cap = self.loaded.facts[name].length_rule, self.loaded.facts[name].own_cap
        if own_cap is not None:
            return [own_cap]
        if rule == "given":
            return self.cfg.num_draft_tokens
        if rule == "own":
            return [max(self.cfg.sweep)]
        return [
            self._fastest(name, condition)
            if rule == "fastest"
            else self._promising(name, condition)
        ]

    def _promising(self, name: str, condition: Condition) -> int:
        """Return the draft length with the highest speedup predicted from the sweep."""
        facts = self.loaded.facts[name]
        pool = pool_of(
            name, condition, "sweep", facts, self.slices, self.records, self.cfg.max_new_tokens
        )
        speedups = {
            gamma: predicted_speedup(pool.pass_rates, gamma, pool.costs) for gamma in self.cfg.sweep
        }
        return max(speedups, key=lambda gamma: speedups[gamma])

    def _fastest(self, name: str, condition: Condition) -> int:
        """Return the draft length with the most tokens/s in the sweep."""
        tokens: dict[int, int] = defaultdict(int)
        seconds: dict[int, float] = defaultdict(float)
        for record in self.records:
            if (record.part, record.condition, record.drafter) == ("sweep", condition, name):
                tokens[record.num_draft_tokens] += len(record.tokens)
                seconds[record.num_draft_tokens] += record.decode_seconds
        return max(tokens, key=lambda gamma: tokens[gamma] / seconds[gamma])


def _complete(have: Sequence[Record], arms: Sequence[Arm]) -> bool:
    counts = {arm: sum(record.arm == arm for record in have) for arm in arms}
    return min(counts.values()) > 0 and len(set(counts.values())) == 1


def drafting(loaded: Loaded) -> list[str]:
    """Return the names of the drafters that draft, without those that decode alone."""
    return [name for name, facts in loaded.facts.items() if facts.schedule != ALONE]


def prompts_by_part(cfg: EvalConfig, loaded: Loaded) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts of the sweep and those of the main part, in the order of the file.

    They are shuffled by cfg.seed if time decides how many of them run.
    """
    benchmark, count = loaded.bench.benchmark, cfg.sweep_prompts if cfg.sweep else 0
    for_sweep, for_main = spread(benchmark.elsewhere or benchmark.prompts, count)
    for_main = benchmark.prompts if benchmark.elsewhere else for_main
    if not cfg.max_seconds:
        return for_sweep, for_main
    order = random.Random(cfg.seed)
    return order.sample(for_sweep, len(for_sweep)), order.sample(for_main, len(for_main))


def split(cfg: EvalConfig, loaded: Loaded, condition: Condition) -> tuple[list[Group], list[Group]]:
    """Return the units of the sweep and those of the main part.

    Raises UserError if one of them has no prompt.
    """
    for_sweep, for_main = prompts_by_part(cfg, loaded)
    sweep = units_of(for_sweep, condition.batch_size, 0)
    main = units_of(for_main, condition.batch_size, len(sweep))
    if not main or (cfg.sweep and cfg.sweep_prompts and not sweep):
        raise UserError(
            f"{len(for_sweep) + len(for_main)} prompts are too few: {len(for_sweep)} go to the "
            f"sweep over gamma, and each part needs at least one batch of {condition.batch_size}. "
            f"Lower sweep_prompts or batch_sizes, raise max_prompts, give the sweep a file of its "
            f"own (benchmark.sweep_path), or leave it out and say the draft length (sweep=[] "
            f"num_draft_tokens=[4])."
        )
    return sweep, main


def blocks(cfg: EvalConfig, loaded: Loaded) -> list[list[Task]]:
    """Return all units, grouped by what is measured together, in the order of measuring.

    Without a bound in seconds: the sweep and the main part of each condition in turn. With one: the
    sweep of all conditions, then their main part, in blocks of as many prompts as the largest batch
    has.
    """
    found: dict[tuple[int, int], list[Task]] = defaultdict(list)
    largest = max(cfg.batch_sizes)
    for number, condition in enumerate(conditions(cfg)):
        for place, (part, units) in enumerate(
            zip(("sweep", "main"), split(cfg, loaded, condition), strict=True)
        ):
            for index, (unit, prompts) in enumerate(units):
                order = (
                    (place, index * condition.batch_size // largest)
                    if cfg.max_seconds
                    else (number, place)
                )
                found[order].append(Task(condition, part, index, unit, prompts))
    return [found[order] for order in sorted(found)]


def generations(cfg: EvalConfig, loaded: Loaded) -> dict[Condition, int]:
    """Return the number of batches decoded under each condition."""
    everyone, given = loaded.facts.values(), len(cfg.num_draft_tokens)
    arms = (
        sum(len(swept(facts, cfg)) for facts in everyone),
        sum(given if facts.length_rule == "given" else 1 for facts in everyone),
    )
    return {
        condition: sum(
            decodings(loaded.bench, condition, prompts, count)
            for units, count in zip(split(cfg, loaded, condition), arms, strict=True)
            for _, prompts in units
        )
        for condition in conditions(cfg)
    }


def most_tokens(cfg: EvalConfig, loaded: Loaded) -> int:
    """Return the most tokens that the run can emit."""
    batches = generations(cfg, loaded)
    return cfg.max_new_tokens * sum(
        count * condition.batch_size for condition, count in batches.items()
    )


class _Progress:
    """Progress bar that is updated between generations, outside the clock readings."""

    def __init__(self, bar: ProgressBar, total: int, deadline: Deadline) -> None:
        self.bar, self.total, self.deadline = bar, total, deadline
        self.count, self.tokens, self.seconds = 0, 0, 0.0

    def skip(self, generations: int) -> None:
        """Count generations measured by an earlier run; a negative number takes counts back."""
        self.count += generations
        self._update("already measured" if generations > 0 else "the machine stalled: once more")

    def done(self, arm: Arm, tokens: int, seconds: float) -> None:
        self.count, self.tokens, self.seconds = (
            self.count + 1,
            self.tokens + tokens,
            self.seconds + seconds,
        )
        self._update(f"{self.tokens / self.seconds:.0f} tokens/s, {arm.drafter}")

    def end(self) -> None:
        """Show the final count if not all generations were measured."""
        if self.count < self.total:
            self.bar.update(
                self.count, f"as many as fit into {self.deadline.max_seconds:g} s", self.count
            )

    def _update(self, note: str) -> None:
        total = self.total
        if self.deadline.bounds and (spent := self.deadline.seconds):
            total = min(
                total, max(self.count + 1, int(self.count * self.deadline.max_seconds / spent))
            )
        self.bar.update(self.count, note, total)
