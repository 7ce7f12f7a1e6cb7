"""Share of the rows of a training step that are on-policy: settings and schedule."""

import math
from dataclasses import dataclass

_ROUNDING = 1e-9  # keeps products such as 0.1 x 30 from falling just below a whole number


@dataclass
class OnPolicyOptions:
    """Rows in which the drafter trains on its own tokens instead of the data's."""

    # share of the rows of a step that are on-policy; 0: off
    share: float = 0.0
    # first step, counted from 0, with on-policy rows
    start: int = 0
    # steps, counted from `start`, over which the share rises linearly from 0; 0: no rise
    warmup_steps: int = 0
    # sampling temperature of the drafter; 0 is greedy, with which small models often loop
    temperature: float = 1.0


@dataclass(frozen=True)
class ShareSchedule:
    """Number of on-policy rows of each step, counted from 0: a pure function of the step."""

    config: OnPolicyOptions
    rows_per_step: int

    def rows_before(self, step: int) -> int:
        """Return the number of on-policy rows in all steps before `step`.

        It is the rounded integral of the share, so a share of 0.1 of 4 rows is 2 rows in 5 steps.
        """
        since, warmup = max(0, step - self.config.start), self.config.warmup_steps
        rising = min(since, warmup)
        # the integral of a line from 0 to 1 over the warm-up, then of 1
        full_steps = since - rising + (rising * rising / (2 * warmup) if warmup else 0.0)
        return math.floor(self.config.share * self.rows_per_step * full_steps + _ROUNDING)

    def rows_in(self, step: int) -> int:
        """Return the number of on-policy rows in `step`."""
        return self.rows_before(step + 1) - self.rows_before(step)


def schedule_rules(options: OnPolicyOptions) -> dict[str, tuple[bool, str]]:
    """Return the rules of the schedule: key -> (validity of its value, expected values)."""
    return {
        "on_policy.start": (options.start >= 0, "0 or more"),
        "on_policy.warmup_steps": (options.warmup_steps >= 0, "0 or more"),
    }
