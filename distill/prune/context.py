"""What every mode and stage of pruning works with: the target, the text, a count of what it all
costs, and a distillation on the spot.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from distill.acceptance import HeldOutAcceptance
from distill.config import PruneConfig
from jobs.config import TrackerConfig, plain
from jobs.tracker import Tracker
from training.bounds import Progress
from training.config import LoopConfig
from training.data.from_config import row_data, rows_of_step
from training.data.packing import PackedBatch, PackedData, Sample, collate
from training.loop import fit
from training.models.build import dtype_of
from training.models.frozen import load_frozen
from training.models.shapes import forward_flops, parameter_counts
from training.objectives import Distillation, TeacherStates
from training.parallel.strategy import Parallel

LEAST_ROWS = 16  # of calibration text: below, a score is the luck of a few documents


@dataclass
class SourceModel:
    """A frozen model to cut, and the folder that it was read from."""

    model: Any
    folder: Path


def read_source(config: PruneConfig, folder: Path, parallel: Parallel) -> SourceModel:
    """The model in a folder; in shares where ranks hold weights so, as a target too large for one
    card must be.
    """
    return SourceModel(load_frozen(folder, dtype_of(config.target.dtype), parallel), folder)


@dataclass
class PruneContext:
    """What all modes and stages share."""

    config: PruneConfig
    teacher: Any  # the target, frozen
    # to train on and to score by, by domain; without domains under an empty name
    texts: dict[str, list[Sample]]
    held_out: list[Sample]
    parallel: Parallel
    seconds: dict[str, float] = field(default_factory=dict)  # by part of the work, of this process
    # products of matrices with weights; attention's own are left out
    flops: dict[str, float] = field(default_factory=dict)
    scorer: HeldOutAcceptance | None = None
    # the target's on the training text, for all that is distilled here
    states: TeacherStates = field(init=False)

    def __post_init__(self) -> None:
        self.states = TeacherStates(self.teacher, self.config.cache_mb * 10**6)

    @contextmanager
    def account(self, part: str, flops: float) -> Iterator[None]:
        """Count the seconds spent inside, and these operations, under a part of the work."""
        began = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - began
        self.flops[part] = self.flops.get(part, 0.0) + flops

    def acceptance(self, student: Any) -> dict[str, float]:
        """Acceptance of a student's drafts on the held-out text; the teacher reads it once."""
        if self.scorer is None:
            self.scorer = HeldOutAcceptance(
                student, self.teacher, self.held_out, self.config.data.max_length, 1.0
            )
        self.scorer.student = student
        return self.scorer()

    def data(self, rows_a_step: int) -> PackedData:
        """The training text in packed rows; of domains, drawn by their shares. Raises UserError
        where there is too little.
        """
        data = row_data(self.texts, self.config.data, rows_a_step, self.config.seed)
        if len(data.rows) < LEAST_ROWS:
            raise UserError(
                f"too little calibration text: {len(data.rows)} rows of {data.capacity} tokens, "
                f"expected at least {LEAST_ROWS} (about a thousand is usual): give more data.texts "
                f"or data.chats, or lower data.max_length"
            )
        return data

    def rows(self, count: int) -> list[PackedBatch]:
        """`count` packed rows of the training text, or all there are, each as a batch."""
        data = self.data(1)
        rows: list[list[int]] = []
        while len(rows) < min(count, len(data.rows)) and not data.ended:
            rows += data.step_rows(len(rows))
        if len(rows) < count and self.parallel.is_main:
            print(
                f"note: the text makes {len(rows):,} rows of {data.capacity} tokens; {count:,} "
                f"were asked for"
            )
        return [collate(data.samples, [row], data.capacity, self.parallel.device) for row in rows]

    def tracked(self, part: str = "") -> TrackerConfig:
        """Return the tracker of the run, or of a part of it, with a name and the group that all
        share.
        """
        tracker = self.config.tracker
        run = tracker.name or self.config.experiment
        return replace(tracker, name=run + part, group=tracker.group or run)

    def recording(self, part: str, folder: Path) -> Tracker | None:
        """Return a tracker of a training inside this run, mirrored in its group; None but on rank
        0.

        folder: where its metrics.jsonl lies.
        """
        if not self.parallel.is_main:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return Tracker(folder, self.tracked(f": {part}"), "", plain(self.config))

    def distil(
        self,
        title: str,
        student: Any,
        loop: LoopConfig,
        folder: Path,
        tracker: Tracker | None = None,
    ) -> Progress:
        """Distil the target into `student`, in loop.dtype, for a while; resumes from `folder`."""
        data = self.data(rows_of_step(self.config.data, loop))
        objective = Distillation(student.to(dtype_of(loop.dtype)), self.teacher, states=self.states)
        before = self.states.tokens_read
        with self.account(title, 0.0):
            progress = fit(
                title,
                objective,
                student,
                data,
                loop,
                self.parallel,
                folder,
                tracker,
                lambda: self.acceptance(student),
            )
        read = self.parallel.sum(
            torch.tensor(self.states.tokens_read - before, device=self.parallel.device)
        )
        a_token = 6.0 * parameter_counts(student.config)["all"]
        self.flops[title] += a_token * progress.step * loop.tokens_per_step
        self.flops[title] += forward_flops(self.teacher.config) * float(read)
        return progress
