"""Progress bar with remaining time; plain lines if the output is not a terminal."""

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY_SECONDS = 15.0


class ProgressBar:
    """Progress of one task: `with ProgressBar("distil", total) as bar: bar.update(done, "loss 1")`.

    total: number of units, or None if it is unknown; 100 with `percent`. start: number of units
    finished before. show: whether anything is printed. percent: the units are percent.
    """

    def __init__(
        self,
        title: str,
        total: float | None,
        start: float = 0,
        show: bool = True,
        percent: bool = False,
    ) -> None:
        self.title, self.show, self.percent = title, show, percent
        self.console = Console(file=sys.stderr)
        self.live = self.console.is_terminal and show
        self._printed = time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        count = self._count(start, total)
        self._id = self._progress.add_task(
            title, total=total, completed=int(start), note="", count=count
        )

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

    def update(self, done: float, note: str = "", total: float | None = None) -> None:
        """Show the progress.

        done: number of finished units. note: text next to the bar. total: the new total, of work
        that ends before its bound.
        """
        self._progress.update(self._id, completed=done, note=note, total=total)
        task, now = self._progress.tasks[0], time.monotonic()
        count = self._count(done, task.total)
        self._progress.update(self._id, count=count)
        if self.live or not self.show:
            return
        if now - self._printed < PLAIN_EVERY_SECONDS and done != task.total:
            return
        self._printed = now
        left = "" if task.time_remaining is None else f"  {task.time_remaining:.0f} s left"
        self.say(f"{self.title} {count}  {note}{left}")

    def _count(self, done: float, total: float | None) -> str:
        if self.percent:
            return f"{math.floor(done)}%"
        return f"{done:.0f}/{total:.0f}" if total else f"{done:.0f}"

    def say(self, text: str) -> None:
        """Print a line above the bar, unless `show` is false."""
        if self.show:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
