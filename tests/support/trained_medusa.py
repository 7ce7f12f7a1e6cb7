"""Medusa heads of the embedded target after some steps of training."""

from pathlib import Path

from hydra import compose, initialize_config_dir

import heads.train
from heads.train import schema_of
from jobs.config import typed
from jobs.job import CONF, register

TOY = (
    "loop.max_steps=40 loop.tokens_per_step=2048 loop.micro_batch_tokens=2048 "
    "loop.eval_every=0 data.max_samples=200 held_out.max_prompts=2 held_out.max_new_tokens=8"
)


def train_medusa(run_folder: Path) -> Path:
    """Train four heads for some 20 seconds on one core; return their folder."""
    schema = schema_of("medusa")
    register("heads.train", schema)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        given = ["head=medusa", *TOY.split(), f"output_dir={run_folder}"]
        heads.train.run(typed(compose("heads_train", given), schema))
    return run_folder / "drafter"
