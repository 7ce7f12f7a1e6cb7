"""One run's measurement: sweep, choose, measure, under every condition, kept on disk unit by unit.

What the run folder holds already is not measured again, so a run that was interrupted goes on with the next unit.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from decoding.errors import UserError
from eval.benchmarks import spread
from eval.config import EvalConfig
from eval.lengths import longest, swept
from eval.measure import decodings, measure_unit, units_of
from eval.parts import UNITS_A_SLICE, Slice, append_slices, frozen_costs, read_slices, time_slice
from eval.prediction import predicted_speedup
from eval.records import Arm, Condition, Record, append_records, record_from, stalled, write_records
from eval.rows import pool_of
from eval.setup import Loaded, conditions, middle_prompt, warm_up, widths
from training.data import Prompt
from training.drafters import ALONE
from training.progress import ProgressBar
from training.run_files import read_lines

ATTEMPTS = 3  # at a unit during which the machine stands still
Group = tuple[int, list[Prompt]]  # the number of a unit and its prompts


class Session:
    """Records and part times of a run folder, and how to get those that it lacks."""

    def __init__(self, cfg: EvalConfig, loaded: Loaded, folder: Path) -> None:
        self.cfg, self.loaded = cfg, loaded
        self.records_file, self.slices_file = folder / "records.jsonl", folder / "parts.jsonl"
        self._costs_file = folder / "costs.json"
        found = read_lines(self.records_file, record_from)
        found.report(self.records_file, "its unit is measured again")
        self.records: list[Record] = found.records
        self.slices: list[Slice] = read_slices(self.slices_file)
        # Whole lines again, should some be torn or damaged.
        write_records(self.records_file, self.records)
        self.slices_file.unlink(missing_ok=True)
        append_slices(self.slices_file, self.slices)
        self._prompt = middle_prompt(loaded.bench)

    def measure(self) -> None:
        """Measure everything that is missing."""
        bench, cfg = self.loaded.bench, self.cfg
        total = sum(generations(cfg, self.loaded).values())
        deepest = {name: longest(facts, cfg) for name, facts in self.loaded.facts.items()}
        print(
            "eval: timing the steps that drafters weigh, and warming up", file=sys.stderr
        )  # minutes, with many drafters
        frozen_costs(bench, conditions(cfg), self._prompt, deepest, self._costs_file)
        warm_up(self.loaded, self.cfg)
        with ProgressBar("eval", total) as bar:
            progress = _Progress(bar)
            for condition in conditions(self.cfg):
                sweep, main = split(self.cfg, self.loaded, condition)
                arms = [Arm(name, gamma) for name, facts in self.loaded.facts.items() for gamma in swept(facts, cfg)]
                self._measure_units(condition, "sweep", sweep, arms, progress)
                self._measure_units(condition, "main", main, self._chosen_arms(condition), progress)

    def _measure_units(
        self, condition: Condition, part: str, units: Sequence[Group], arms: Sequence[Arm], progress: _Progress
    ) -> None:
        for index, (unit, prompts) in enumerate(units):
            place = (condition, part, unit)
            have = [record for record in self.records if (record.condition, record.part, record.unit) == place]
            if _complete(have, [*self.loaded.bench.baselines(condition), *arms]):
                progress.skip(decodings(self.loaded.bench, condition, prompts, len(arms)))
                continue
            # A unit that a killed run wrote in part is measured again as a whole: its pairs must be neighbours in time.
            if have:
                self.records = [record for record in self.records if record not in have]
                write_records(self.records_file, self.records)
            if index % UNITS_A_SLICE == 0:
                self._time_parts(condition, part)
            before = [record for record in self.records if (record.condition, record.part) == place[:2]]
            for attempt in range(1, ATTEMPTS + 1):
                new = measure_unit(self.loaded.bench, condition, part, unit, prompts, arms, progress.done)
                new = [dataclasses.replace(record, attempt=attempt) for record in new]
                if attempt == ATTEMPTS or not stalled(new, before):
                    break
                progress.skip(-decodings(self.loaded.bench, condition, prompts, len(arms)))
            self.records += new
            append_records(self.records_file, new)
        # Damage may have taken all that were timed.
        if units and not self._timed(condition, part):
            self._time_parts(condition, part)

    def _timed(self, condition: Condition, part: str) -> bool:
        """Whether the run folder holds a slice of every drafter."""
        place = (part, *dataclasses.astuple(condition))
        timed = {one.drafter for one in self.slices if (one.part, one.temperature, one.batch_size) == place}
        return timed >= self.loaded.bench.drafters.keys()

    def _time_parts(self, condition: Condition, part: str) -> None:
        bench, repeats = self.loaded.bench, self.cfg.timing_repeats
        new = time_slice(bench, condition, part, self._prompt, widths(self.cfg, self.loaded), repeats)
        self.slices += new
        append_slices(self.slices_file, new)

    def _chosen_arms(self, condition: Condition) -> list[Arm]:
        """The arms of the main part: every drafter at its draft lengths, found by its rule (eval/lengths.py)."""
        facts = self.loaded.facts
        names = drafting(self.loaded)
        arms = [Arm(name, 0) for name in facts if name not in names]
        return arms + [Arm(name, gamma) for name in names for gamma in self._lengths(name, condition)]

    def _lengths(self, name: str, condition: Condition) -> list[int]:
        rule, own_cap = self.loaded.facts[name].length_rule, self.loaded.facts[name].own_cap
        if own_cap is not None:
            return [own_cap]
        if rule == "given":
            return self.cfg.num_draft_tokens
        if rule == "own":
            return [max(self.cfg.sweep)]
        return [self._fastest(name, condition) if rule == "fastest" else self._promising(name, condition)]

    def _promising(self, name: str, condition: Condition) -> int:
        """The draft length with the highest speedup by the formula, from what the sweep measured."""
        facts = self.loaded.facts[name]
        pool = pool_of(name, condition, "sweep", facts, self.slices, self.records, self.cfg.max_new_tokens)
        speedups = {gamma: predicted_speedup(pool.pass_rates, gamma, pool.costs) for gamma in self.cfg.sweep}
        return max(speedups, key=lambda gamma: speedups[gamma])

    def _fastest(self, name: str, condition: Condition) -> int:
        """The draft length with the most tokens a second in the sweep."""
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
    """The drafters that draft: all but those that are run as models of their own."""
    return [name for name, facts in loaded.facts.items() if facts.schedule != ALONE]


def prompts_by_part(cfg: EvalConfig, loaded: Loaded) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts of the sweep, prompts of the main part)."""
    benchmark, count = loaded.bench.benchmark, cfg.sweep_prompts if cfg.sweep else 0
    if benchmark.elsewhere:
        return spread(benchmark.elsewhere, count)[0], benchmark.prompts
    return spread(benchmark.prompts, count)


