"""A dry run of `distill.train`: what it would cost, and the drafter's folder with weights of zero, to try serving with before training.

Nothing of the target's weights or of the data is read, and the zeros take no room: the weights file is sparse.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distill.config import TrainConfig
from distill.drafter_folder import write_card, write_untrained
from distill.student import build_student
from training.attention import PACKED
from training.config import LoopConfig
from training.models import dtype_of


def dry_run(config: TrainConfig, target_folder: Path, folder: Path, was_dry: bool) -> Path:
    """Print shapes and cost and write the untrained drafter to `folder`, unless a trained one is there. Returns `folder`.

    was_dry: what is there was written by a dry run, and is replaced.
    """
    target_config = AutoConfig.from_pretrained(target_folder)
    with torch.device("meta"):
        teacher = AutoModelForCausalLM.from_config(target_config, attn_implementation=PACKED)
        student = build_student(config.drafter, teacher, dtype_of(config.loop.dtype))
    print_cost(config.loop, student, teacher)
    if was_dry:
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        print(f"kept: {folder} is there already")
        return folder
    write_untrained(student, target_folder, folder, target_config.dtype or torch.float32, draft_tokens=4)
    write_card(
        folder,
        config.drafter.name,
        student,
        config.target.path,
        target_folder,
        {"sources": []},
        {"name": "nothing yet (dry run)"},
        {},
    )
    print(f"untrained drafter folder, to try serving with: {folder}")
    return folder


def print_cost(loop: LoopConfig, student: Any, teacher: Any = None) -> None:
    """Say what training `student`, and running a frozen `teacher` beside it, takes: operations a token and in all, and memory."""
    own, frozen = (
        sum(parameter.numel() for parameter in model.parameters()) if model else 0 for model in (student, teacher)
    )
    flops = 6 * own + 2 * frozen
    width = torch.finfo(dtype_of(loop.dtype)).bits // 8
    bytes_a_parameter = 16 if width == 4 else 2 * width + 12  # weights, gradient; float32 master and two moments
    print(f"student: {own / 1e6:.1f} M parameters" + (f"; teacher: {frozen / 1e6:.1f} M" if frozen else ""))
    print(f"cost: {flops / 1e6:,.0f} MFLOP a token (6 x student{' + 2 x teacher' if frozen else ''})")
    if loop.max_steps:
        tokens = loop.max_steps * loop.tokens_per_step
        print(f"plan: {tokens:,} tokens in {loop.max_steps:,} steps, {flops * tokens / 1e12:,.1f} TFLOP")
    else:
        print(
            f"plan: {loop.max_epochs:g} epochs; their tokens are known when the data is read (or give loop.max_steps)"
        )
    beside = f", {frozen * width / 1e6:,.0f} MB for the teacher" if frozen else ""
    print(f"memory: {own * bytes_a_parameter / 1e6:,.0f} MB for student, gradients and optimizer{beside}")
