"""What is measured before a policy decides: costs that rise with the width, and the rest of a round."""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding.chain import ChainDrafter
from decoding.costs import measure_costs, rest_of_a_round
from decoding.loop import Settings, time_parts
from decoding.timing import Parts, rising

from .test_laws import models


def test_rising_is_the_nearest_rising_sequence() -> None:
    """Against every rising sequence of a small grid."""
    dice = random.Random(3)
    for _ in range(30):
        values = [dice.randint(0, 4) for _ in range(4)]
        found = rising(values)
        assert all(a <= b for a, b in itertools.pairwise(found))
        error = sum((a - b) ** 2 for a, b in zip(found, values))
        grid = itertools.combinations_with_replacement([n / 4 for n in range(17)], 4)
        assert error <= min(sum((a - b) ** 2 for a, b in zip(other, values)) for other in grid) + 1e-12
    assert rising([1.0, 1.2, 1.5]) == (1.0, 1.2, 1.5)
    assert rising([]) == ()


def test_costs_hold_noise_back() -> None:
    parts = Parts(0.2, {1: 1.0, 2: 1.3, 3: 1.1, 4: 1.5}, 10, 1)
    assert parts.costs.t_target_ms == pytest.approx((1.0, 1.2, 1.2, 1.5))
    assert parts.costs.t_draft_ms == 0.2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rest_of_a_round_is_what_neither_model_takes(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that sleeps is found in the rest, and in nothing else."""
    from decoding import batch

    target, _, draft_model = models()
    drafter, settings = ChainDrafter(model=draft_model), Settings(temperature=temperature, verify="coupled")
    with torch.inference_mode():
        costs = time_parts(target, drafter, [4, 5, 6], widths=range(1, 6), repeats=20).costs
    plain = rest_of_a_round(target, drafter, [4, 5, 6], settings, costs, runs=3, tokens=24)

    def slow(rule: Callable[..., Any]) -> Callable[..., Any]:
        def judge(*given: Any) -> Any:
            time.sleep(0.01)
            return rule(*given)

        return judge

    for name, rule in list(batch.RULES.items()):
        monkeypatch.setitem(batch.RULES, name, slow(rule))
    sleepy = rest_of_a_round(target, drafter, [4, 5, 6], settings, costs, runs=3, tokens=24)
    assert sleepy > plain + 8
    measured = measure_costs(target, drafter, [4, 5, 6], replace(settings, schedule="pearl_plus_virtual"))
    assert measured.overhead_ms > 8 > measured.t_target_ms[0]
