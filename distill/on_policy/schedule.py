"""Schedule of the student's rows: a pure function of the step."""

import math
from dataclasses import dataclass

from distill.config import OnPolicyConfig

_ROUNDING = 1e-9  # keeps products such as 0.1 x 30 from falling just below a whole number


@dataclass(frozen=True)
class Schedule:
    """Number of rows of each step, counted from 0, that the student writes."""

    config: OnPolicyConfig
    rows_per_step: int
    # bound of the run, infinite if it has none: the last set of rows is no larger than needed
    last_step: float = math.inf

    def rows_before(self, step: int) -> int:
        """Return the number of the student's rows in all steps before `step`.

        It is the rounded integral of the share, so a share of 0.1 of 4 rows is 2 rows in 5 steps.
        """
        since, warmup = max(0, step - self.config.start), self.config.warmup_steps
        rising = min(since, warmup)
        # the integral of a line from 0 to 1 over the warm-up, then of 1
        full_steps = since - rising + (rising * rising / (2 * warmup) if warmup else 0.0)
        return math.floor(self.config.share * self.rows_per_step * full_steps + _ROUNDING)

    def rows_in(self, step: int) -> int:
        """Return the number of the student's rows in `step`."""
        return self.rows_before(step + 1) - self.rows_before(step)

    def refreshes_at(self, step: int) -> bool:
        """Return whether the student writes new rows before `step`."""
        since = step - self.config.start
        return since >= 0 and since % self.config.refresh == 0

    def rows_from(self, step: int) -> int:
        """Return the number of rows that the student writes at a refresh before `step`."""
        end = int(min(step + self.config.refresh, max(step, self.last_step)))
        return self.rows_before(end) - self.rows_before(step)
