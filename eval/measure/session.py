"""Measurement of a run: sweep, choice of draft lengths and main part, saved unit by unit.

Units that the run folder holds are not measured again, so an interrupted run continues with the
next one. Under a bound in seconds (max_seconds) the conditions alternate, prompt by prompt in a
shuffled order, until no other prompt fits (see eval.measure.deadline).
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from decoding.costs.prediction import predicted_speedup
from decoding.errors import UserError
from eval.config import EvalConfig
from eval.measure.benchmarks import spread
from eval.measure.deadline import LEAST, Deadline
from eval.measure.lengths import longest_draft, sweep_lengths
from eval.measure.measurement import Task, measure_unit, units_of
from eval.measure.parts import (
    UNITS_A_SLICE,
    Slice,
    freeze_costs,
    read_slices,
    time_slice,
)
from eval.measure.progress import EvalProgress
from eval.measure.records import (
    Arm,
    Condition,
    Record,
    append_lines,
    record_from,
    write_records,
)
from eval.measure.repetition import Repetition
from eval.measure.rounds import FILE as ROUNDS
from eval.measure.rounds import RoundsFile, unit_of
from eval.measure.setup import Loaded, conditions, median_prompt, warm_up, widths
from eval.measure.shards import Shard
from eval.statistics.rows import pool_of
from jobs.drafter_use import ALONE
from jobs.progress import ProgressBar
from jobs.run_files import read_journal_lines
from training.data.readers import Prompt

PARTS = {"sweep": "sweep of draft lengths", "main": "main part"}  # as the progress names them


class Session:
    """Records and part times of a run folder, and the measurement of missing ones."""

    def __init__(
        self,
        cfg: EvalConfig,
        loaded: Loaded,
        folder: Path,
        deadline: Deadline,
        shard: Shard | None = None,
    ) -> None:
        """Read the records and part times of a run folder. shard: the share to measure."""
        self.cfg, self.loaded, self.deadline, self.shard = cfg, loaded, deadline, shard
        self.records_file, self.slices_file = folder / "records.jsonl", folder / "parts.jsonl"
        self._costs_file = folder / "costs.json"
        found = read_journal_lines(self.records_file, record_from)
        found.report(self.records_file, "its unit is measured again")
        self.records: list[Record] = found.records
        self._rounds = RoundsFile(folder / ROUNDS)
        self._drop_units_without_rounds()
        self.slices: list[Slice] = read_slices(self.slices_file)
        # Rewrite both files without torn and damaged lines.
        write_records(self.records_file, self.records)
        self.slices_file.unlink(missing_ok=True)
        append_lines(self.slices_file, self.slices)
        self._prompt = median_prompt(loaded.bench)
        self._repetition = Repetition(loaded.bench, deadline)
        self.overrun_seconds = 0.0  # see Row.overrun_seconds; set by `measure`
        self._known_arms: dict[tuple[Condition, str], list[Arm]] = {}

    def measure(self) -> None:
        """Measure the units that the run folder lacks, as many as fit into max_seconds."""
        bench, cfg = self.loaded.bench, self.cfg
        total = sum(generations(cfg, self.loaded, self.shard).values())
        deepest = {name: longest_draft(facts, cfg) for name, facts in self.loaded.facts.items()}
        seconds = self.deadline.costs_seconds
        print(
            f"eval: measuring the costs that rules use for {seconds:.0f} s, longer with many "
            f"drafters, and warming up",
            file=sys.stderr,
        )
        freeze_costs(bench, conditions(cfg), self._prompt, deepest, self._costs_file, seconds)
        warm_up(self.loaded, self.cfg)
        bounds = self.deadline.bounds
        with ProgressBar("eval", 100 if bounds else total, percent=bounds) as bar:
            progress = EvalProgress(bar, total, self._minimum(), self.deadline)
            measured = dict.fromkeys(("sweep", "main"), 0)
            for tasks in self._blocks():
                part = tasks[0].part
                missing = [task for task in tasks if not self._records_of(task)]
                # A block that was begun is finished: all conditions have the same prompts.
                if len(missing) == len(tasks) and not self.deadline.has_room(part, measured[part]):
                    continue
                progress.in_minimum = measured[part] < LEAST[part]
                began = self.deadline.seconds
                for task in tasks:
                    self._measure_unit(task, progress)
                measured[part] += 1
                if missing and self.deadline.bounds:
                    self.deadline.count(part, self.deadline.seconds - began)
            self.overrun_seconds = self.deadline.overrun_seconds(measured["main"])
            prompts = measured["main"] * max(cfg.batch_sizes)
            progress.end(prompts, self.overrun_seconds)

    def _minimum(self) -> int:
        """Return the number of batches of the blocks that are decoded even beyond the bound."""
        arms, left = _arm_counts(self.cfg, self.loaded), dict(LEAST)
        total = 0
        for tasks in self._blocks():
            part = tasks[0].part
            left[part] -= 1
            if left[part] >= 0:
                total += sum(self.loaded.bench.decodings(task, arms[part]) for task in tasks)
        return total

    def _blocks(self) -> list[list[Task]]:
        """Return the blocks of tasks that this process measures."""
        everything, shard = blocks(self.cfg, self.loaded), self.shard
        if shard is None:
            return everything
        mine = [[task for task in tasks if shard.holds(task)] for tasks in everything]
        return [tasks for tasks in mine if tasks]

    def _arms(self, condition: Condition, part: str) -> list[Arm]:
        """Return the arms of a part besides the baselines; the main part needs a finished sweep."""
        place = (condition, part)
        if place not in self._known_arms:
            self._known_arms[place] = [
                Arm(name, gamma)
                for name, facts in self.loaded.facts.items()
                for gamma in (
                    sweep_lengths(facts, self.cfg)
                    if part == "sweep"
                    else self._lengths(name, condition)
                )
            ]
        return self._known_arms[place]

    def _records_of(self, task: Task) -> list[Record]:
        place = (task.condition, task.part, task.unit)
        return [r for r in self.records if (r.condition, r.part, r.unit) == place]

    def _measure_unit(self, task: Task, progress: EvalProgress) -> None:
        bench, condition, part = self.loaded.bench, task.condition, task.part
        arms, have = self._arms(condition, part), self._records_of(task)
        progress.part = PARTS[part]
        decodings = bench.decodings(task, len(arms))
        if _complete(have, [*bench.baselines(condition), *arms]):
            # All slices of the part may have been lost to damage.
            if not self._timed(condition, part):
                self._time_parts(condition, part)
            progress.end_unit(decodings)
            return
        # All of a partly written unit is measured again: its pairs must be neighbours in time.
        if have:
            self.records = [record for record in self.records if record not in have]
            write_records(self.records_file, self.records)
            self._rounds.keep(set(map(unit_of, self.records)))
        shared = self.shard.count if self.shard and part == "main" else 1
        if task.index // shared % UNITS_A_SLICE == 0:
            self._time_parts(condition, part)
        before = [r for r in self.records if (r.condition, r.part) == (condition, part)]
        new = self._repetition.measure(
            lambda: measure_unit(bench, task, arms, progress.done),
            before,
            again=progress.again,
        )
        progress.end_unit(decodings)
        self._rounds.append(new)
        new = [dataclasses.replace(one, by_round=()) for one in new]
        self.records += new
        append_lines(self.records_file, new)

    def _drop_units_without_rounds(self) -> None:
        """Drop records of this process's part whose rounds are damaged, and rounds of no record."""
        mine = [one for one in self.records if self.shard is None or one.part == self.shard.part]
        if lacking := self._rounds.lacking(mine):
            print(f"{self._rounds.path} lacks rounds of {len(lacking)} units: measured again")
            self.records = [one for one in self.records if unit_of(one) not in lacking]
        self._rounds.keep(set(map(unit_of, self.records)))

    def _timed(self, condition: Condition, part: str) -> bool:
        """Return whether the run folder holds a slice of every drafter."""
        here = (one for one in self.slices if (one.part, one.condition) == (part, condition))
        return {one.drafter for one in here} >= self.loaded.bench.drafters.keys()

    def _time_parts(self, condition: Condition, part: str) -> None:
        bench, repeats = self.loaded.bench, self.cfg.timing_repeats
        timed = widths(self.cfg, self.loaded)
        new = time_slice(bench, condition, part, self._prompt, timed, repeats)
        self.slices += new
        append_lines(self.slices_file, new)

    def _lengths(self, name: str, condition: Condition) -> list[int]:
        """Return a drafter's draft lengths in the main part, as its rule sets them."""
        facts = self.loaded.facts[name]
        if facts.length_cap is not None:
            return [facts.length_cap]
        if facts.length_rule == "given":
            return self.cfg.num_draft_tokens
        if facts.length_rule == "own":
            return [max(self.cfg.sweep)]
        if facts.length_rule == "none":
            return [0]
        fastest = facts.length_rule == "fastest"
        speeds = (self._measured if fastest else self._predicted)(name, condition)
        return [max(speeds, key=lambda gamma: speeds[gamma])]

    def _predicted(self, name: str, condition: Condition) -> dict[int, float]:
        """Return draft length -> the speedup predicted from the sweep."""
        facts, limit = self.loaded.facts[name], self.cfg.max_new_tokens
        pool = pool_of(name, condition, "sweep", facts, self.slices, self.records, limit)
        return {
            gamma: predicted_speedup(pool.pass_rates, gamma, pool.costs) for gamma in self.cfg.sweep
        }

    def _measured(self, name: str, condition: Condition) -> dict[int, float]:
        """Return draft length -> tokens/s in the sweep."""
        tokens: dict[int, int] = defaultdict(int)
        seconds: dict[int, float] = defaultdict(float)
        for record in self.records:
            if (record.part, record.condition, record.drafter) == ("sweep", condition, name):
                tokens[record.num_draft_tokens] += len(record.tokens)
                seconds[record.num_draft_tokens] += record.decode_seconds
        return {gamma: tokens[gamma] / seconds[gamma] for gamma in tokens}


