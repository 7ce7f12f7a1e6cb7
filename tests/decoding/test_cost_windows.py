"""The windows of a measurement of costs: how many there are, and which of them count."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from decoding.costs.measure import CHEAPER, NEGATIVE, measure_costs
from decoding.costs.timing import Parts
from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import RoundCosts
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from tests.support.simulated_clock import SimulatedClock

from .test_laws import models

pytestmark = pytest.mark.usefixtures("shares")


class SimulatedParts:
    """Timings of a round's parts; target_ms: t_target(1) in each of them; seconds: that each takes.

    The last one repeats. A simulated round has TARGET_MS in its forward.
    """

    def __init__(
        self, clock: SimulatedClock, target_ms: list[float], seconds: Sequence[float] = (1.0,)
    ) -> None:
        self.clock, self.target_ms, self.seconds, self.windows = clock, target_ms, seconds, 0

    def __call__(self, *given: Any, **settings: Any) -> Parts:
        self.clock.advance(1000 * self.seconds[min(self.windows, len(self.seconds) - 1)])
        ms = self.target_ms[min(self.windows, len(self.target_ms) - 1)]
        self.windows += 1
        return Parts(0.05, {1: ms, 2: 1.01 * ms}, 10, 1)

    def costs(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> RoundCosts:
        """Return costs measured from these timings."""
        monkeypatch.setattr("decoding.costs.measure.time_parts", self)
        target, _, draft_model = models()
        drafter, prompt = ChainDrafter(model=draft_model), [4, 5, 6]
        with torch.inference_mode():
            return measure_costs(
                target, drafter, prompt, Settings(), **{"windows": 5, "tokens": 4, **settings}
            )


@pytest.mark.parametrize(
    ("bound", "expected"),
    [({"seconds": 0.0}, 3), ({"seconds": 0.0, "least_windows": 1}, 1), ({"seconds": 1e9}, 5)],
    ids=["three", "one", "all"],
)
def test_a_least_number_of_windows_is_measured(
    bound: dict[str, Any], expected: int, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = SimulatedParts(clock, [0.9])
    assert parts.costs(monkeypatch, **bound).unreliable == ""
    assert parts.windows == expected


def test_windows_that_other_processes_disturb_are_replaced(
    shares: list[float], clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that forwards of 0.2 ms in disturbed windows change nothing, in four of nine windows.

    Control: the same windows, undisturbed, change t_target(1).
    """
    pace_ms, disturbed = [0.2, 0.9, 0.2, 0.2, 0.9, 0.9, 0.2, 0.9, 0.9], [0.1, 0.3, 0.5, 0.89]
    shares += [disturbed.pop(0) if ms == 0.2 else 0.95 for ms in pace_ms]
    parts = SimulatedParts(clock, pace_ms)
    costs = parts.costs(monkeypatch)
    assert costs.target_ms(1) == pytest.approx(0.9)
    assert (costs.unreliable, parts.windows) == ("", 9)

    control = SimulatedParts(clock, pace_ms)
    assert control.costs(monkeypatch).target_ms(1) == pytest.approx(0.2)
    assert control.windows == 5


@pytest.mark.parametrize(("seconds", "expected"), [(1e9, 10), (6.5, 7)])
def test_costs_that_stay_disturbed_are_unreliable(
    seconds: float,
    expected: int,
    shares: list[float],
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that repetition has bounds, and that the least disturbed windows count."""
    shares += [0.2, 0.4, 0.3, 0.4, 0.4, *[0.2] * 20]
    parts = SimulatedParts(clock, [0.1, 0.9, 0.1, 0.9, 0.9, 0.1])
    costs = parts.costs(monkeypatch, seconds=seconds)
    assert parts.windows == expected
    assert "only 40 % of the time" in costs.unreliable
    assert costs.target_ms(1) == pytest.approx(0.9)
    assert RoundCosts.read(json.loads(json.dumps(asdict(costs)))) == costs


@pytest.mark.parametrize(
    ("seconds", "found", "lengths_s", "expected"),
    [
        (0.7, [0.1], [1.0], 1),
        (1.3, [0.1, 0.1], [1.0], 2),
        (1.3, [1.0, 0.1], [1.0], 2),
        (1.7, [0.1, 0.1, 0.1], [1.0], 3),
        (4.5, [0.1, 0.1], [1.0, 5.0, 1.0], 2),
        (0.7, [1.0, 1.0, 1.0], [1.0], 3),
    ],
    ids=["one", "two", "disturbed later", "three", "a long one", "a control"],
)
def test_a_disturbed_measurement_ends_within_twice_its_seconds(
    seconds: float,
    found: list[float],
    lengths_s: list[float],
    expected: int,
    shares: list[float],
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the number of windows: each is expected to take as long as the longest one before.

    The first one always ends, and undisturbed ones are at least three.
    """
    shares += found
    parts = SimulatedParts(clock, [0.9], lengths_s)
    costs = parts.costs(monkeypatch, seconds=seconds)
    assert parts.windows == expected
    assert bool(costs.unreliable) == (0.1 in found)


@pytest.mark.parametrize("later_ms", [0.9, 3.0])
def test_a_negative_rest_of_a_round_is_measured_again(
    later_ms: float, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that parts longer than the round of 1 ms are refused once, and marked if they stay."""
    parts = SimulatedParts(clock, [3.0] * 5 + [later_ms])
    costs = parts.costs(monkeypatch)
    assert parts.windows == 10
    assert costs.target_ms(1) == pytest.approx(later_ms)
    assert (costs.overhead_ms < 0) == (later_ms == 3.0)
    assert costs.unreliable == (NEGATIVE if later_ms == 3.0 else "")


@pytest.mark.parametrize("factor", [1.1, 1.5])
def test_a_round_that_a_draft_shortens_is_measured_again(
    factor: float, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check costs in which rounds without a draft are slower, by `factor`, than they can be."""

    def slower(target: Any, drafter: Any, *given: Any) -> list[Generation]:
        done = decode(target, drafter, *given)
        for one in done:
            one.decode_seconds *= factor if drafter is None else 1
        return done

    monkeypatch.setattr("decoding.costs.measure.decode", slower)
    parts = SimulatedParts(clock, [0.9])
    costs = parts.costs(monkeypatch)
    assert costs.plain_ms == pytest.approx(factor)
    assert costs.unreliable == (CHEAPER if factor == 1.5 else "")
    assert parts.windows == (10 if factor == 1.5 else 5)
