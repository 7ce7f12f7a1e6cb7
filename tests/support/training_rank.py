"""A small training job for tests of parallelism, in this process or as one rank.

`python -m tests.support.training_rank SPEC` (JSON) runs a rank. Each rank writes its report to
FOLDER/rank<N>.json; rank 0 also writes the exported weights.
"""

import dataclasses
import itertools
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from jobs.config import ParallelConfig
from jobs.interrupts import Interrupted
from tests.support import forks
from training.config import LoopConfig, StudentConfig
from training.data.packing import PackedData, Sample
from training.loop import fit
from training.models.build import build_llama, dtype_of
from training.objectives import Distillation, freeze, hidden_states
from training.optimizer_config import OptimizerConfig
from training.parallel.strategy import Parallel

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.support.training_rank"
VOCABULARY = 67  # not a multiple of the number of ranks
WIDTHS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


@dataclass
class Spec:
    """Settings of the training job, and the faults that it simulates."""

    folder: str
    kind: str = "single"
    steps: int = 6
    dtype: str = "float32"
    stop_after: int = 0  # steps before a SIGTERM
    divisor: str = "global"  # global | rank: the mistake of dividing by each rank's own count
    # loop.max_seconds, on a clock that advances by one second at each reading, by six on ranks
    # other than 0
    seconds: float = 0.0
    loop: dict[str, Any] = field(default_factory=dict)
    tied: bool = False


def make_data() -> PackedData:
    """Return packed rows of 64 tokens, four per step.

    Their random masks give ranks unequal numbers of supervised tokens.
    """
    random = np.random.default_rng(0)
    samples = []
    for _ in range(80):
        ids = random.integers(0, VOCABULARY, int(random.integers(3, 40))).astype(np.int32)
        mask = random.random(len(ids)) < random.random()
        mask[0], mask[-1] = False, True
        samples.append(Sample(ids, mask))
    return PackedData(samples, 64, rows_per_step=4, seed=7)


def make_model(layers: int, seed: int, dtype: torch.dtype, tied: bool = False) -> Any:
    torch.manual_seed(seed)
    shape = StudentConfig(hidden_size=32, num_hidden_layers=layers, **WIDTHS)
    base = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.1}
    return build_llama(shape, dtype, **base, tie_word_embeddings=tied)


class Watched(Parallel):
    """Parallel that stores the optimizer, whose bytes are counted."""

    def prepare(self, *arguments: Any) -> Any:
        wrapped, self.optimizer = super().prepare(*arguments)
        return wrapped, self.optimizer


