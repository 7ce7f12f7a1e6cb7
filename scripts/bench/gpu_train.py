"""Part `train`: distillation from a 7B target, by distill.train and by `transformers.Trainer`.

The step of distill.train runs in one process: packed rows, the target's hidden states in every
step, one chunked forward KL, a bfloat16 drafter with float32 masters, torch's AdamW. The Trainer
pads its batches and computes complete logits (scripts/bench/padded.py). Both have the same models,
chats and dtype, and their losses on the same chats must agree. Weights are random, in published
shapes.
"""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig

from decoding import devices
from scripts.bench.gpu_training import TrainingSizes, measure_training, random_chats
from scripts.bench.padded import agree, both_losses, trainer_rate
from scripts.bench.random_models import LLAMA_7B, TOY_DRAFTER, TOY_TARGET, llama, random_model
from training.data.packing import Sample
from training.models.attention import PACKED
from training.objectives import Distillation, freeze


@dataclass(frozen=True, kw_only=True)
class ComparisonSizes(TrainingSizes):
    """Target, drafter, chats and steps of a comparison."""

    drafter: LlamaConfig
    rounds: int  # rounds of each side, in turn


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


@torch.inference_mode(False)
def run(device: str, toy: bool, figures: Any) -> None:
    """Compare the losses of both sides, then their tokens/s."""
    sizes = TOY if toy else REAL
    devices.set_default_gpu(torch.device(device))
    target = freeze(random_model(sizes.target, sizes.dtype, device))
    drafter = random_model(sizes.drafter, sizes.dtype, device)
    samples = random_chats(sizes)
    losses = both_losses(drafter, target, samples[:8], sizes.row)
    figures.add("loss on the same chats", losses)
    figures.expect("both sides compute the same loss", agree(losses["ours"], losses["trainer"]))
    rates: dict[str, list[float]] = {"ours": [], "trainer": []}
    for number in range(1, sizes.rounds + 1):
        for name, measure in (("ours", measure_ours), ("trainer", measure_trainer)):
            if figures.in_time(f"{name}, round {number}"):
                found = measure(copy.deepcopy(drafter), target, samples, sizes, device)
                figures.add(f"{name}, round {number}", found)
                finite = all(map(math.isfinite, found.get("losses", [])))
                figures.expect(f"a finite loss, round {number}", finite)
                rates[name].append(found["tokens_per_second"])
                devices.release(torch.device(device))
    if all(rates.values()):
        figures.add("ours over trainer", median(rates["ours"]) / median(rates["trainer"]))
