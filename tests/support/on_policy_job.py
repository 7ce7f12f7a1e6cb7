"""A small job of on-policy distillation, in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.config import OnPolicyConfig
from distill.on_policy.data import OnPolicyData
from distill.on_policy.prompts import Prompts
from distill.on_policy.schedule import Schedule
from distill.on_policy.writer import StudentWriter
from jobs.config import ParallelConfig
from tests.support.interrupted_data import stop_after_step
from training import checkpoint
from training.config import LoopConfig, StudentConfig
from training.data.packing import PackedData, Sample
from training.loop import fit
from training.models.build import build_llama
from training.objectives import Distillation, freeze
from training.optimizer_config import OptimizerConfig
from training.parallel.strategy import Parallel

from .training_rank import WIDTHS, Log

VOCABULARY, STOP, ROW = 61, 2, 48
CONFIG = OnPolicyConfig(share=0.5, refresh=2, max_new_tokens=8)


def make_model(layers: int, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    shape = StudentConfig(hidden_size=32, num_hidden_layers=layers, **WIDTHS)
    base = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.2}
    return build_llama(shape, dtype, **base, bos_token_id=1, eos_token_id=STOP)


def make_samples() -> list[Sample]:
    """Return chats of two turns: requests of 3 to 9 tokens, and answers of 1 to 9."""
    random = np.random.default_rng(0)
    samples = []
    for _ in range(30):
        lengths = random.integers([3, 1, 3, 1], 10)
        ids = random.integers(3, VOCABULARY, lengths.sum()).astype(np.int32)
        samples.append(Sample(ids, np.repeat([False, True, False, True], lengths)))
    return samples


def make_data() -> PackedData:
    return PackedData(make_samples(), ROW, rows_per_step=4, seed=7)


def make_writer(
    student: Any, teacher: Any, config: OnPolicyConfig = CONFIG, seed: int = 7
) -> StudentWriter:
    parallel = Parallel(ParallelConfig(), "cpu")
    return StudentWriter(
        student, teacher, config, parallel, max_length=ROW, stop_token_ids=(STOP,), seed=seed
    )


class Job:
    """A training of five steps with refreshes before steps 0, 2 and 4."""

    def __init__(
        self,
        config: OnPolicyConfig = CONFIG,
        kind: type[OnPolicyData] = OnPolicyData,
    ) -> None:
        self.teacher, self.student = freeze(make_model(3, 1)), make_model(1, 0)
        ordinary = make_data()
        self.objective = Distillation(self.student, self.teacher)
        self.data = kind(
            ordinary,
            Prompts(ordinary.samples, ROW - config.max_new_tokens, seed=7),
            Schedule(config, ordinary.rows_per_step, last_step=5),
            make_writer(self.student, self.teacher, config),
        )
        self.log = Log()

    def run(self, folder: Path, stop_after: int = 0) -> checkpoint.Checkpoint:
        """Train, with a SIGTERM in step `stop_after` (from 1) if it is not 0."""
        loop = LoopConfig(
            max_steps=5,
            tokens_per_step=4 * ROW,
            micro_batch_tokens=ROW,
            eval_every=2,
            checkpoint_every=9,
            keep=9,
            optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1),
        )
        data = stop_after_step(self.data, stop_after)
        parallel = Parallel(ParallelConfig(), "cpu")
        fit(
            "t",
            self.objective,
            self.student,
            data,
            loop,
            parallel,
            folder,
            self.log,
            lambda: {"score": 0.0},
        )
        found = checkpoint.latest(folder / "checkpoints", report=print)
        assert found is not None
        return found
