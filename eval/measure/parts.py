"""Costs of the parts of a round, timed in slices between the generations that they explain.

The speed of a machine varies over minutes, so part times from the start of a run explain little. A
slice times each part a few times before every few units; a row takes the medians over the slices of
its condition. The draft length is chosen from the slices of the sweep alone. They are in the run
folder before the main part starts, so a resumed run chooses the same length.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from decoding.costs.contention import UNDISTURBED, with_share
from decoding.costs.measure import bind_cores, measure_costs, widths_to_time
from decoding.costs.timing import Parts, time_parts
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.schedules.by_name import WALL, decides_by_cost
from eval.measure.measurement import Bench
from eval.measure.records import Arm, Condition
from eval.statistics.schema import PartTimes
from jobs.aliases import current_costs
from jobs.files import write_text
from jobs.run_files import read_journal_lines, read_object

UNITS_A_SLICE = 4  # about a tenth of a run goes into timing
WARM_UP = 1
# Timings of a part while other processes use the processors: their number, and the seconds after
# which none begins.
ATTEMPTS, ATTEMPT_SECONDS = 3, 3.0
MOST_REPEATS = 4  # largest factor on the repeats of a target that several drafters share
COST_WINDOWS, COST_REPEATS, COST_TOKENS = 7, 5, 32


@dataclass(frozen=True)
class Slice:
    """Part times of one drafter, measured between two units."""

    part: str  # sweep | main: the part of the run in which it was timed
    temperature: float
    batch_size: int
    drafter: str
    t_draft_ms: float
    t_target_ms: dict[int, float]
    context: int
    # whether the target ran on the same cores as without this drafter
    shared: bool = True
    # beams that a step starts from -> its time; empty: all steps take t_draft_ms
    t_draft_by_beams_ms: dict[int, float] = dataclasses.field(default_factory=dict)
    # share of the time in which the timing had its processors
    cpu_share: float = 1.0

    @property
    def condition(self) -> Condition:
        return Condition(self.temperature, self.batch_size)


def time_slice(
    bench: Bench,
    condition: Condition,
    part: str,
    prompt: Sequence[int],
    widths: Iterable[int],
    repeats: int,
) -> list[Slice]:
    """Time every drafter's step, and the target's forwards over each of the widths (new tokens).

    The caches hold the prompt and half of max_new_tokens. repeats: timings of each part. The target
    is timed once for all drafters that share it, with more repeats if there are several. Every
    drafter is timed in the same way, alternating with a target step, so that one model under two
    names has the same cost. While other processes use the processors, a part is timed up to
    ATTEMPTS times, and the least disturbed timing counts.
    """
    timing: dict[str, Any] = {
        "context": len(prompt) + bench.settings.max_new_tokens // 2,
        "batch_size": condition.batch_size,
        "warmup": WARM_UP,
    }
    slices: list[Slice] = []
    sharing = sum(use.schedule not in WALL for use in bench.uses.values())
    for name, drafter in bench.drafters.items():
        shared = bench.uses[name].schedule not in WALL
        often = repeats * min(sharing, MOST_REPEATS) if shared else repeats
        with bind_cores(bench.target, drafter, bench.uses[name].schedule):
            share, step = _time_undisturbed(
                bench.target, drafter, prompt, widths=(1,), repeats=repeats, **timing
            )
            target = step
            if not shared or not any(one.shared for one in slices):
                target_share, target = _time_undisturbed(
                    bench.target, None, prompt, widths=widths, repeats=often, **timing
                )
                share = min(share, target_share)
        assert step.t_draft_ms is not None, "a drafter was timed"
        slices.append(
            Slice(
                *(part, condition.temperature, condition.batch_size, name),
                step.t_draft_ms,
                target.t_target_ms,
                step.context,
                shared,
                step.t_draft_by_frontier_ms,
                share,
            )
        )
    return slices


def _time_undisturbed(
    target: Target, drafter: Drafter | None, prompt: Sequence[int], **timing: Any
) -> tuple[float, Parts]:
    """Return the least disturbed of up to ATTEMPTS timings, after the share of it that was not."""

    def timed() -> tuple[float, Parts]:
        return with_share(target, drafter, lambda: time_parts(target, drafter, prompt, **timing))

    began, found = perf_counter(), [timed()]
    while found[-1][0] < UNDISTURBED and len(found) < ATTEMPTS:
        if perf_counter() - began > ATTEMPT_SECONDS:
            break
        found.append(timed())
    return max(found, key=lambda pair: pair[0])


def freeze_costs(
    bench: Bench,
    conditions: Sequence[Condition],
    prompt: Sequence[int],
    deepest: Mapping[str, int],
    path: Path,
    seconds: float = math.inf,
) -> None:
    """Fill bench.costs from the file `path`, after measuring missing costs and writing them to it.

    So a resumed run makes the same decisions. deepest: the longest draft of each drafter. seconds:
    limit on all measurements together. Raises UserError for a damaged file.
    """
    weighing = [
        name
        for name, use in bench.uses.items()
        if decides_by_cost(
            bench.drafters[name].capabilities, use.schedule, use.stopping, bench.target
        )
    ]
    measured: dict[str, RoundCosts] = {}
    if path.is_file():
        measured = read_object(path, "Delete it: the costs are measured again", _costs_of)
    for condition in conditions:
        for name in weighing:
            drafter = bench.drafters[name]
            key = f"{name}, {condition.label}"
            if key not in measured:
                measured[key] = measure_costs(
                    bench.target,
                    drafter,
                    prompt,
                    bench.settings_at(condition, Arm(name, bench.settings.num_draft_tokens)),
                    widths=widths_to_time(drafter, deepest[name]),
                    context=len(prompt) + bench.settings.max_new_tokens // 2,
                    batch_size=condition.batch_size,
                    windows=COST_WINDOWS,
                    repeats=COST_REPEATS,
                    tokens=COST_TOKENS,
                    seconds=seconds / (len(conditions) * len(weighing)),
                )
                values = {name: dataclasses.asdict(costs) for name, costs in measured.items()}
                write_text(path, json.dumps(values, indent=1))
                if why := measured[key].unreliable:
                    print(f"eval: the costs of {key} are unreliable: {why}", file=sys.stderr)
            bench.costs[name, condition] = measured[key]


def _costs_of(values: dict[str, Any]) -> dict[str, RoundCosts]:
    return {key: RoundCosts.read(current_costs(costs)) for key, costs in values.items()}


def median_parts(
    slices: Sequence[Slice], drafter: str, condition: Condition, part: str
) -> PartTimes:
    """Return a drafter's median part times over the slices of a part of the run.

    The draft step is timed in this drafter's slices, the target in the slices of all drafters that
    share it. Raises ValueError if this drafter has no slice under this condition.
    """
    here = [s for s in slices if (s.part, s.condition) == (part, condition)]
    mine = [s for s in here if s.drafter == drafter]
    if not mine:
        raise ValueError(f"{drafter} was not timed at {condition.label}")
    timed = [s for s in here if s.shared] if mine[0].shared else mine
    target = [s.t_target_ms for s in timed]
    widths = sorted({n for times in target for n in times})
    t_target_ms = {n: median(times[n] for times in target if n in times) for n in widths}
    beams = mine[0].t_draft_by_beams_ms
    by_beams = {n: median(s.t_draft_by_beams_ms[n] for s in mine) for n in beams}
    share = min(median(s.cpu_share for s in some) for some in (mine, timed))
    return PartTimes(
        median(s.t_draft_ms for s in mine), t_target_ms, mine[0].context, by_beams, share
    )


def slice_from(values: dict[str, Any]) -> Slice:
    """Return the slice that a line of parts.jsonl holds.

    Raises TypeError, ValueError or AttributeError for invalid values.
    """
    for key in ("t_target_ms", "t_draft_by_beams_ms"):  # JSON has no integer keys
        values[key] = {int(n): milliseconds for n, milliseconds in values.get(key, {}).items()}
    return Slice(**values)


def read_slices(path: Path) -> list[Slice]:
    """Read the slices of a run; torn lines (of a killed run) and damaged ones are skipped."""
    lines = read_journal_lines(path, slice_from)
    lines.report(path, "its parts are timed again where no others are left")
    return lines.records
