"""Clock of a run with a bound in seconds: elapsed time, and whether another step fits."""

from collections.abc import Callable
from dataclasses import replace

from decoding.errors import UserError
from training.bounds import Bounds, Progress
from training.parallel.strategy import Parallel

PACE_WEIGHT = 0.2  # weight of the last step in the pace


class Timer:
    """Clock of a run, which adds its readings to `progress`.

    All ranks use rank 0's clock. It is read only if the run has a bound in seconds.
    """

    def __init__(
        self, progress: Progress, bounds: Bounds, parallel: Parallel, clock: Callable[[], float]
    ) -> None:
        self._progress, self._limits = progress, bounds
        self._parallel, self._clock = parallel, clock
        self._before = self._read()

    @property
    def bounds(self) -> Bounds:
        """Return the run's bounds, with the seconds of the last evaluation reserved at the end."""
        limits = self._limits
        return replace(limits, seconds=limits.seconds - self._progress.look_seconds)

    def time_evaluation(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Evaluate before the first step to measure the time, if the run has a bound in seconds.

        Does nothing in a resumed run. Raises UserError if the bound leaves no time for a step.
        """
        if not self._limits.has_seconds or self._progress.step:
            return
        self.run_evaluation(evaluate)
        if self.bounds.seconds <= self._progress.elapsed:
            raise UserError(
                f"loop.max_seconds is {self._limits.seconds:g}, but a held-out evaluation alone "
                f"takes {self._progress.look_seconds:.1f} s, and there is one before the first "
                f"step and one after the last. Raise loop.max_seconds, or hold out less text"
            )

    def run_evaluation(self, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Evaluate the weights, record the time and return rank 0's figures on every rank."""
        with self._parallel.gathered_weights():
            figures: dict[str, float] = self._parallel.broadcast(evaluate())
        self._progress.look_seconds = self._count()
        return figures

    def count_step(self) -> None:
        """Add the seconds since the last reading, update the pace and check for a further step.

        A checkpoint's seconds count towards the step after it.
        """
        seconds, progress = self._count(), self._progress
        before = progress.pace or seconds
        progress.pace = PACE_WEIGHT * seconds + (1 - PACE_WEIGHT) * before
        progress.time_up = progress.elapsed + progress.pace > self.bounds.seconds

    def _count(self) -> float:
        before, self._before = self._before, self._read()
        self._progress.elapsed += self._before - before
        return self._before - before

    def _read(self) -> float:
        return self._parallel.broadcast(self._clock()) if self._limits.has_seconds else 0.0
