"""Small runs of `heads.train` for heads of every kind, in this process or in ranks.

`python -m tests.support.head_ranks REQUEST` (JSON) trains the heads one after another as one rank,
so that all share the start of the process and its group.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState

import heads.train
from tests.support import forks
from tests.support.configurations import configuration
from training.parallel.strategy import THREAD_EXIT_SECONDS, Parallel

MODULE = "tests.support.head_ranks"
SMALL = [
    "data.max_samples=16",
    "data.max_length=96",
    "held_out.max_prompts=1",
    "held_out.max_new_tokens=4",
    "loop.max_steps=4",
    "loop.tokens_per_step=384",
    "loop.micro_batch_tokens=192",
    "loop.eval_every=2",
    "loop.checkpoint_every=2",
    "loop.optimizer.lr=0.01",
    "target.device=cpu",
    "threads=1",
]


def configured(name: str, target: Path, folder: Path, *overrides: str) -> Any:
    """Return the configuration of a small training of a kind of head."""
    given = [*SMALL, f"head={name}", f"target.path={target}", f"output_dir={folder}"]
    return configuration("heads.train", *given, *_by_kind(name), *overrides)


def _by_kind(name: str) -> list[str]:
    """Return the settings with which rows weigh differently, for kinds that sample their drafts."""
    if name in ("recurrent", "medusa", "early_exit"):
        return []
    few = ["loss.predict_n_tokens=4"]
    if name in ("eagle1", "eagle3", "p_eagle"):
        return few
    changed = ["head.rank=2"] if name == "sdsat" else []  # layers of the target, too
    return [*few, "loss.drafts_per_row=30", *changed]


def train_in_ranks(target: Path, folder: Path, names: Sequence[str], *overrides: str) -> None:
    """Train a head of each kind in two ranks, one after another, in folders of their names."""
    request = [str(target), str(folder), names, overrides]
    forks.run_ranks(MODULE, json.dumps(request), timeout=500)


def losses(folder: Path) -> list[float]:
    """Return the losses of a run's steps."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [record["loss"] for record in records if "loss" in record]


def _train_all(target: str, folder: str, names: list[str], overrides: list[str]) -> None:
    """Train all heads in one process group, which no job closes."""
    Parallel.close = Parallel.wait  # type: ignore[method-assign]
    for name in names:
        AcceleratorState._reset_state(reset_partial_state=True)  # of the job before
        heads.train.run(configured(name, Path(target), Path(folder, name), *overrides))
    dist.destroy_process_group()
    time.sleep(THREAD_EXIT_SECONDS)  # see Parallel.close


if __name__ == "__main__":
    _train_all(*json.loads(sys.argv[1]))