def _complete(have: Sequence[Record], arms: Sequence[Arm]) -> bool:
    counts = [sum(record.arm == arm for record in have) for arm in arms]
    return min(counts) > 0 and len(set(counts)) == 1


def drafter_names(loaded: Loaded) -> list[str]:
    """Return the names of the drafters that draft, without those that decode alone."""
    return [name for name, facts in loaded.facts.items() if facts.schedule != ALONE]


def prompts_by_part(cfg: EvalConfig, loaded: Loaded) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts of the sweep and of the main part, in the order of the file.

    With cfg.max_seconds both are shuffled by cfg.seed, as time decides how many of them run.
    """
    benchmark, count = loaded.bench.benchmark, cfg.sweep_prompts if cfg.sweep else 0
    for_sweep, for_main = spread(benchmark.for_sweep or benchmark.prompts, count)
    for_main = benchmark.prompts if benchmark.for_sweep else for_main
    if not cfg.max_seconds:
        return for_sweep, for_main
    order = random.Random(cfg.seed)
    return order.sample(for_sweep, len(for_sweep)), order.sample(for_main, len(for_main))


def tasks_of(cfg: EvalConfig, loaded: Loaded, condition: Condition) -> dict[str, list[Task]]:
    """Return the tasks of each part, `sweep` and `main`, under a condition.

    Raises UserError if a part has too few prompts for a batch.
    """
    for_sweep, for_main = prompts_by_part(cfg, loaded)
    sweep = units_of(for_sweep, condition.batch_size, 0)
    main = units_of(for_main, condition.batch_size, len(sweep))
    if not main or (cfg.sweep and cfg.sweep_prompts and not sweep):
        raise UserError(
            f"{len(for_sweep) + len(for_main)} prompts are too few: {len(for_sweep)} go to the "
            f"sweep over gamma, and each part needs at least one batch of {condition.batch_size}. "
            f"Lower sweep_prompts or batch_sizes, raise max_prompts, set a separate file for the "
            f"sweep (benchmark.sweep_path), or set the draft length instead (sweep=[] "
            f"num_draft_tokens=[4])."
        )
    return {
        part: [Task(condition, part, index, *unit) for index, unit in enumerate(units)]
        for part, units in (("sweep", sweep), ("main", main))
    }


def blocks(cfg: EvalConfig, loaded: Loaded) -> list[list[Task]]:
    """Return blocks of tasks that are measured together, in the order of measurement.

    Without max_seconds, a block is the sweep or the main part of one condition, and the conditions
    follow each other. With it, the sweeps of all conditions come first, then their main parts, and
    a block holds the tasks of all conditions for as many prompts as the largest batch has.
    """
    found: dict[tuple[int, int], list[Task]] = defaultdict(list)
    largest = max(cfg.batch_sizes)
    for number, condition in enumerate(conditions(cfg)):
        for place, tasks in enumerate(tasks_of(cfg, loaded, condition).values()):
            for task in tasks:
                block = task.index * condition.batch_size // largest
                found[(place, block) if cfg.max_seconds else (number, place)].append(task)
    return [found[order] for order in sorted(found)]


def generations(
    cfg: EvalConfig, loaded: Loaded, shard: Shard | None = None
) -> dict[Condition, int]:
    """Return the maximum number of batches to decode under each condition.

    shard: count its share alone. Raises UserError if a part has too few prompts for a batch.
    """
    arms = _arm_counts(cfg, loaded)
    return {
        condition: sum(
            loaded.bench.decodings(task, arms[part])
            for part, tasks in tasks_of(cfg, loaded, condition).items()
            for task in tasks
            if shard is None or shard.holds(task)
        )
        for condition in conditions(cfg)
    }


def _arm_counts(cfg: EvalConfig, loaded: Loaded) -> dict[str, int]:
    """Return the number of arms of each part besides the baselines."""
    everyone, given = loaded.facts.values(), len(cfg.num_draft_tokens)
    return {
        "sweep": sum(len(sweep_lengths(facts, cfg)) for facts in everyone),
        "main": sum(given if facts.length_rule == "given" else 1 for facts in everyone),
    }


def max_tokens(cfg: EvalConfig, loaded: Loaded) -> int:
    """Return the maximum number of tokens that the run can emit."""
    batches = generations(cfg, loaded)
    rows = sum(count * condition.batch_size for condition, count in batches.items())
    return cfg.max_new_tokens * rows