def split(cfg: EvalConfig, loaded: Loaded, condition: Condition) -> tuple[list[Group], list[Group]]:
    """(units of the sweep, units of the main part). Raises UserError when one of them has no prompt."""
    for_sweep, for_main = prompts_by_part(cfg, loaded)
    sweep = units_of(for_sweep, condition.batch_size, 0)
    main = units_of(for_main, condition.batch_size, len(sweep))
    if not main or (cfg.sweep and cfg.sweep_prompts and not sweep):
        raise UserError(
            f"{len(for_sweep) + len(for_main)} prompts are too few: {len(for_sweep)} go to the sweep over gamma, and "
            f"each part needs at least one batch of {condition.batch_size}. Lower sweep_prompts or batch_sizes, "
            "raise max_prompts, give the sweep a file of its own (benchmark.sweep_path), or leave it out and say the draft length "
            "(sweep=[] num_draft_tokens=[4])."
        )
    return sweep, main


def generations(cfg: EvalConfig, loaded: Loaded) -> dict[Condition, int]:
    """Batches decoded under each condition, for the progress bar and the dry run."""
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
    """Tokens that the run emits at most."""
    batches = generations(cfg, loaded)
    return cfg.max_new_tokens * sum(count * condition.batch_size for condition, count in batches.items())


class _Progress:
    """Feeds the bar between generations, outside the clocks."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self.count, self.tokens, self.seconds = 0, 0, 0.0

    def skip(self, generations: int) -> None:
        """Count generations that an earlier run measured; a negative number takes back those that are measured again."""
        self.count += generations
        self.bar.update(self.count, "already measured" if generations > 0 else "the machine stalled: once more")

    def done(self, arm: Arm, tokens: int, seconds: float) -> None:
        self.count, self.tokens, self.seconds = self.count + 1, self.tokens + tokens, self.seconds + seconds
        self.bar.update(self.count, f"{self.tokens / self.seconds:.0f} tokens/s, {arm.drafter}")
