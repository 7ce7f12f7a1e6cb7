"""Panels: entries of several evaluations whose speedups may be compared, ranked.

Runs measured at different times are not compared by speed but by speedup, the ratio to the baseline
interleaved in the same run. Setting (target, machine, threads, dtype and backend) and workload must
be the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from decoding.costs.prediction import Costs
from eval.statistics.comparison.entries import Entry, Setting, Workload
from eval.statistics.metrics import Interval, paired_speedups
from eval.statistics.paired_samples import speed_columns
from eval.statistics.schema import Row
from jobs.drafters import CONTROL

# Costs of a drafter for the Pareto fronts; less is better.
COSTS: dict[str, Callable[[Entry], int | None]] = {
    "parameters": lambda entry: entry.row.drafter_parameters,
    "training_tokens": lambda entry: entry.training_tokens,
}


@dataclass(frozen=True)
class ComparedEntry:
    """Entry with its ratio to the best other one and its place on the Pareto fronts."""

    entry: Entry
    rival: Entry | None = None  # the best other one; None: not ranked, or no other
    # speedup over that of the rival on shared prompts; None: no shared prompts
    ratio: Interval | None = None
    shared: int = 0  # number of shared prompts
    # cost -> whether no other entry dominates; absent: unknown, or drafts nothing
    on_front: dict[str, bool] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """Entries whose speedups may be compared, in the order of the runs."""

    setting: Setting
    workload: Workload
    label: str
    compared: list[ComparedEntry]

    @property
    def slug(self) -> str:
        """Label for file names, with `_` in place of most punctuation."""
        return re.sub(r"[^\w.]+", "_", self.label)

    @property
    def entries(self) -> list[Entry]:
        return [compared.entry for compared in self.compared]

    @property
    def fastest(self) -> list[Entry]:
        """Each drafter at its fastest draft length, fastest first, then those that draft nothing.

        Entries that are not ranked are left out.
        """
        return _fastest(self.entries)


def panels_of(entries: Sequence[Entry], resamples: int, seed: int) -> list[Panel]:
    """Group entries with equal setting and workload into panels, and rank each panel.

    Panels are ordered by setting, benchmark, batch size and temperature. resamples, seed: settings
    of the bootstrap.
    """
    groups: dict[tuple[Setting, Workload], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.setting, entry.workload), []).append(entry)
    settings = list(dict.fromkeys(setting for setting, _ in groups))

    def order(key: tuple[Setting, Workload]) -> tuple[Any, ...]:
        setting, work = key
        return settings.index(setting), work.benchmark, work.batch_size, work.temperature

    keys = sorted(groups, key=order)
    differing = distinguishing_fields(settings, "target", "target_hash") + distinguishing_fields(
        [work for _, work in keys], "benchmark", "prompts_hash"
    )
    panels = []
    for key in keys:
        label = _label(key, differing, groups[key][0].row)
        panels.append(Panel(*key, label, _compare(groups[key], resamples, seed)))
    return panels


def distinguishing_fields(objects: Sequence[Any], name: str, hashed: str) -> list[str]:
    """Return the fields in which instances of a dataclass differ.

    The field `hashed` is left out unless it has more different values than the field `name`.
    """
    numbers = {
        field.name: len({vars(one)[field.name] for one in objects})
        for field in dataclasses.fields(objects[0])
    }
    if numbers[hashed] <= numbers[name]:
        del numbers[hashed]
    return [field for field, number in numbers.items() if number > 1]


def _label(key: tuple[Setting, Workload], differing: Sequence[str], row: Row) -> str:
    """Return temperature, rule and batch size, and the other fields that distinguish this panel."""
    values = {**vars(key[0]), **vars(key[1])}
    named = {"temperature", "batch_size", "verify"}
    more = [_describe(name, values[name]) for name in differing if name not in named]
    return ", ".join([row.condition_label, *more])


def _describe(name: str, value: Any) -> str:
    if name in ("target", "benchmark", "hardware", "device", "dtype", "execution"):
        return str(value)
    if name.endswith("_hash"):
        return f"{name.removesuffix('_hash')} {value[:8] or 'not recorded'}"
    return f"{name.replace('_', ' ')} {value}"


def _fastest(entries: Sequence[Entry]) -> list[Entry]:
    fastest: dict[str, Entry] = {}
    ranked = [entry for entry in entries if not entry.not_ranked]
    for entry in sorted(ranked, key=lambda entry: -entry.ranked_speedup.value):
        fastest.setdefault(entry.name, entry)
    # last those whose speed is that of plain decoding
    return sorted(fastest.values(), key=lambda entry: entry.idle)


def _compare(entries: Sequence[Entry], resamples: int, seed: int) -> list[ComparedEntry]:
    ranked = _fastest(entries)
    found = [_against(entry, ranked, resamples, seed) for entry in entries]
    for cost, value_of in COSTS.items():
        weighed = [(entry, value_of(entry)) for entry in ranked]
        if not any(value for _, value in weighed):  # no front if all costs are 0
            continue
        points = [(entry, value) for entry, value in weighed if value is not None]
        points = [(entry, value) for entry, value in points if not entry.idle]
        front = pareto_front([(value, entry.ranked_speedup.value) for entry, value in points])
        marks = {id(entry): on_front for (entry, _), on_front in zip(points, front, strict=True)}
        for one in found:
            if id(one.entry) in marks:
                one.on_front[cost] = marks[id(one.entry)]
    return found


def _against(entry: Entry, ranked: Sequence[Entry], resamples: int, seed: int) -> ComparedEntry:
    """Compare the entry with the fastest other drafter, paired by prompt."""
    controls = entry.row.drafter == CONTROL  # the controls of two runs are one drafter
    others = [one for one in ranked if one.name != entry.name]
    others = [one for one in others if not (controls and one.row.drafter == CONTROL)]
    if entry.not_ranked or not others:
        return ComparedEntry(entry)
    mine, theirs = entry.counted(), others[0].counted()
    shared = [ids for ids in mine if ids in theirs]
    prompts = sum(len(ids) for ids in shared)
    if not shared:
        return ComparedEntry(entry, others[0])
    columns = [speed_columns([side[ids] for ids in shared]) for side in (mine, theirs)]
    ratio = paired_speedups(*columns, resamples=resamples, seed=seed)
    return ComparedEntry(entry, others[0], ratio, prompts)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each (cost, gain) whether no other point dominates it.

    A point dominates if it costs no more, gains no less, and is better in one of the two.
    """
    return [
        not any(
            other_cost <= cost and other_gain >= gain and (other_cost, other_gain) != (cost, gain)
            for other_cost, other_gain in points
        )
        for cost, gain in points
    ]


def chains(panel: Panel) -> list[Entry]:
    """Return the entries that the closed form applies to, each drafter at its fastest.

    These are drafters with a model that alternate with the target (schedule serial).
    """
    return [
        entry
        for entry in panel.fastest
        if entry.row.drafter_parameters and entry.row.schedule == "serial"
    ]


def usual_costs(entries: Sequence[Entry]) -> Costs:
    """Return the medians of V and both overheads over entries, for the iso-speedup curves.

    The cost ratio is set to 0.
    """
    rows = [entry.row for entry in entries]
    widths = set.intersection(*(set(row.V) for row in rows))
    return Costs(
        cost_ratio=0.0,
        V={width: median(row.V[width] for row in rows) for width in sorted(widths)},
        overhead=median(row.overhead * row.round_ms / row.t_target_ms[1] for row in rows),
        baseline_overhead=median(row.baseline_round_ms / row.t_target_ms[1] for row in rows) - 1.0,
    )
