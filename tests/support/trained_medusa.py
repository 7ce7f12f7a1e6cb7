"""Medusa heads of the embedded target after some steps of training."""

from pathlib import Path

import heads.train
from tests.support.configurations import configuration

TOY = (
    "loop.max_steps=40 loop.tokens_per_step=2048 loop.micro_batch_tokens=2048 "
    "loop.eval_every=0 data.max_samples=200 held_out.max_prompts=2 held_out.max_new_tokens=8"
)


def train_medusa(run_folder: Path) -> Path:
    """Train four heads for some 20 seconds on one core; return their folder."""
    given = ["head=medusa", *TOY.split(), f"output_dir={run_folder}"]
    heads.train.run(configuration("heads.train", *given))
    return run_folder / "drafter"
