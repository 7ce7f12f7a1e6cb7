"""Students of one target, cut and distilled one after another: the target, the text and what the
target says of it are read once for all.

Most of a small student's step is the frozen target's forward. All students of a benchmark see the
same rows, so its states at a row are remembered by the first that meets it
(training.objectives.TeacherStates); seconds of distillation are therefore no measure of anything
here.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch

from distill.acceptance import HeldOutAcceptance
from distill.config import ImportanceConfig, PruneConfig
from distill.prune.context import PruneContext, SourceModel
from distill.prune.job import build_context
from distill.prune.modes import MODES
from distill.shapes import student_config
from jobs.config import TargetConfig
from jobs.paths import resolve
from training.config import DataConfig, LoopConfig, StudentConfig
from training.objectives import TeacherStates
from training.optimizer_config import OptimizerConfig


class Wanted(Protocol):
    """Options that such a benchmark has."""

    target: str
    chats: list[str]
    held_out_chats: list[str]
    max_length: int
    tokens_per_step: int
    steps: int
    probe_steps: int
    sequences: int
    lr: float
    dtype: str
    device: str
    cache_mb: int


def configured(chosen: Wanted, shape: StudentConfig, seed: int, cache: Path) -> PruneConfig:
    """The configuration of distill.prune for one student; `between` is its distillation
    afterwards.
    """
    loop = LoopConfig(
        max_steps=chosen.steps,
        tokens_per_step=chosen.tokens_per_step,
        micro_batch_tokens=chosen.tokens_per_step,
        eval_every=0,
        checkpoint_every=0,
        dtype=chosen.dtype,
        optimizer=OptimizerConfig(lr=chosen.lr),
    )
    return PruneConfig(
        job="distill.prune",
        output_dir=str(cache),
        seed=seed,
        target=TargetConfig(path=chosen.target, dtype=chosen.dtype, device=chosen.device),
        student=shape,
        cache_mb=chosen.cache_mb,
        data=DataConfig(
            chats=chosen.chats,
            held_out_chats=chosen.held_out_chats,
            max_length=chosen.max_length,
            max_bad=0.1,
        ),
        importance=ImportanceConfig(
            sequences=chosen.sequences,
            cache_dir=str(cache / "scores"),
            probe_steps=chosen.probe_steps,
        ),
        loop=loop,
        between=loop,
    )


class Students:
    """Cuts and distils; holds the target's states on the training text for as long as it lives."""

    def __init__(self) -> None:
        self._seed = -1
        self._bench: PruneContext | None = None
        self._states: TeacherStates | None = None

    def bench(self, config: PruneConfig) -> PruneContext:
        """The workbench of one student: target, text and held-out rows are those of the others of
        its seed, the accounts its own.
        """
        if self._bench is None or self._seed != config.seed:
            self._bench, self._seed = (
                build_context(config, resolve(config.target.path)),
                config.seed,
            )
            teacher = self._bench.teacher
            self._bench.scorer = HeldOutAcceptance(
                teacher, teacher, self._bench.held_out, config.data.max_length, 1.0
            )
        return dataclasses.replace(self._bench, config=config, seconds={}, flops={})

    def cut(self, bench: PruneContext) -> tuple[Any, dict[str, Any]]:
        """(the student before its distillation, how it was made). What the choice costs stands in
        the bench's accounts.

        A choice remembers the target's states for itself alone, so that its cost is that of a run
        by itself.
        """
        config = bench.config
        torch.manual_seed(config.seed)
        shape = student_config(config.student, bench.teacher.config)
        source = SourceModel(bench.teacher, resolve(config.target.path))
        with tempfile.TemporaryDirectory() as place:
            student, notes, _ = MODES[config.mode](bench, source, shape, Path(place))
        return student, notes

    def distil(self, title: str, bench: PruneContext, student: Any) -> dict[str, float]:
        """Distil by `between`. Returns the held-out figures at its end."""
        self._states = self._states or bench.states
        if self._states is not bench.states:
            bench.states = self._states
        with tempfile.TemporaryDirectory() as place:
            return bench.distil(title, student, bench.config.between, Path(place)).best
