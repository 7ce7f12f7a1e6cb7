"""The progress bar of a measurement."""

from eval.measure.deadline import Deadline
from eval.measure.records import Arm
from jobs.progress import ProgressBar


class EvalProgress:
    """Progress bar that is updated between decodings, while no clock runs.

    It counts the decodings of the run, whose total is known in advance. With a bound in seconds,
    which decides how many there will be, it shows the percent of all work, or that of the seconds
    or of the minimum of prompts, whichever of these two ends last.
    """

    def __init__(self, bar: ProgressBar, total: int, minimum: int, deadline: Deadline) -> None:
        """minimum: decodings that are made even beyond the bound."""
        self.bar, self.total, self.minimum, self.deadline = bar, total, minimum, deadline
        self.in_minimum = True  # whether the current unit belongs to them
        self.part = ""  # of the run, in words
        self._finished = 0  # decodings of finished units
        # Those of the current unit, and those of its current attempt, which may be a repetition.
        self._of_unit = self._of_attempt = 0
        self._of_minimum = 0  # those of finished units that belong to the minimum
        self._tokens, self._seconds = 0, 0.0

    def done(self, arm: Arm, tokens: int, seconds: float) -> None:
        """Count a decoding of the current unit; a repeated one does not count again."""
        repeated = self._of_attempt < self._of_unit
        self._of_attempt += 1
        self._of_unit = max(self._of_unit, self._of_attempt)
        self._tokens += tokens
        self._seconds += seconds
        speed = f"{self._tokens / self._seconds:.0f} tokens/s, {arm.drafter}"
        self._show(f"{self.part}: {speed}{', again: the machine was busy' * repeated}")

    def again(self) -> None:
        """Start the current unit again."""
        self._of_attempt = 0

    def end_unit(self, decodings: int) -> None:
        """Count a finished unit as its planned decodings, however many were needed."""
        decoded, self._of_unit, self._of_attempt = self._of_unit, 0, 0
        self._finished += decodings
        self._of_minimum += decodings if self.in_minimum else 0
        if decoded < decodings:
            why = "turns longer than the context are left out" if decoded else "already measured"
            self._show(f"{self.part}: {why}")

    def end(self, prompts: int, overrun_seconds: float) -> None:
        """Show the end of a run whose bound left prompts out.

        prompts: those of the main part. overrun_seconds: see Row.overrun_seconds.
        """
        if self._finished < self.total:
            limit = f"{self.deadline.max_seconds:g} s"
            note = f"as many prompts as fit into {limit}"
            if overrun_seconds:
                note = (
                    f"the minimum of {prompts} prompts, in {overrun_seconds:.0f} s (limit {limit})"
                )
            self.bar.update(100, note)

    def _show(self, note: str) -> None:
        count = self._finished + self._of_unit
        if not self.deadline.bounds:
            self.bar.update(count, note)
            return
        spent = self.deadline.seconds / self.deadline.max_seconds
        of_minimum = self._of_minimum + (self._of_unit if self.in_minimum else 0)
        bounded = min(spent, of_minimum / self.minimum)
        unfinished = min(99.0, 100 * max(count / self.total, bounded))
        self.bar.update(100 if count == self.total else unfinished, f"{count} decodings, {note}")
