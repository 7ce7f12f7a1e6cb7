"""Entries of a comparison: rows of evaluations with their setting, workload and drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.schedules.by_name import VIRTUAL
from eval.statistics.comparison.evaluations import Evaluation
from eval.statistics.lossless import DIFFERS, LOSSY
from eval.statistics.metrics import Interval
from eval.statistics.paired_samples import PairedSample
from eval.statistics.rows import headline_samples
from eval.statistics.schema import Row
from jobs.drafter_use import ALONE

HEADLINE, ALL = "headline", "all"  # the prompts that count
# Draft tokens of a mean round. Below this the stopping rule has found that no draft pays.
IDLE_BELOW = 0.05


@dataclass(frozen=True)
class Setting:
    """Target, machine and backend that speeds must share to be compared."""

    target: str
    target_hash: str
    hardware: str
    device: str
    threads: int
    dtype: str
    backend: str
    execution: str


@dataclass(frozen=True)
class Workload:
    """Prompts and decoding settings that speeds must share to be compared."""

    benchmark: str
    prompts_hash: str
    examples_hash: str
    temperature: float
    batch_size: int
    verify: str
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    allowed: str
    max_new_tokens: int


@dataclass(frozen=True)
class Entry:
    """Row of an evaluation with its setting, workload, paired samples and drafter card."""

    run: str
    folder: str
    name: str  # of the drafter, with the run if several runs have it
    row: Row
    setting: Setting
    workload: Workload
    units: list[PairedSample]  # the paired samples of the row
    card: dict[str, Any]
    bytes_per_step: int | None
    training_tokens: int | None
    prompts: str = HEADLINE
    series: str = ""  # points of one series differ in depth alone, and are joined
    # of the runs that repeat this drafter, each with another seed; empty: no run repeats it
    seeds: tuple[int, ...] = ()

    @property
    def plotted(self) -> str:
        """Name in plots, in which the runs of other seeds look alike."""
        return self.row.drafter if self.seeds else self.name

    @property
    def speedup(self) -> Interval | None:
        """Speedup on the prompts that count; None if there are none."""
        return counted_speedup(self.row, self.prompts == ALL)

    @property
    def ranked_speedup(self) -> Interval:
        """Speedup of a ranked entry, which is never None."""
        assert self.speedup is not None, self.not_ranked
        return self.speedup

    @property
    def alpha(self) -> float | None:
        """Acceptance rate on the prompts that count."""
        return self.row.alpha if self.prompts == ALL else self.row.headline_alpha

    @property
    def not_ranked(self) -> str:
        """Reason why the row is in no ranking and no plot; empty if it is ranked."""
        if self.row.schedule == ALONE:
            return "another model's text"
        if self.row.schedule in VIRTUAL:
            return "a virtual clock"
        if self.row.lossless == DIFFERS:
            return "not the target's own text"
        if self.row.lossless == LOSSY:
            return LOSSY
        return "" if self.speedup is not None else "every text of the target loops"

    @property
    def idle(self) -> bool:
        """Whether a model drafted almost nothing, so that its speed is that of plain decoding."""
        drafts = self.row.drafter_parameters > 0 and self.row.num_draft_tokens > 0
        return drafts and self.row.drafted < IDLE_BELOW

    def counted(self) -> dict[tuple[str, ...], PairedSample]:
        """Return the paired samples of the prompts that count, by their prompt ids."""
        units = self.units if self.prompts == ALL else headline_samples(self.units)
        return {tuple(unit.ids): unit for unit in units}


def counted_speedup(row: Row, everything: bool) -> Interval | None:
    """Return a row's speedup on all prompts (`everything`), or on those that do not loop.

    None if looping prompts do not count and all of them loop.
    """
    if everything:
        return Interval(row.speedup, row.speedup_low, row.speedup_high)
    if row.headline_speedup is None:
        return None
    return Interval(row.headline_speedup, row.headline_speedup_low, row.headline_speedup_high)


def entries_of(evaluations: Sequence[Evaluation], prompts: str) -> list[Entry]:
    """Return one entry for each row, in order. prompts: the ones that count, headline or all.

    The name of a drafter that several runs have includes the label of its run.
    """
    runs_of: dict[str, set[str]] = {}
    for evaluation in evaluations:
        for row in evaluation.rows:
            runs_of.setdefault(row.drafter, set()).add(evaluation.label)
    seeds_of = _find_seeds(evaluations)
    entries = []
    for evaluation in evaluations:
        for row in evaluation.rows:
            several = len(runs_of[row.drafter]) > 1
            name = f"{row.drafter} ({evaluation.label})" if several else row.drafter
            entry = _entry(evaluation, row, name, prompts)
            entries.append(dataclasses.replace(entry, seeds=seeds_of.get(row.drafter, ())))
    return entries


def _find_seeds(evaluations: Sequence[Evaluation]) -> dict[str, tuple[int, ...]]:
    """Return the seeds of each drafter that several runs repeat.

    A run repeats another one if both have drafters of the same names and sizes, and another seed.
    """
    runs: dict[str, list[tuple[int, frozenset[tuple[str, int, int]]]]] = {}
    for evaluation in evaluations:
        sizes = ((r.drafter, r.drafter_layers, r.drafter_parameters) for r in evaluation.rows)
        run = evaluation.rows[0].seed, frozenset(sizes)
        for drafter in dict.fromkeys(row.drafter for row in evaluation.rows):
            runs.setdefault(drafter, []).append(run)
    found = {}
    for drafter, those in runs.items():
        seeds = {seed for seed, _ in those}
        if len(those) > 1 and len(seeds) == len(those) and len({sizes for _, sizes in those}) == 1:
            found[drafter] = tuple(sorted(seeds))
    return found


def _entry(evaluation: Evaluation, row: Row, name: str, prompts: str) -> Entry:
    target_hash, prompts_hash = evaluation.hashes
    values = {**dataclasses.asdict(row), "target_hash": target_hash, "prompts_hash": prompts_hash}
    values["execution"] = evaluation.execution
    # a drafter with another rule belongs to the panel of its run
    values["verify"] = row.shared_verify
    origin = evaluation.origins.get(row.drafter)
    modelless = 0 if row.drafter_parameters == 0 else None  # no weights to read or train
    return Entry(
        run=evaluation.label,
        folder=str(evaluation.folder),
        name=name,
        row=row,
        setting=Setting(*(values[field.name] for field in dataclasses.fields(Setting))),
        workload=Workload(*(values[field.name] for field in dataclasses.fields(Workload))),
        units=evaluation.units(row),
        card=origin.card if origin else {},
        bytes_per_step=origin.bytes_per_step(row) if origin else modelless,
        training_tokens=origin.training_tokens if origin else modelless,
        prompts=prompts,
    )
