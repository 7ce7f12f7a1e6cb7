"""A clock that only tests advance."""

from collections.abc import Callable
from typing import Any


class SimulatedClock:
    """Clock that only `advance` moves, so a busy machine changes no figure.

    A target's forward takes 1 ms, a draft model's 0.1 ms.
    """

    TARGET_MS, DRAFT_MS = 1.0, 0.1

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, ms: float) -> None:
        self.seconds += ms / 1000

    def delayed(self, function: Callable[..., Any], ms: float) -> Callable[..., Any]:
        """Return a function that advances the clock by `ms` milliseconds and calls `function`."""

        def call(*given: Any, **named: Any) -> Any:
            self.advance(ms)
            return function(*given, **named)

        return call
