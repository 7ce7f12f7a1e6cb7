"""State that all modes and stages of pruning share: target, text, costs, and distillation."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from distill.acceptance import HeldOutAcceptance, score_domains
from distill.config import PruneConfig
from jobs.config import TrackerConfig, plain
from jobs.files import write_text
from jobs.tracker import Tracker
from training.bounds import Progress
from training.config import LoopConfig
from training.data.from_config import row_data, rows_of_step
from training.data.packing import PackedBatch, PackedData, Sample, collate
from training.data.shares import start_from
from training.loop import fit
from training.models.build import dtype_of
from training.models.frozen import load_frozen
from training.models.shapes import forward_flops, parameter_counts
from training.objectives import Distillation, TeacherStates
from training.parallel.strategy import Parallel

# Minimum number of rows: with fewer, the scores depend on a few documents.
LEAST_ROWS = 16


@dataclass
class SourceModel:
    """Frozen model to cut, and its folder."""

    model: Any
    folder: Path


def read_source(config: PruneConfig, folder: Path, parallel: Parallel) -> SourceModel:
    """Load a frozen model to cut, sharded if the parallel kind shards weights."""
    return SourceModel(load_frozen(folder, dtype_of(config.target.dtype), parallel), folder)


@dataclass
class PruneContext:
    """Target, text, evaluation and accumulated costs of a pruning run."""

    config: PruneConfig
    # the frozen target
    teacher: Any
    # name of a domain -> its training text; the name is empty without domains
    texts: dict[str, Sequence[Sample]]
    held_out: Sequence[Sample]
    parallel: Parallel
    # name of a domain -> its held-out text; empty if the shares of the domains are fixed
    domains: dict[str, Sequence[Sample]] = field(default_factory=dict)
    # shares at which the last training ended; the next one starts from them
    shares: dict[str, float] = field(default_factory=dict)
    # seconds by part of the work, in this process
    seconds: dict[str, float] = field(default_factory=dict)
    # FLOPs by part of the work: products with weights, without attention scores
    flops: dict[str, float] = field(default_factory=dict)
    scorer: HeldOutAcceptance | None = None
    # name of a domain -> the scorer on its held-out text
    scorers: dict[str, HeldOutAcceptance] = field(default_factory=dict)
    # the target's states on the training text, shared by all distillations
    states: TeacherStates = field(init=False)

    def __post_init__(self) -> None:
        self.states = TeacherStates(self.teacher, self.config.cache_mb * 10**6)

    @contextmanager
    def account(self, part: str, flops: float) -> Iterator[None]:
        """Add the seconds of the block and `flops` to the costs of a part of the work."""
        began = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - began
        self.flops[part] = self.flops.get(part, 0.0) + flops

    def acceptance(self, student: Any) -> dict[str, float]:
        """Return the acceptance figures of a student on the held-out text."""
        if self.scorer is None:
            self.scorer = self._score(student, self.held_out)
        self.scorer.student = student
        return self.scorer()

    def evaluate(self, student: Any) -> dict[str, float]:
        """Return `acceptance` and, if the shares of domains move, the figures of each domain."""
        figures = self.acceptance(student)
        if not self.domains:
            return figures
        for name, samples in self.domains.items():
            if name not in self.scorers:
                self.scorers[name] = self._score(student, samples)
            self.scorers[name].student = student
        return figures | score_domains(self.scorers)

    def _score(self, student: Any, samples: Sequence[Sample]) -> HeldOutAcceptance:
        capacity = self.config.data.max_length
        return HeldOutAcceptance(student, self.teacher, samples, capacity, 1.0)

    def data(self, rows_a_step: int) -> PackedData:
        """Return the training text in packed rows, with domains mixed in their shares.

        rows_a_step: number of rows per step. Raises UserError for fewer than LEAST_ROWS rows.
        """
        mixture = start_from(self.config.data, self.shares)
        data = row_data(self.texts, mixture, rows_a_step, self.config.seed)
        if len(data.rows) < LEAST_ROWS:
            raise UserError(
                f"too little calibration text: found {len(data.rows)} rows of {data.capacity} "
                f"tokens, expected at least {LEAST_ROWS} (better a thousand). Add data.texts or "
                f"data.chats, or lower data.max_length"
            )
        return data

    def rows(self, count: int) -> list[PackedBatch]:
        """Return up to `count` packed rows of the training text, each as a batch of one."""
        data = self.data(1)
        rows: list[list[int]] = []
        while len(rows) < min(count, len(data.rows)) and not data.ended:
            rows += data.step_rows(len(rows))
        if len(rows) < count and self.parallel.is_main:
            print(
                f"note: the text has {len(rows):,} rows of {data.capacity} tokens, fewer than the "
                f"configured {count:,}"
            )
        return [collate(data.samples, [row], data.capacity, self.parallel.device) for row in rows]

    def tracker_config(self, part: str = "") -> TrackerConfig:
        """Return the tracker configuration of this run or, with `part`, of one part of it.

        All parts are in the group of the run. part: ending of the tracked name.
        """
        tracker = self.config.tracker
        run = tracker.name or self.config.experiment
        return replace(tracker, name=run + part, group=tracker.group or run)

    @contextmanager
    def track(self, part: str, folder: Path) -> Iterator[Tracker | None]:
        """Open a tracker for one part of this run inside the block; its records go to `folder`.

        part: name of the part. Yields the tracker on rank 0, and None on all other ranks.
        """
        if not self.parallel.is_main:
            yield None
            return
        folder.mkdir(parents=True, exist_ok=True)
        config = self.tracker_config(f": {part}")
        with closing(Tracker(folder, config, "", plain(self.config))) as tracker:
            yield tracker

    def cached(
        self, file: Path, compute: Callable[[], Any], is_valid: Callable[[Any], bool]
    ) -> Any:
        """Return the JSON value in a file; compute and write it if it is missing or damaged.

        All ranks must call this method. They compute together and get the value of rank 0.
        """
        here = self.parallel.is_main and file.is_file()
        found = self.parallel.broadcast(_read_valid(file, is_valid) if here else None)
        if found is None:
            found = self.parallel.broadcast(compute())
            if self.parallel.is_main:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, json.dumps(found))
        return found

    def fit(
        self,
        title: str,
        objective: Any,
        model: Any,
        loop: LoopConfig,
        folder: Path,
        tracker: Tracker | None,
        evaluate: Callable[[], dict[str, float]],
        flops_per_token: float,
    ) -> Progress:
        """Train `model` on the training text, from the checkpoint in `folder` if there is one.

        title: part of the work to which the seconds and FLOPs are added. evaluate: returns the
        figures of a checkpoint. If these move the shares of domains, the next training starts from
        the final ones.
        """
        data = self.data(rows_of_step(self.config.data, loop))
        with self.account(title, 0.0):
            progress = fit(
                title, objective, model, data, loop, self.parallel, folder, tracker, evaluate
            )
        self.flops[title] += flops_per_token * progress.step * loop.tokens_per_step
        if self.domains:
            self.shares = dict(progress.data["shares"])
        return progress

    def distil(
        self,
        title: str,
        student: Any,
        loop: LoopConfig,
        folder: Path,
        tracker: Tracker | None = None,
    ) -> Progress:
        """Distil the target into `student` in loop.dtype, from the checkpoint in `folder` if any.

        title: part of the work to which the seconds and FLOPs are added.
        """
        objective = Distillation(student.to(dtype_of(loop.dtype)), self.teacher, states=self.states)
        count, before = parameter_counts(student.config)["all"], self.states.tokens_read
        evaluate = partial(self.evaluate, student)
        progress = self.fit(title, objective, student, loop, folder, tracker, evaluate, 6.0 * count)
        read = torch.tensor(self.states.tokens_read - before, device=self.parallel.device)
        self.flops[title] += forward_flops(self.teacher.config) * float(self.parallel.sum(read))
        return progress


def _read_valid(file: Path, is_valid: Callable[[Any], bool]) -> Any:
    """Return the JSON value in a file; None for a damaged one, which a note reports."""
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError):
        found = None
    if is_valid(found):
        return found
    print(f"{file} is damaged: computing its content again")
    return None
