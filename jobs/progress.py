"""Progress bar with rate and remaining time; single lines where the output is no terminal."""

import sys
import time
from collections import deque
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
# window of the rate and the remaining time, as in the live bar
_WINDOW_SECONDS = 30.0


class ProgressBar:
    """Progress of one task.

    `with ProgressBar("distil", total) as bar: bar.update(done, "loss 1.23")`; total: number of
    units, None where it is not known yet.
    """

    def __init__(self, title: str, total: int | None, start: int = 0, show: bool = True) -> None:
        self.title, self.total, self.show = title, total, show
        self.console = Console(file=sys.stderr)
        self.live = self.console.is_terminal and show
        self._printed = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque([(self._printed, start)])
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._progress = Progress(*columns, *times, console=self.console, disable=not self.live)
        self._task = self._progress.add_task(title, total=total, completed=start, note="")

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

        done: units finished. note: text next to the bar. total: the new total, where it has
        changed.
        """
        self.total = self.total if total is None else total
        self._progress.update(self._task, completed=done, note=note, total=self.total)
        now = time.monotonic()
        self._recent.append((now, done))
        while len(self._recent) > 2 and now - self._recent[1][0] > _WINDOW_SECONDS:
            self._recent.popleft()
        ended = done == self.total
        if self.live or not self.show or (now - self._printed < _PLAIN_EVERY_SECONDS and not ended):
            return
        self._printed = now
        since, before = self._recent[0]
        rate = (done - before) / max(now - since, 1e-9)
        left = (
            f"/{self.total}  {note}  {(self.total - done) / rate if rate > 0 else 0.0:.0f} s left"
            if self.total
            else f"  {note}"
        )
        self.say(f"{self.title} {done}{left}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.show:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
