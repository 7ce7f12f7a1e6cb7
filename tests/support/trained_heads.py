"""Heads of the embedded target after some steps of training."""

from pathlib import Path

import heads.train
from tests.support.configurations import configuration

TOY = (
    "loop.max_steps=40 loop.tokens_per_step=2048 loop.micro_batch_tokens=2048 "
    "loop.eval_every=0 data.max_samples=200 held_out.max_prompts=2 held_out.max_new_tokens=8"
)


def train_head(run_folder: Path, head: str, *overrides: str) -> Path:
    """Train a head for some 20 seconds on one core; return its folder.

    head, overrides: of heads.train.
    """
    given = [f"head={head}", *TOY.split(), f"output_dir={run_folder}", *overrides]
    heads.train.run(configuration("heads.train", *given))
    return run_folder / "drafter"
