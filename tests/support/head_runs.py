"""Small runs of `recurrent_drafting.train`."""

import json
from pathlib import Path
from typing import Any

from jobs.job import CONF
from recurrent_drafting.config import HeadTrainConfig
from tests.support.configurations import configuration

ROOT = CONF.parent
JOB = "recurrent_drafting.train"
SMALL = [
    "data.max_samples=40",
    "data.max_length=256",
    "held_out.max_prompts=4",
    "held_out.max_new_tokens=16",
    "loop.max_steps=6",
    "loop.tokens_per_step=1024",
    "loop.micro_batch_tokens=512",
    "loop.eval_every=3",
    "loop.checkpoint_every=2",
    "target.device=cpu",
]


def configured(target: Path, folder: Path, *overrides: str) -> HeadTrainConfig:
    given = [*SMALL, f"target.path={target}", f"output_dir={folder}", *overrides]
    return configuration(JOB, *given)


def command(target: Path, folder: Path, *overrides: str) -> list[str]:
    given = [*SMALL, f"target.path={target}", f"output_dir={folder}", "threads=1", *overrides]
    return [JOB, *given]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]
