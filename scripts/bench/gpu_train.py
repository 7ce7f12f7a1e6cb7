"""Part `train`: distillation from a 7B target, by distill.train and by `transformers.Trainer`.

The step of distill.train runs in one process: packed rows, the target's hidden states in every
step, one chunked forward KL, a bfloat16 drafter with float32 masters, torch's AdamW. The Trainer
pads its batches and computes complete logits (scripts/bench/padded.py). Both have the same models,
chats and dtype, and their losses on the same chats must agree. Weights are random, in published
shapes.
"""

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from decoding import devices
from decoding.costs.machine_limits import measure_limits
from decoding.costs.roofline import forward_budget
from decoding.models.native.weights import NativeConfig
from scripts.bench.gpu_training import TrainingSizes, measure_training, random_chats
from scripts.bench.padded import agree, both_losses, trainer_rate
from scripts.bench.random_models import LLAMA_7B, TOY_DRAFTER, TOY_TARGET, llama, random_model
from training.data.packing import Sample
from training.models.attention import PACKED
from training.models.layers import compile_layers, decoder_layers
from training.objectives import Distillation, freeze


@dataclass(frozen=True, kw_only=True)
class ComparisonSizes(TrainingSizes):
    """Target, drafter, chats and steps of a comparison."""

    drafter: LlamaConfig
    rounds: int  # rounds of each side, in turn
    backend: str = "inductor"  # of torch.compile


REAL = ComparisonSizes(
    target=LLAMA_7B,
    drafter=llama(5, 2560, 32, 11008),  # 796 M parameters (arXiv 2402.01528)
    dtype=torch.bfloat16,
    row=2048,
    forward_rows=4,
    step_rows=8,
    steps=5,
    rounds=2,
)
TOY = ComparisonSizes(
    target=TOY_TARGET,
    drafter=TOY_DRAFTER,
    dtype=torch.float32,
    row=32,
    forward_rows=2,
    step_rows=4,
    steps=1,
    chats=(8, 32),
    turn=8,
    rounds=1,
    backend="eager",  # generating code for a CPU takes a minute
)


def measure_ours(
    student: Any, target: Any, samples: list[Sample], sizes: ComparisonSizes, device: str
) -> dict[str, Any]:
    """Measure steps of distill.train, which change the student."""
    for each in (student, target):
        each.set_attn_implementation(PACKED)
    return measure_training(Distillation(student, target), student, samples, sizes, device)


def measure_trainer(
    student: Any, target: Any, samples: list[Sample], sizes: ComparisonSizes, device: str
) -> dict[str, Any]:
    """Measure the Trainer's steps, which change the student.

    A step has about as many tokens as a step of `measure_ours`.
    """
    for each in (student, target):
        each.set_attn_implementation("sdpa")
    devices.peak_bytes(torch.device(device))  # resets the peak
    tokens = sum(len(sample.ids) for sample in samples)
    per_step = max(1, round(sizes.step_rows * sizes.row / (tokens / len(samples))))
    with TemporaryDirectory() as folder:
        rate = trainer_rate(student, target, samples, per_step, sizes.steps, Path(folder), device)
    return {
        "tokens_per_second": rate,
        "chats_per_step": per_step,
        "peak_bytes": devices.peak_bytes(torch.device(device)),
    }


def operations_of(sizes: ComparisonSizes, samples: list[Sample]) -> float:
    """Return the operations of both models for a token of the chats.

    The target has a forward; the drafter has a forward, and a backward of twice as many operations.
    Logits are computed for supervised tokens.
    """
    lengths = [len(sample.ids) for sample in samples]
    supervised = sum(int(sample.mask.sum()) for sample in samples) / sum(lengths)
    # weighted by tokens: a longer chat has more of them
    length = sum(length**2 for length in lengths) / sum(lengths)

    def forward(shape: LlamaConfig) -> float:
        config = NativeConfig.from_dict(shape.to_dict())
        budget = forward_budget(config, sizes.dtype, length, 0)
        head = 2 * config.hidden_size * config.head_rows
        return budget.operations / length - (1 - supervised) * head

    return forward(sizes.target) + 3 * forward(sizes.drafter)


@contextmanager
def compiled_layers(backend: str, *models: Any) -> Iterator[None]:
    """Compile the decoder layers of the models (training/models/layers.py) inside the block."""
    for model in models:
        compile_layers(model, backend)
    yield
    for layer in decoder_layers(nn.ModuleList(models)):
        del layer.forward


def measure_compiled(
    student: Any, target: Any, samples: list[Sample], sizes: ComparisonSizes, device: str
) -> dict[str, Any]:
    """Measure steps of distill.train with loop.compile=true; compiling does not count."""
    with compiled_layers(sizes.backend, student, target):
        began = time.perf_counter()
        # batches of two shapes: the second makes the code serve all
        measure_ours(student, target, samples, replace(sizes, steps=1), device)
        compiling = time.perf_counter() - began
        return {
            **measure_ours(student, target, samples, sizes, device),
            "first_steps_seconds": compiling,
        }


SIDES = {"ours": measure_ours, "ours, compiled": measure_compiled, "trainer": measure_trainer}


@torch.inference_mode(False)
def run(device: str, toy: bool, figures: Any) -> None:
    """Compare the losses of both sides, then the tokens/s of all."""
    sizes = TOY if toy else REAL
    devices.set_default_gpu(torch.device(device))
    target = freeze(random_model(sizes.target, sizes.dtype, device))
    drafter = random_model(sizes.drafter, sizes.dtype, device)
    samples = random_chats(sizes)
    losses = both_losses(drafter, target, samples[:8], sizes.row)
    figures.add("loss on the same chats", losses)
    figures.expect("both sides compute the same loss", agree(losses["ours"], losses["trainer"]))
    limits = measure_limits(1 << 20, sizes.dtype, device, 0.001 if toy else 0.5)
    figures.add("operations per second of a matrix product", limits.operations_a_second)
    operations = operations_of(sizes, samples)
    figures.add("operations of the models for a token", operations)
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(1, sizes.rounds + 1):
        for name, measure in SIDES.items():
            if figures.in_time(f"{name}, round {number}"):
                found = measure(copy.deepcopy(drafter), target, samples, sizes, device)
                rates[name].append(found["tokens_per_second"])
                found["operations_per_second"] = operations * found["tokens_per_second"]
                found["share_of_product"] = (
                    found["operations_per_second"] / limits.operations_a_second
                )
                figures.add(f"{name}, round {number}", found)
                finite = all(map(math.isfinite, found.get("losses", [])))
                figures.expect(f"a finite loss, {name}, round {number}", finite)
                devices.release(torch.device(device))
    if all(rates.values()):
        for name in ("ours", "ours, compiled"):
            figures.add(f"{name} over trainer", median(rates[name]) / median(rates["trainer"]))
