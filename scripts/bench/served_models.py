"""The models of the server's benchmarks: options, and loading."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.engine import Engine, load
from jobs.paths import resolve_model
from scripts.bench.common import BenchOptions


@dataclass
class ServedOptions(BenchOptions):
    target: str = "embedded:target"  # model folder
    prompts: str = "embedded:prompts"  # file of prompts
    temperature: float = 0.0  # 0: greedy
    dtype: str = "float32"  # of both models
    max_length: int = 512  # context of the target


def load_engine(chosen: ServedOptions, drafter: str | Mapping[str, Any]) -> Engine:
    """Load the models. drafter: a name, a folder, or a mapping with `use` and options."""
    if isinstance(drafter, str) and Path(drafter).exists():
        drafter = str(resolve_model(drafter))
    return load(
        resolve_model(chosen.target),
        drafter,
        dtype=chosen.dtype,
        device=chosen.device,
        max_length=chosen.max_length,
    )
