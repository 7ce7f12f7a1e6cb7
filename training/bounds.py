"""Bounds of a run in steps, epochs, tokens and seconds, and the progress towards them.

The first bound that is reached ends the run. Schedules follow the progress recorded after the
previous step, not the current clock. A resumed run therefore repeats the learning rates of an
uninterrupted one: exactly under bounds in steps and tokens, and under a bound in seconds if the
clock reads the same.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from decoding.errors import UserError


class RunTotals(NamedTuple):
    """Steps, tokens and seconds of a run so far."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


START = RunTotals()


@dataclass(frozen=True)
class Bounds:
    """Limits of a run, infinite where none is set; the first one reached ends the run."""

    steps: float = math.inf
    tokens: float = math.inf
    seconds: float = math.inf

    @property
    def has_seconds(self) -> bool:
        """Return whether the run has a bound in seconds."""
        return self.seconds < math.inf

    @property
    def in_steps_alone(self) -> bool:
        """Return whether the run's number of steps is known from the start."""
        return min(self.tokens, self.seconds) == math.inf

    def share(self, done: RunTotals, of: float = 1.0, since: RunTotals = START) -> float:
        """Return the completed share (0 to 1) of the way from `since` to the nearest bound.

        of: share of every bound that counts as the whole way; 0: the way is complete.
        """
        if of == 0:
            return 1.0
        share = 0.0
        limits = (self.steps, self.tokens, self.seconds)
        for now, limit, before in zip(done, limits, since, strict=True):
            way = limit * of - before
            share = max(share, (now - before) / way if way > 0 else 1.0)
        return min(1.0, share)


class Place(NamedTuple):
    """Position of a step in its run."""

    done: RunTotals
    bounds: Bounds

    def share(self, of: float = 1.0) -> float:
        """Return the completed share (0 to 1) of the run, or of its first part, the share `of`."""
        return self.bounds.share(self.done, of)


@dataclass
class Progress:
    """State of the loop that a checkpoint stores in addition to tensors."""

    step: int = 0
    tokens: int = 0
    supervised: int = 0
    # seconds of the steps alone
    seconds: float = 0.0
    # The next four are used under a bound in seconds. Seconds elapsed, evaluations and checkpoints
    # included:
    elapsed: float = 0.0
    # recent seconds per step
    pace: float = 0.0
    # seconds of the last evaluation
    look_seconds: float = 0.0
    # True once no further step fits into the bound
    time_up: bool = False
    # totals at the end of the learning rate's warm-up
    warm_tokens: int = 0
    warm_elapsed: float = 0.0
    best_step: int = -1
    best_score: float = -math.inf
    # score of the last gain, and the number of evaluations since then (loop.patience)
    gain_score: float = -math.inf
    without_gain: int = 0
    # key of the option that ended the run, such as loop.max_steps; set at the end
    ended_by: str = ""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    # PackedData.state
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> RunTotals:
        """Return the totals so far."""
        return RunTotals(self.step, self.tokens, self.elapsed)

    def warm(self, steps: int) -> RunTotals:
        """Return the totals at the end of a warm-up of `steps` steps."""
        return RunTotals(steps, self.warm_tokens, self.warm_elapsed)

    def reached(self, bounds: Bounds) -> str:
        """Return the bound that ends the run here: steps, tokens, seconds, or "" for none."""
        if self.step >= bounds.steps:
            return "steps"
        if self.tokens >= bounds.tokens:
            return "tokens"
        return "seconds" if self.time_up else ""

    def count_gain(self, score: float, min_gain: float) -> None:
        """Count an evaluation without a gain, or start again at 0 if its score is a gain."""
        gain = score > self.gain_score + min_gain
        self.without_gain = 0 if gain else self.without_gain + 1
        self.gain_score = score if gain else self.gain_score

    def figures_of(self, step: int) -> dict[str, float] | None:
        """Return the held-out figures of a step; None if it was not evaluated."""
        return next((one for one in self.evaluations if one["step"] == step), None)

    @property
    def best(self) -> dict[str, float]:
        """Return the held-out figures of the best checkpoint.

        Raises UserError if no score was finite.
        """
        if (figures := self.figures_of(self.best_step)) is not None:
            return figures
        raise UserError(
            f"no held-out score was finite in {len(self.evaluations)} evaluations. Check the "
            f"held-out data and the last losses"
        )
