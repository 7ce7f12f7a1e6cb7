"""Part `train`: distillation from a 7B target, our step against a `transformers.Trainer` loop.

The step is that of distill.train in one process: packed rows, the target's hidden states in every
step, one chunked forward KL, a bfloat16 drafter with float32 masters, torch's AdamW. The other side
pads its batches and takes whole logits (scripts/bench/padded.py); both have the same models, chats
and dtype, and their losses on the same chats must agree. Weights are random, in published shapes.
"""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from decoding import devices
from scripts.bench import gpu_training
from scripts.bench.gpu_training import chats, frozen_target, model, ours
from scripts.bench.padded import agree, both_losses, trainer_rate
from scripts.bench.random_models import Shape
from training.data.packing import Sample
from training.models.attention import PACKED
from training.objectives import Distillation


@dataclass(frozen=True)
class ComparisonSizes(gpu_training.TrainingSizes):
    """Target, drafter, chats and steps of a comparison."""

    drafter: Shape
    rounds: int  # rounds of each side, in turn


REAL = ComparisonSizes(
    target=Shape(32, 4096, 32, 11008),  # LLaMA-7B
    drafter=Shape(5, 2560, 32, 11008),  # 796 M parameters (arXiv 2402.01528)
    dtype=torch.bfloat16,
    row=2048,
    forward_rows=4,
    step_rows=8,
    steps=5,
    chats=(64, 2049),  # about ShareGPT's mean
    turn=250,
    rounds=2,
)
TOY = ComparisonSizes(
    target=Shape(2, 32, 4, 48, 2, 8, 64),
    drafter=Shape(1, 32, 4, 48, 4, 8, 64),
    dtype=torch.float32,
    row=32,
    forward_rows=2,
    step_rows=4,
    steps=1,
    chats=(8, 32),
    turn=8,
    rounds=1,
)


def our_side(
    drafter: Any, target: Any, samples: list[Sample], sizes: ComparisonSizes, device: str
) -> dict[str, Any]:
    """Measure our steps on a copy of the drafter."""
    for each in (drafter, target):
        each.set_attn_implementation(PACKED)
    devices.peak_bytes(torch.device(device))
    objective = Distillation(copy.deepcopy(drafter), target)
    return ours(objective, objective.student, samples, sizes, device)


def trainer_side(
    drafter: Any, target: Any, samples: list[Sample], sizes: ComparisonSizes, device: str
) -> dict[str, Any]:
    """Measure the Trainer's steps on a copy of the drafter, with the tokens of our step."""
    for each in (drafter, target):
        each.set_attn_implementation("sdpa")
    devices.peak_bytes(torch.device(device))
    tokens = sum(len(sample.ids) for sample in samples)
    per_step = max(1, round(sizes.step_rows * sizes.row / (tokens / len(samples))))
    with TemporaryDirectory() as folder:
        student = copy.deepcopy(drafter)
        rate = trainer_rate(student, target, samples, per_step, sizes.steps, Path(folder), device)
    return {
        "tokens_per_second": rate,
        "chats_per_step": per_step,
        "peak_bytes": devices.peak_bytes(torch.device(device)),
    }


@torch.inference_mode(False)
def run(device: str, toy: bool, figures: Any) -> None:
    """Compare the losses of both sides, then their rates."""
    sizes = TOY if toy else REAL
    devices.set_default_gpu(torch.device(device))
    target, drafter, samples = (
        frozen_target(sizes, device),
        model(sizes.drafter, sizes, device),
        chats(sizes),
    )
    losses = both_losses(drafter, target, samples[:8], sizes.row)
    figures.add("loss on the same chats", losses)
    figures.expect("both sides compute the same loss", agree(losses))
    rates: dict[str, list[float]] = {"ours": [], "trainer": []}
    for number in range(1, sizes.rounds + 1):
        for name, side in (("ours", our_side), ("trainer", trainer_side)):
            if figures.in_time(f"{name}, round {number}"):
                found = side(drafter, target, samples, sizes, device)
                figures.add(f"{name}, round {number}", found)
                figures.expect(
                    f"a finite loss, round {number}",
                    all(map(math.isfinite, found.get("losses", []))),
                )
                rates[name].append(found["tokens_per_second"])
                devices.release(torch.device(device))
    if all(rates.values()):
        figures.add("ours over trainer", median(rates["ours"]) / median(rates["trainer"]))
