"""Repetition of a unit's measurement while the machine stalls or other processes use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decoding.costs.contention import UNDISTURBED, waits
from eval.measure.deadline import Deadline
from eval.measure.measurement import Bench
from eval.measure.records import Record, stalled, undisturbed_share

ATTEMPTS = 3  # at a unit


@dataclass
class Repetition:
    """Measures units, some of them again; knows the seconds that are left for it."""

    bench: Bench
    deadline: Deadline

    def __post_init__(self) -> None:
        self._seconds = self.deadline.again_seconds

    def measure(
        self,
        measure: Callable[[], list[Record]],
        before: Sequence[Record],
        again: Callable[[], None],
    ) -> list[Record]:
        """Measure a unit up to ATTEMPTS times, as long as it stalls or is disturbed.

        Return the least disturbed of the attempts that did not stall, else the last one. before:
        the records of earlier units of the same part. again: called before each further attempt.
        Disturbed units are measured again within `Deadline.again_seconds` of a run.
        """
        attempts: list[list[Record]] = []
        while True:
            began = self.deadline.seconds
            number = len(attempts) + 1
            attempts.append(measure())
            if number > 1:
                self._seconds -= self.deadline.seconds - began
            disturbed = self._share(attempts[-1]) < UNDISTURBED and self._seconds > 0
            if number == ATTEMPTS or not (disturbed or stalled(attempts[-1], before)):
                break
            again()
        steady = [unit for unit in attempts if not stalled(unit, before)] or attempts[-1:]
        kept = max(steady, key=self._share)
        return [dataclasses.replace(one, attempt=len(attempts)) for one in kept]

    def _share(self, unit: Sequence[Record]) -> float:
        """Return the share of a unit's time in which decoding had its processors."""
        bench = self.bench
        place = (bench.target.device.type, bench.target.backend)
        judged = [one for one in unit if not waits(*place, bench.use_of(one.arm).schedule)]
        return undisturbed_share(judged) if judged else 1.0
