"""Metrics: metrics.jsonl is the truth, Weights & Biases and tensorboard mirror it."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from training.checkpoint import write_bytes, write_text
from training.config import TrackerConfig
from training.run_files import WRONG, DamagedLineError, damaged, record_of
from training.run_folder import RunFolder


@dataclass(frozen=True)
class Chart:
    """A scatter chart: a point for every row, at its columns x and y."""

    name: str
    title: str
    rows: list[dict[str, Any]]
    x: str
    y: str


class Tracker:
    """Appends one JSON object a record to metrics.jsonl and hands numbers on to the mirrors that are switched on."""

    def __init__(self, folder: Path, config: TrackerConfig, run_name: str, job_config: dict[str, Any]) -> None:
        self.path = folder / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._wandb = _start_wandb(folder, config, run_name, job_config)
        self._board = _start_tensorboard(folder, None) if config.tensorboard else None

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

    def show(self, tables: dict[str, list[dict[str, Any]]], charts: Sequence[Chart], images: dict[str, Path]) -> None:
        """What is no number of a step, by name: Weights & Biases takes all of it, tensorboard the images.

        tables: rows of one form. images: files that both can read, such as PNG.
        """
        if self._wandb is not None:
            self._wandb.log(_wandb_media(tables, charts, images))
        if self._board is not None:
            from matplotlib.image import imread

            for name, path in images.items():
                self._board.add_image(name, imread(path)[..., :3], dataformats="HWC")

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._board is not None:
            self._board.close()

    def rewind(self, step: int) -> None:
        """Drop records of steps after `step`, which a resumed run makes again, and a last line that was cut off.

        Tensorboard drops them too; Weights & Biases cannot, and passes over steps that it has, whose values are the same.
        """
        self._file.close()
        lines = self.path.read_bytes().splitlines()
        kept = []
        for number, line in enumerate(lines, start=1):
            try:
                if record_of(line)["step"] <= step:
                    kept.append(line + b"\n")
            except WRONG as error:
                if number < len(lines):  # else the write that a kill interrupted: its step is made again
                    remedy = "Take this line out, or delete the file: training continues without its records"
                    raise damaged(self.path, DamagedLineError(f"line {number}: {error}"), remedy) from error
        write_bytes(self.path, b"".join(kept))
        self._file = self.path.open("a", encoding="utf-8")
        if self._board is not None:
            self._board.close()
            self._board = _start_tensorboard(self.path.parent, step + 1)


class Recording:
    """`with Recording(...) as tracker`: the main rank's manifest is written first and its tracker closed last; other ranks get None."""

    def __init__(self, run_folder: RunFolder, config: Any, inputs: list[Path], is_main: bool) -> None:
        self.tracker: Tracker | None = None
        if is_main:
            run_folder.write_manifest(inputs, {}, finished=False)
            self.tracker = Tracker(run_folder.path, config.tracker, config.experiment, run_folder.config)

    def __enter__(self) -> Tracker | None:
        return self.tracker

    def __exit__(self, *_: object) -> None:
        if self.tracker is not None:
            self.tracker.close()


def _start_wandb(folder: Path, config: TrackerConfig, run_name: str, job_config: dict[str, Any]) -> Any:
    if config.wandb == "disabled":
        return None
    if config.wandb not in ("online", "offline"):
        raise UserError(f"tracker.wandb is '{config.wandb}'; expected online, offline or disabled")
    import wandb

    identity = folder / "wandb_id"  # a resumed run goes on in the same W&B run
    if not identity.is_file():
        write_text(identity, secrets.token_hex(4))
    return wandb.init(
        project=config.project,
        group=config.group or None,
        name=run_name,
        dir=str(folder),
        mode="online" if config.wandb == "online" else "offline",
        config=job_config,
        id=identity.read_text(),
        resume="allow",
    )


def _wandb_media(
    tables: dict[str, list[dict[str, Any]]], charts: Sequence[Chart], images: dict[str, Path]
) -> dict[str, Any]:
    import wandb

    def table(rows: list[dict[str, Any]]) -> Any:
        return wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])

    scatters = {chart.name: wandb.plot.scatter(table(chart.rows), chart.x, chart.y, chart.title) for chart in charts}
    pictures = {name: wandb.Image(str(path)) for name, path in images.items()}
    return {**{name: table(rows) for name, rows in tables.items()}, **scatters, **pictures}


def _start_tensorboard(folder: Path, purge_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError(
            f'tracker.tensorboard needs a package that is not installed ({error.name}): pip install -e ".[train]", or take tracker=none'
        ) from error

    return SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge_step)
