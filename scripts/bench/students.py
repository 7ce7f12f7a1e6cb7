"""Students of one target, cut and distilled one after another on the same text.

The frozen target's forward takes most of a small student's step. All students train on the same
rows, so the target's states are computed for the first student and cached for the others
(training.objectives.TeacherStates). So the seconds of distillation are not a result.
"""

import dataclasses
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distill.acceptance import HeldOutAcceptance
from distill.config import ImportanceConfig, PruneConfig
from distill.prune.context import PruneContext, SourceModel
from distill.prune.job import build_context
from distill.prune.modes import MODES
from distill.shapes import student_config
from jobs.config import TargetConfig
from jobs.paths import resolve_model
from scripts.bench import common
from scripts.bench.common import BenchOptions
from training.config import DataConfig, StudentConfig
from training.objectives import TeacherStates
from training.optimizer_config import OptimizerConfig


@dataclass
class StudentOptions(BenchOptions):
    """Options of benchmarks that cut and distil students."""

    target: str = "embedded:target"  # model folder
    # ShareGPT files, which are distilled on and score importance
    chats: list[str] = field(default_factory=lambda: ["embedded:chats"])
    # held-out ShareGPT files, which choose layers and measure acceptance
    held_out_chats: list[str] = field(default_factory=lambda: ["embedded:held_out_chats"])
    prompts: str = "embedded:prompts"  # evaluation prompts that are decoded
    max_prompts: int = 30  # number of prompts
    max_new_tokens: int = 64  # tokens of an answer
    max_length: int = 256  # tokens per row
    tokens_per_step: int = 4096  # tokens of a training step
    steps: int = 400  # steps of distillation
    probe_steps: int = 10  # steps that distil a candidate while layers are chosen
    sequences: int = 512  # rows that are scored
    lr: float = 3e-3  # peak learning rate of distillation
    dtype: str = "float32"  # dtype of training; master weights are float32
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])  # each runs every student once
    # folder of students and finished parts; a call with the same settings continues there
    work: str = "runs/bench"
    cache_mb: int = 2000  # memory for the target's states on the training text


def prune_config(
    chosen: StudentOptions, shape: StudentConfig, seed: int, cache: Path
) -> PruneConfig:
    """Return a configuration of distill.prune, whose `between` distils after the cut."""
    optimizer = OptimizerConfig(lr=chosen.lr)
    loop = common.loop_config(chosen.steps, chosen.tokens_per_step, chosen.dtype, optimizer)
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
    """Factory of students that share the target, the text and the target's states."""

    def __init__(self) -> None:
        self._context: PruneContext | None = None
        self._states: TeacherStates | None = None

    def context(self, config: PruneConfig) -> PruneContext:
        """Return the context of one student, with the data of its seed and empty cost accounts."""
        if self._context is None or self._context.config.seed != config.seed:
            self._context = context = build_context(config, resolve_model(config.target.path))
            held_out, length = context.held_out, config.data.max_length
            context.scorer = HeldOutAcceptance(
                context.teacher, context.teacher, held_out, length, 1.0
            )
        return dataclasses.replace(self._context, config=config, seconds={}, flops={})

    def cut(self, context: PruneContext) -> tuple[Any, dict[str, Any]]:
        """Return a student before its distillation, and notes on its cut.

        The context's accounts hold the cost of choosing what to cut, which includes the target's
        states, as in a separate run.
        """
        config = context.config
        torch.manual_seed(config.seed)
        shape = student_config(config.student, context.teacher.config)
        source = SourceModel(context.teacher, resolve_model(config.target.path))
        with tempfile.TemporaryDirectory() as folder:
            student, notes, _ = MODES[config.mode](context, source, shape, Path(folder))
        return student, notes

    def distil(self, title: str, context: PruneContext, student: Any) -> dict[str, float]:
        """Distil under the configuration's `between` and return the best held-out figures."""
        self._states = self._states or context.states
        if self._states is not context.states:
            context.states = self._states
        with tempfile.TemporaryDirectory() as folder:
            return context.distil(title, student, context.config.between, Path(folder)).best