class Log:
    """Recorder of the loop's records in memory."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def rewind(self, step: int) -> None: ...

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.records.append({"step": step, **values})


def run(spec: Spec) -> dict[str, Any]:
    """Train as one rank or alone, and return the report of rank<N>.json.

    The report has the losses, gradient norms and held-out scores of the run, and the bytes of
    weights and optimizer states on this rank.
    """
    torch.set_num_threads(1)
    parallel = Watched(ParallelConfig(kind=spec.kind), "cpu")
    dtype = dtype_of(spec.dtype)
    teacher = parallel.place_frozen(freeze(make_model(3, 1, dtype)))
    student = make_model(2, 0, dtype, spec.tied)
    objective = Distillation(student, teacher)
    data = make_data()
    config = {
        "tokens_per_step": 256,
        "micro_batch_tokens": 64,
        "eval_every": 3,
        "checkpoint_every": 3,
        "keep": 9,
    }
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=2, weight_decay=0.1, clip=0.2)
    bounds = {"max_steps": spec.steps, "max_seconds": spec.seconds}
    loop = LoopConfig(**(config | bounds | {"dtype": spec.dtype} | spec.loop), optimizer=optimizer)
    _disturb(spec, data, parallel, student)
    log = Log()

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        """Return the last logged step as the score, and the means of both models' hidden states.

        The means, summed as `seen`, depend on the complete weights, wherever their parts are.
        """
        from training.data.packing import collate

        batch = collate(data.samples, data.rows[:1], data.capacity)
        assert student.lm_head.weight.shape == (VOCABULARY, 32)
        hidden = batch.at_supervised(hidden_states(student, batch))
        teachers = batch.at_supervised(hidden_states(teacher, batch))
        return {
            "score": float(log.records[-1]["step"]) if log.records else 0.0,
            "seen": float(hidden.double().mean() + teachers.double().mean()),
        }

    interrupted = False
    try:
        clock = partial(next, itertools.count(0.0, 6.0 if parallel.rank else 1.0))
        fit("t", objective, student, data, loop, parallel, Path(spec.folder), log, evaluate, clock)
    except Interrupted:
        interrupted = True
    steps = [record for record in log.records if "loss" in record]
    report = {
        "interrupted": interrupted,
        "losses": [record["loss"] for record in steps],
        "norms": [record["gradient_norm"] for record in steps],
        "acceptance": [record["acceptance"] for record in steps],
        "progress": [record["progress"] for record in steps],
        "seen": [record["held_out_seen"] for record in log.records if "held_out_seen" in record],
        "state_bytes": state_bytes(parallel.optimizer),
        "frozen_bytes": sum(map(local_bytes, teacher.parameters())),
        "weight_bytes": parallel.weight_bytes,
        "deepspeed": sys.modules.get("deepspeed") is not None,
    }
    os.makedirs(spec.folder, exist_ok=True)
    Path(spec.folder, f"rank{parallel.rank}.json").write_text(json.dumps(report))
    if parallel.is_main and not interrupted:
        weights = {
            name: tensor.detach().clone().contiguous()
            for name, tensor in student.named_parameters()
        }
        save_file(weights, Path(spec.folder, "exported.safetensors"))
    parallel.close()
    return report


def _disturb(spec: Spec, data: PackedData, parallel: Any, student: Any) -> None:
    """Add the faults that `spec` asks for, and record the bytes of the weights before every step.

    After `stop_after` calls for a step's rows the process gets a SIGTERM.
    """
    rows_of, count_of = data.step_rows, data.supervised_in
    calls = 0

    def step_rows(step: int) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == spec.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        copies = (
            [parallel.inner.student]
            if parallel.inner.student is student
            else [parallel.inner.student, student]
        )
        parallel.weight_bytes = sum(
            local_bytes(parameter) for copy in copies for parameter in copy.parameters()
        )
        return rows_of(step)

    data.step_rows = step_rows  # type: ignore[method-assign]
    if spec.divisor == "rank":
        data.supervised_in = lambda rows: (
            parallel.world_size * count_of(rows[parallel.rank :: parallel.world_size])
        )  # type: ignore[method-assign]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is on this rank."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_bytes(tensor: torch.Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def state_bytes(optimizer: Any) -> dict[str, int]:
    """Return the bytes on this rank of moments, and of master weights that are separate tensors."""
    if hasattr(optimizer, "engine"):
        states = optimizer.engine.optimizer.state
        masters = list(states)
    else:
        states = optimizer.optimizer.state
        masters = [
            master
            for master, weight in zip(optimizer.masters, optimizer.parameters)
            if master is not weight
        ]
    moments = [state[key] for state in states.values() for key in ("exp_avg", "exp_avg_sq")]
    return {"moments": sum(map(local_bytes, moments)), "masters": sum(map(local_bytes, masters))}


def run_ranks(spec: Spec, ranks: int = 2, timeout: float = 180) -> dict[str, Any]:
    """Run the job in `ranks` processes, check that all succeed, and return the report of rank 0."""
    forks.run_ranks(MODULE, _words(spec), ranks=ranks, timeout=timeout)
    return json.loads(Path(spec.folder, "rank0.json").read_text())


def start_ranks(spec: Spec, ranks: int) -> list[forks.Fork]:
    return forks.start_ranks(MODULE, _words(spec), ranks=ranks)


def _words(spec: Spec) -> str:
    return json.dumps(dataclasses.asdict(spec))


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a finished run exported."""
    return load_file(folder / "exported.safetensors")


if __name__ == "__main__":
    asked = Spec(**json.loads(sys.argv[1]))
    if not asked.kind.startswith("zero"):
        sys.modules["deepspeed"] = None  # type: ignore[assignment]  # to import it is an error
    run(asked)
