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

    # the drafter's folder: of a model or of a head
    drafter: Any = MISSING
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
    # training chats that are examined, from all over the files
    max_chats: int = 64
