"""Bound on the seconds of measurement, kept in the run folder.

Prompts are measured in blocks. The prompts of a block are measured under every condition, by every
drafter and the baseline. A block is always finished, so all rows have the same prompts. The seed
shuffles the prompts, so time decides how many of them are measured and not which.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from decoding.values import is_number
from jobs.files import write_text
from jobs.run_files import read_object

FILE = "seconds.json"
# Minimum numbers of blocks, measured even beyond the bound: a speedup over fewer than five prompts
# has no interval.
LEAST = {"sweep": 2, "main": 5}
UNTIL = {"sweep": 0.4, "main": 1.0}  # shares of the bound by which the parts end
COSTS = 0.1  # share of the bound for measuring the costs that stopping rules use
USUAL_COSTS = 120.0  # seconds for it without a bound
AGAIN = 0.1  # share of the bound for measuring again what other processes disturbed
USUAL_AGAIN = 120.0  # seconds for it without a bound

_REMEDY = "Delete it: the records are kept, and the time spent before is not counted"


def _spent_of(values: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the seconds spent and the longest block of each part, as `Deadline.count` wrote them.

    Raises KeyError or ValueError for values of another form.
    """
    seconds, longest = values["seconds"], values["longest_block"]
    if not is_number(seconds) or seconds < 0:
        raise ValueError(f"seconds is {seconds!r}, expected a number from 0 up")
    if not isinstance(longest, dict) or not all(
        is_number(value) and value >= 0 for value in longest.values()
    ):
        raise ValueError(f"longest_block is {longest!r:.80}, expected seconds by part")
    return seconds, longest


class Deadline:
    """Time limit of a run: the seconds spent, and whether another block fits."""

    def __init__(
        self, max_seconds: float, folder: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the seconds that earlier runs spent.

        max_seconds: limit on all runs in this folder together; 0: no limit. Raises UserError for a
        damaged seconds.json.
        """
        self.max_seconds = max_seconds or math.inf
        self._file, self._clock = folder / FILE, clock
        self._earlier, self._longest = 0.0, dict[str, float]()
        if self._file.is_file():
            self._earlier, self._longest = read_object(self._file, _REMEDY, _spent_of)
        self._began = clock()

    @property
    def bounds(self) -> bool:
        """Whether the measurement has a bound."""
        return self.max_seconds < math.inf

    @property
    def seconds(self) -> float:
        """Seconds spent on measuring so far, by earlier runs too."""
        return self._earlier + self._clock() - self._began

    @property
    def costs_seconds(self) -> float:
        """Limit on the seconds that measure the costs used by stopping rules and drafters.

        Each cost takes at least three windows, however long they are.
        """
        return COSTS * self.max_seconds if self.bounds else USUAL_COSTS

    @property
    def again_seconds(self) -> float:
        """Limit on the seconds that measure again what other processes disturbed."""
        return AGAIN * self.max_seconds if self.bounds else USUAL_AGAIN

    def has_room(self, part: str, blocks: int) -> bool:
        """Return whether to measure another block of a part after `blocks` of them.

        True without a bound, and below the part's minimum of blocks. Otherwise the block must fit
        if it lasts as long as the part's longest one so far.
        """
        if not self.bounds or blocks < LEAST[part]:
            return True
        return self.seconds + self._longest.get(part, 0.0) <= self.max_seconds * UNTIL[part]

    def overrun_seconds(self, blocks: int) -> float:
        """Return the seconds spent if the minimum of the main part exceeded the bound, else 0.

        blocks: number of blocks of the main part that were measured.
        """
        spent = self.seconds
        return spent if blocks <= LEAST["main"] and spent > self.max_seconds else 0.0

    def count(self, part: str, seconds: float) -> None:
        """Record the seconds that a block of a part took, and write the run folder's file."""
        self._longest[part] = max(seconds, self._longest.get(part, 0.0))
        write_text(
            self._file, json.dumps({"seconds": self.seconds, "longest_block": self._longest})
        )
