"""Metrics: metrics.jsonl is the record; Weights & Biases and tensorboard mirror it."""

import json
import netrc
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from decoding.errors import UserError
from jobs.config import JobConfig, TrackerConfig
from jobs.files import write_bytes, write_text
from jobs.ranks import rank
from jobs.run_files import WRONG, DamagedLineError, damaged, parse_record
from jobs.run_folder import RunFolder

# public server of Weights & Biases, under which netrc files store logins
_WANDB_HOST = "api.wandb.ai"


@dataclass(frozen=True)
class Chart:
    """Scatter chart with one point per row. x, y: names of the columns."""

    name: str
    title: str
    rows: list[dict[str, Any]]
    x: str
    y: str


class Tracker:
    """Writer of metrics.jsonl, one JSON object per record, and of the enabled mirrors."""

    def __init__(
        self, folder: Path, config: TrackerConfig, run_name: str, job_config: dict[str, Any]
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._wandb = _start_wandb(folder, config, run_name, job_config)
        self._board = _start_tensorboard(folder) if config.tensorboard else None

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append a record of numbers, strings and lists. Only the numbers go to the mirrors."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)

    def show(
        self,
        tables: dict[str, list[dict[str, Any]]],
        charts: Sequence[Chart],
        images: dict[str, Path],
    ) -> None:
        """Send tables, charts and images to Weights & Biases, and the images to tensorboard too.

        tables: name -> rows; a column that a row lacks stays empty. images: name -> PNG file.
        """
        if self._wandb is not None:
            self._wandb.log(_wandb_media(tables, charts, images))
        if self._board is not None:
            from matplotlib.image import imread

            for name, path in images.items():
                self._board.add_image(name, imread(path)[..., :3], dataformats="HWC")

    def close(self) -> None:
        """Close metrics.jsonl and the mirrors."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._board is not None:
            self._board.close()

    def rewind(self, step: int) -> None:
        """Drop records after `step`, which a resumed run repeats, and an incomplete last line.

        Tensorboard drops these records too. Weights & Biases cannot, and ignores the repeated
        steps, whose values are equal. Raises UserError for a damaged line before the last one.
        """
        self._file.close()
        lines = self.path.read_bytes().splitlines()
        kept = []
        for number, line in enumerate(lines, start=1):
            try:
                if parse_record(line)["step"] <= step:
                    kept.append(line + b"\n")
            except WRONG as error:
                # A damaged last line is an interrupted write, whose step is repeated.
                if number < len(lines):
                    raise damaged(
                        self.path,
                        DamagedLineError(f"line {number}: {error}"),
                        "Remove this line, or delete the file: training continues without its "
                        "records",
                    ) from error
        write_bytes(self.path, b"".join(kept))
        self._file = self.path.open("a", encoding="utf-8")
        if self._board is not None:
            self._board.close()
            self._board = _start_tensorboard(self.path.parent, step + 1)


@contextmanager
def track_run(folder: RunFolder, config: Any, inputs: list[Path]) -> Iterator[Tracker]:
    """Write an unfinished manifest, and open a tracker inside the block.

    Call it on the main rank only. inputs: files and folders that the run reads, for the manifest.
    """
    folder.write_manifest(inputs, {}, finished=False)
    tracker = Tracker(folder.path, config.tracker, config.experiment, folder.config)
    try:
        yield tracker
    finally:
        tracker.close()


def check_tracker(config: JobConfig) -> None:
    """Raise UserError for an unknown mode, a missing package or a missing login.

    The check uses no network, so a login is found but not verified. Dry runs and ranks other than 0
    are not checked, because they do not track.
    """
    tracker = vars(config).get("tracker")
    if not isinstance(tracker, TrackerConfig) or config.dry_run or rank() > 0:
        return
    _check_mode(tracker)
    if tracker.tensorboard:
        _summary_writer()
    if tracker.wandb == "online" and not _has_login():
        raise UserError(
            "tracker.wandb is online, but no login to Weights & Biases was found. Run `wandb "
            "login` once, set WANDB_API_KEY, or use tracker=wandb_offline (`wandb sync` uploads "
            "later) or tracker=none"
        )


def _check_mode(config: TrackerConfig) -> None:
    """Raise UserError for an unknown mode of Weights & Biases."""
    if config.wandb not in ("online", "offline", "disabled"):
        raise UserError(f"tracker.wandb is '{config.wandb}', expected online, offline or disabled")


def _has_login() -> bool:
    """Return whether wandb would find credentials in the environment, settings or netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    settings = wandb.setup().settings
    if settings.api_key:
        return True
    for name in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        if (file := Path(name).expanduser()).is_file():
            try:
                known = netrc.netrc(file).hosts
            except (OSError, netrc.NetrcParseError):
                return False
            return bool({urlsplit(settings.base_url).netloc, _WANDB_HOST} & known.keys())
    return False


def _wandb_id(folder: Path) -> str:
    """Return the id of a folder's W&B run, so that a resumed run continues it.

    The first call creates the file `wandb_id`. Raises UserError if this file is damaged.
    """
    path = folder / "wandb_id"
    if not path.is_file():
        write_text(path, secrets.token_hex(4))
    content = path.read_bytes()
    if not re.fullmatch(rb"[\w-]{1,128}\s*", content):
        raise UserError(
            f"{path} is damaged: found {content[:40]!r}, expected the id of a W&B run. Delete it "
            f"to start another W&B run"
        )
    return content.decode().strip()


def _start_wandb(
    folder: Path, config: TrackerConfig, run_name: str, job_config: dict[str, Any]
) -> Any:
    _check_mode(config)
    if config.wandb == "disabled":
        return None
    import wandb

    return wandb.init(
        project=config.project,
        group=config.group or None,
        name=config.name or run_name,
        job_type=job_config.get("job"),
        dir=str(folder),
        mode="online" if config.wandb == "online" else "offline",
        config=job_config,
        id=_wandb_id(folder),
        resume="allow",
    )


def _wandb_media(
    tables: dict[str, list[dict[str, Any]]], charts: Sequence[Chart], images: dict[str, Path]
) -> dict[str, Any]:
    import wandb

    def table(rows: list[dict[str, Any]]) -> Any:
        columns: list[str | int] = list(dict.fromkeys(key for row in rows for key in row))
        return wandb.Table(
            columns=columns, data=[[row.get(str(name)) for name in columns] for row in rows]
        )

    scatters = {
        chart.name: wandb.plot.scatter(table(chart.rows), chart.x, chart.y, chart.title)
        for chart in charts
    }
    pictures = {name: wandb.Image(str(path)) for name, path in images.items()}
    return {**{name: table(rows) for name, rows in tables.items()}, **scatters, **pictures}


def _summary_writer() -> Any:
    """Return tensorboard's writer class. Raises UserError if tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError(
            f"tracker.tensorboard needs a package that is not installed ({error.name}). Run pip "
            f"install -e '.[train]', or use tracker=none"
        ) from error
    return SummaryWriter


def _start_tensorboard(folder: Path, purge_step: int | None = None) -> Any:
    return _summary_writer()(log_dir=str(folder / "tensorboard"), purge_step=purge_step)
