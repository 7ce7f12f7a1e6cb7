"""Measurement by several processes, each of which decodes a share of the prompts.

One process measures the sweep and the costs that rules use. All then choose the same draft lengths,
and each measures every n-th unit of the main part in a folder of its own, shards/NUMBER. The run
folder gets all records, from which the job continues as if it had measured them. A killed run
continues in these folders with the next unit. Noise is keyed by the unit, so sampled texts are
those of one process. Where there are several GPUs, the processes take turns at them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from decoding import devices
from decoding.devices import device_of
from decoding.errors import UserError
from eval.config import EvalConfig
from eval.measure.measurement import Task
from eval.measure.parts import read_slices
from eval.measure.records import Record, record_from, write_records
from eval.measure.rounds import FILE as ROUNDS
from eval.measure.rounds import RoundsFile
from eval.measure.setup import conditions
from jobs.config import plain
from jobs.interrupts import INTERRUPTED, REFUSED, Interrupted
from jobs.launch import Children
from jobs.run_files import read_journal_lines
from jobs.stages import ON_FILE

FOLDER = "shards"  # in the run folder
MOST = 64  # processes
RECORDS, SLICES, COSTS = "records.jsonl", "parts.jsonl", "costs.json"
_ENVIRONMENT = "SHALLOW_DRAFT_SHARD"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Shard:
    """The share of a process: of the sweep, or of the main part."""

    number: int  # from 0
    count: int
    part: str  # sweep | main

    def holds(self, task: Task) -> bool:
        """Return whether this process measures a task."""
        if task.part != self.part:
            return False
        return task.part == "sweep" or task.index % self.count == self.number

    def __str__(self) -> str:
        """Return the form that `this_shard` reads."""
        return f"{self.number}/{self.count}/{self.part}"


def this_shard() -> Shard | None:
    """Return the share of this process; None: it measures everything."""
    if _ENVIRONMENT not in os.environ:
        return None
    number, count, part = os.environ[_ENVIRONMENT].split("/")
    return Shard(int(number), int(count), part)


def check_shards(cfg: EvalConfig) -> None:
    """Raise UserError for a number of processes that cannot share the measurement."""
    if not 1 <= cfg.shards <= MOST:
        raise UserError(f"shards is {cfg.shards}, expected 1 to {MOST} processes.")
    if cfg.shards > 1 and cfg.max_seconds:
        raise UserError(
            f"shards={cfg.shards} needs max_seconds=0: a bound in seconds decides how many prompts "
            f"are measured, which the processes could not share. Set max_prompts instead."
        )
    if cfg.shards > 1 and cfg.target.processes > 1:
        raise UserError(
            f"shards={cfg.shards} needs a target in one process, found target.processes="
            f"{cfg.target.processes}. Set one of them to 1."
        )


def measure_shards(cfg: EvalConfig, folder: Path) -> None:
    """Measure what the shards' folders lack, and write all records into the run folder.

    Raises UserError, which names the process, if one fails, and Interrupted after a signal.
    """
    homes = [folder / FOLDER / str(number) for number in range(cfg.shards)]
    _run(cfg, homes[:1], "sweep")
    for home in homes[1:]:
        _seed(homes[0], home)
    _run(cfg, homes, "main")
    _merge(cfg, folder, homes)


def _run(cfg: EvalConfig, homes: Sequence[Path], part: str) -> None:
    """Run a process in each folder, and wait for all."""
    with Children() as children:
        for number, home in enumerate(homes):
            home.mkdir(parents=True, exist_ok=True)
            file = home.with_suffix(".yaml")
            own = replace(cfg, output_dir=str(home))
            OmegaConf.save(OmegaConf.create(plain(own)), file)
            command = [sys.executable, "-m", cfg.job, ON_FILE, str(file)]
            children.start(command, _environment(cfg, Shard(number, cfg.shards, part), len(homes)))
        states = children.wait()
    failed = [number for number, state in enumerate(states) if state not in (None, 0)]
    if children.signalled or INTERRUPTED in states:
        raise Interrupted("the shards were stopped by a signal. Run the same command to continue")
    if failed:
        state = states[failed[0]]
        remedy = "Run the same command to continue from the prompts that are measured"
        if state == REFUSED:
            remedy = "Mend what it names, and run the command again"
        raise UserError(
            f"shard {failed[0]} of {cfg.shards} ended with status {state}; the others were "
            f"stopped. Its last output is above. {remedy}"
        )


def _environment(cfg: EvalConfig, shard: Shard, running: int) -> dict[str, str]:
    """Return the variables of a process: its share, its threads and its GPU."""
    own = {**os.environ, _ENVIRONMENT: str(shard)}
    own.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // running)))
    cards = devices.count_gpus() if device_of(cfg.target.device).startswith("cuda") else 0
    if cards > 1:
        given = [one for one in os.environ.get(_VISIBLE, "").split(",") if one]
        own[_VISIBLE] = (given or [*map(str, range(cards))])[shard.number % cards]
    return own


def _seed(first: Path, home: Path) -> None:
    """Give a shard the sweep, its part times and the costs of the first one, if it has none."""
    if (home / RECORDS).is_file():
        return
    home.mkdir(parents=True, exist_ok=True)
    swept = [record for record in _records_in(first) if record.part == "sweep"]
    slices = [one for one in read_slices(first / SLICES) if one.part == "sweep"]
    if (first / COSTS).is_file():
        shutil.copyfile(first / COSTS, home / COSTS)
    write_records(home / SLICES, slices)
    write_records(home / RECORDS, swept)  # last: it marks a complete copy


def _merge(cfg: EvalConfig, folder: Path, homes: Sequence[Path]) -> None:
    """Write the sweep of the first shard and the main part of all into the run folder."""
    order = {condition: place for place, condition in enumerate(conditions(cfg))}
    records, slices = _records_in(homes[0]), read_slices(homes[0] / SLICES)
    for home in homes[1:]:
        records += [record for record in _records_in(home) if record.part == "main"]
        slices += [one for one in read_slices(home / SLICES) if one.part == "main"]
    records.sort(key=lambda one: (order[one.condition], one.part == "main", one.unit))
    if (homes[0] / COSTS).is_file():
        shutil.copyfile(homes[0] / COSTS, folder / COSTS)
    write_records(folder / SLICES, slices)
    RoundsFile(folder / ROUNDS).join(homes)
    write_records(folder / RECORDS, records)


def _records_in(home: Path) -> list[Record]:
    return read_journal_lines(home / RECORDS, record_from).records
