"""Progress bar with remaining time; plain lines if the output is not a terminal."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_PLAIN_EVERY_SECONDS = 15.0


class ProgressBar:
    """Progress of one task: `with ProgressBar("distil", total) as bar: bar.update(done, "loss 1")`.

    total: number of units, or None if it is unknown. start: number of units finished before. show:
    whether anything is printed.
    """

    def __init__(self, title: str, total: int | None, start: int = 0, show: bool = True) -> None:
        self.title, self.show = title, show
        self.console = Console(file=sys.stderr)
        self.live = self.console.is_terminal and show
        self._printed = time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self._id = self._progress.add_task(title, total=total, completed=start, note="")

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show the progress.

        done: number of finished units. note: text next to the bar. total: the new total, if it has
        changed.
        """
        self._progress.update(self._id, completed=done, note=note, total=total)
        if self.live or not self.show:
            return
        task, now = self._progress.tasks[0], time.monotonic()
        if now - self._printed < _PLAIN_EVERY_SECONDS and done != task.total:
            return
        self._printed = now
        of = f"/{task.total:.0f}" if task.total else ""
        left = "" if task.time_remaining is None else f"  {task.time_remaining:.0f} s left"
        self.say(f"{self.title} {done}{of}  {note}{left}")

    def say(self, text: str) -> None:
        """Print a line above the bar, unless `show` is false."""
        if self.show:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
