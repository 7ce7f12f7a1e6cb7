"""Schedule of the student's rows, which it writes at intervals."""

import math
from dataclasses import dataclass

from distill.config import OnPolicyConfig
from training.on_policy import ShareSchedule


@dataclass(frozen=True)
class Schedule(ShareSchedule):
    """Number of rows of each step, counted from 0, that the student writes."""

    config: OnPolicyConfig
    # bound of the run, infinite if it has none: the last set of rows is no larger than needed
    last_step: float = math.inf

    def refreshes_at(self, step: int) -> bool:
        """Return whether the student writes new rows before `step`."""
        since = step - self.config.start
        return since >= 0 and since % self.config.refresh == 0

    def rows_from(self, step: int) -> int:
        """Return the number of rows that the student writes at a refresh before `step`."""
        end = int(min(step + self.config.refresh, max(step, self.last_step)))
        return self.rows_before(end) - self.rows_before(step)
