"""Training from a cache of the teacher's distributions beside training with the teacher.

A teacher of 12 layers and a student of one, both with random weights, which change no rate. The
sides take turns in one process; writing the cache is timed apart.

    python scripts/bench/teacher_cache.py
    python scripts/bench/teacher_cache.py draft_vocab_size=0
"""

import copy
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from decoding.models.draft_vocabulary import restrict_head, token_ids
from scripts.bench import common
from scripts.bench.common import BenchOptions, StepRecorder
from scripts.usage import run_script
from training.cached_distillation import CachedDistillation
from training.config import StudentConfig
from training.data.packing import PackedData, Sample
from training.features.teacher_cache import CachedTeacher, teacher_cache
from training.features.teacher_config import SAMPLED, TOP_K, TeacherConfig
from training.losses.config import LossConfig
from training.models.build import build_llama, dtype_of
from training.objectives import Distillation, freeze
from training.optimizer_config import OptimizerConfig


@dataclass
class Options(BenchOptions):
    hidden_size: int = 576  # of both models
    vocab_size: int = 49152  # of the teacher
    draft_vocab_size: int = 8192  # of the student; 0: all tokens
    dtype: str = "bfloat16"  # of both models
    rows: int = 12  # packed rows of data
    length: int = 1024  # tokens of a row
    tokens_per_step: int = 4096  # tokens of a step
    steps: int = 2  # steps of a round, besides a first one
    rounds: int = 3  # measured rounds
    name: str = "teacher_cache"  # name of the results file


def make_model(chosen: Options, layers: int) -> Any:
    """Return a model with random weights and packed attention."""
    shape = StudentConfig(
        num_hidden_layers=layers,
        hidden_size=chosen.hidden_size,
        num_attention_heads=chosen.hidden_size // 64,
        num_key_value_heads=chosen.hidden_size // 192,
        intermediate_size=chosen.hidden_size * 8 // 3,
    )
    return build_llama(shape, dtype_of(chosen.dtype), vocab_size=chosen.vocab_size)


def main() -> None:
    """Write both caches, then compare the tokens per second of all three sides."""
    chosen = common.read_options(Options)
    torch.manual_seed(0)
    teacher, student = freeze(make_model(chosen, 12)), make_model(chosen, 1)
    if chosen.draft_vocab_size:
        restrict_head(student, torch.arange(chosen.draft_vocab_size))
    random = np.random.default_rng(0)
    mask = np.arange(chosen.length) >= chosen.length // 3
    samples = [
        Sample(random.integers(0, chosen.vocab_size, chosen.length).astype(np.int32), mask)
        for _ in range(chosen.rows)
    ]
    data = PackedData(samples, chosen.length, chosen.tokens_per_step // chosen.length, 0)
    loop = common.loop_config(
        chosen.steps + 1, chosen.tokens_per_step, chosen.dtype, OptimizerConfig(lr=1e-3)
    )
    alone = SimpleNamespace(rank=0, world_size=1, is_main=True, wait=lambda: None)
    sides: dict[str, Any] = {"online": partial(Distillation, teacher=teacher)}
    seconds = {}
    with TemporaryDirectory() as folder:
        for kind in (SAMPLED, TOP_K):
            began = time.perf_counter()
            config = TeacherConfig(cache=kind, folder=folder)
            cached = CachedTeacher(teacher, "random", 1.0, token_ids(student), seed=0)
            cache = teacher_cache(config, cached, data, alone)
            seconds[kind] = time.perf_counter() - began
            sides[kind] = partial(CachedDistillation, loss=LossConfig(), cache=cache)

        def rate(make: Any) -> float:
            recorder, module = StepRecorder(), make(copy.deepcopy(student))
            common.train_steps("", module, module.student, data, loop, chosen.device, recorder)
            return recorder.rate()

        figures = common.take_turns(
            {name: partial(rate, make) for name, make in sides.items()}, chosen.rounds
        )
    found = {
        "tokens_per_second": common.medians(figures),
        "over_online": {kind: common.ratio(figures, kind, "online") for kind in seconds},
        "seconds_of_writing": seconds,
    }
    common.save(chosen.name, chosen, found)


if __name__ == "__main__":
    run_script(main)
