"""Settings of `python -m eval.doctor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from eval.config import BenchmarkConfig
from jobs.config import JobConfig, TargetConfig


@dataclass
class DoctorConfig(JobConfig):
    """Examination of one drafter on its target, as it is served."""

    # the drafter: the folder of a model or of a head, or a mapping {use: FOLDER, ...} with options
    drafter: dict[str, Any] = MISSING
    # the target, with the dtype in which it serves
    target: TargetConfig = field(default_factory=TargetConfig)
    # prompts as they are served, and their chat template
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    # system prompt of the served chats; empty: none
    system: str = ""
    # sampling temperature of serving; 0: greedy
    temperature: float = 0.0
    # draft length
    num_draft_tokens: int = 4
    # prompts that are decoded; at least 4 give errors
    max_prompts: int = 32
    # maximum tokens of an answer
    max_new_tokens: int = 128
    # run folder of the drafter's training; empty: the folder above the drafter, if it is one
    training: str = ""
    # chats that the drafter was trained on; empty: those of the training, if they exist
    chats: list[str] = field(default_factory=list)
    # training chats, or logged answers, that are examined, from all over the files
    max_chats: int = 64
    # run folder of eval.run engine=[ours,ENGINE] with this drafter, to compare the engine's
    # acceptance with ours; empty: engines are not compared
    engine_run: str = ""
    # logged answers of the target in serving, in any form that eval.replay reads: report whether
    # acceptance has fallen on them, instead of examining new answers; empty: examine the drafter
    drift: str = ""
    # older logs to compare with; empty: compare with the held-out acceptance on the drafter's card
    drift_against: str = ""
    # the target that wrote the older logs, if it was another one; empty: target.path
    drift_against_target: str = ""
    # smallest fall of the acceptance that calls for re-targeting
    least_drift: float = 0.02


def drafter_name(config: DoctorConfig) -> str:
    """Return the folder of the examined drafter."""
    return str(config.drafter.get("use", config.drafter))
