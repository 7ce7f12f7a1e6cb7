"""How long a run is: bounds by steps, epochs, tokens and seconds, whichever comes first, and the
progress towards them that schedules follow.

Progress is what was recorded after the step before, and what a checkpoint holds, never a fresh look
at the clock: a resumed run takes the same learning rates as one that never stopped, exactly so
under bounds by steps and tokens, and under one by seconds where the clock reads the same.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from decoding.errors import UserError


class Done(NamedTuple):
    """How far a run has come."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


START = Done()


@dataclass(frozen=True)
class Bounds:
    """What ends a run, whichever comes first; infinite where nothing does."""

    steps: float = math.inf
    tokens: float = math.inf
    seconds: float = math.inf

    @property
    def has_seconds(self) -> bool:
        """Whether a clock ends the run."""
        return self.seconds < math.inf

    def reserving(self, seconds: float) -> "Bounds":
        """Return these bounds with `seconds` kept back for what follows the last step."""
        return replace(self, seconds=self.seconds - seconds)

    def share(self, done: Done, of: float = 1.0, since: Done = START) -> float:
        """How much of the way from `since` to the nearest bound lies behind, 0 to 1. of: counts the
        first so much of the run alone.
        """
        if of == 0:
            return 1.0
        shares = [0.0]
        for now, bound, before in zip(
            done, (self.steps, self.tokens, self.seconds), since, strict=True
        ):
            way = bound * of - before
            shares.append((now - before) / way if way > 0 else 1.0)
        return min(1.0, max(shares))

    def expected_steps(self, done: Done, pace: float) -> int | None:
        """Steps of the whole run by what they took so far; pace: seconds a step of late. None
        before anything is known.
        """
        most = self.steps
        if done.steps:
            most = min(
                most,
                math.ceil(done.steps * self.tokens / done.tokens)
                if self.tokens < math.inf
                else math.inf,
            )
            if self.has_seconds and pace > 0:
                most = min(
                    most, done.steps + max(0, math.floor((self.seconds - done.seconds) / pace))
                )
        return int(most) if most < math.inf else None


class Place(NamedTuple):
    """A step's position in its run."""

    done: Done
    bounds: Bounds

    def share(self, of: float = 1.0) -> float:
        """How much of the first `of` of the run lies behind, 0 to 1."""
        return self.bounds.share(self.done, of)


@dataclass
class Progress:
    """The loop's own state: what a checkpoint remembers besides tensors."""

    step: int = 0
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0  # of the steps alone
    # Under a bound in seconds, by the loop's clock:
    elapsed: float = 0.0  # everything since the first step, evaluations and checkpoints too
    pace: float = 0.0  # seconds a step of late
    look_seconds: float = 0.0  # the last evaluation took
    time_up: bool = False  # no further step fits
    warm_tokens: int = 0  # when the learning rate's warm-up ended
    warm_elapsed: float = 0.0
    best_step: int = -1
    best_score: float = -math.inf
    evaluations: list[dict[str, float]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # what the data remembers (PackedData.state)

    @property
    def done(self) -> Done:
        """How far the run has come."""
        return Done(self.step, self.tokens, self.elapsed)

    def warm(self, steps: int) -> Done:
        """How far it had come when the warm-up of `steps` steps ended."""
        return Done(steps, self.warm_tokens, self.warm_elapsed)

    def reached(self, bounds: Bounds) -> bool:
        """Whether one of the bounds ends the run here."""
        return self.step >= bounds.steps or self.tokens >= bounds.tokens or self.time_up

    @property
    def best(self) -> dict[str, float]:
        """The held-out figures of the best checkpoint. Raises UserError when none was finite."""
        for figures in self.evaluations:
            if figures["step"] == self.best_step:
                return figures
        raise UserError(
            f"no held-out score was finite in {len(self.evaluations)} evaluations: look at the "
            f"held-out data and the last losses"
        )
