"""Metrics: metrics.jsonl is the truth, Weights & Biases and tensorboard mirror it."""

import json
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from training.config import TrackerConfig


class Tracker:
    """Appends one JSON object a record to metrics.jsonl and hands numbers on to the mirrors that are switched on."""

    def __init__(self, folder: Path, config: TrackerConfig, run_name: str, job_config: dict[str, Any]) -> None:
        self.path = folder / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._wandb = _start_wandb(folder, config, run_name, job_config)
        self._board = _start_tensorboard(folder) if config.tensorboard else None

    def log(self, step: int, values: dict[str, Any]) -> None:
        """One record. Values are numbers, strings or lists; numbers go to the mirrors."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._board is not None:
            self._board.close()

    def rewind(self, step: int) -> None:
        """Drop records of steps after `step`, which a resumed run makes again, and a last line that was cut off."""
        self._file.close()
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the write that a kill interrupted: its step is made again
            if record["step"] <= step:
                kept.append(line)
        self.path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")


def _start_wandb(folder: Path, config: TrackerConfig, run_name: str, job_config: dict[str, Any]) -> Any:
    if config.wandb == "disabled":
        return None
    if config.wandb not in ("online", "offline"):
        raise UserError(f"tracker.wandb is '{config.wandb}'; expected online, offline or disabled")
    import wandb

    return wandb.init(
        project=config.project,
        group=config.group or None,
        name=run_name,
        dir=str(folder),
        mode="online" if config.wandb == "online" else "offline",
        config=job_config,
        resume="allow",
    )


def _start_tensorboard(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder / "tensorboard"))
