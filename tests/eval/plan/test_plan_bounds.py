"""Bounds of measured acceptance rates: what few tests leave open."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from eval.plan.acceptance import HALF
from eval.plan.curves import write_curves
from eval.plan.rows import MEASURED, binomial_bound, pooled_rates
from tests.support import plans


def within(rate: float, tests: int) -> float:
    """Return the probability that two standard errors enclose the rate of a binomial draw."""
    found = 0.0
    for accepted in range(tests + 1):
        low, high = (binomial_bound(accepted, tests, errors) for errors in (-2, 2))
        if low <= rate <= high:
            found += math.comb(tests, accepted) * rate**accepted * (1 - rate) ** (tests - accepted)
    return found


@pytest.mark.parametrize("tests", [20, 100, 400])
def test_the_bounds_enclose_the_rate_in_some_95_of_100_measurements(tests: int):
    rates = [k / 20 for k in range(1, 20)]
    chances = [within(rate, tests) for rate in rates]
    assert sum(chances) / len(chances) == pytest.approx(0.955, abs=0.01)
    assert min(chances) > 0.9
    assert within(0.9, 20) > 0.94
    simple = sum(
        math.comb(20, n) * 0.9**n * 0.1 ** (20 - n)
        for n in range(21)
        if abs(n / 20 - 0.9) <= 2 * math.sqrt(n / 20 * (1 - n / 20) / 20)
    )
    assert simple < 0.9, "a control: the normal bound is too narrow for 20 tests"


def test_more_tests_narrow_the_bounds_within_0_and_1():
    for rate in (0.0, 0.3, 1.0):
        widths = []
        for tests in (20, 200, 2000):
            low, high = (binomial_bound(rate * tests, tests, errors) for errors in (-2, 2))
            assert 0 <= low <= rate + 1e-12 and rate - 1e-12 <= high <= 1
            widths.append(high - low)
        assert widths[0] > 2 * widths[1] > 4 * widths[2]
    assert binomial_bound(0, 20, 2) == pytest.approx(4 / 24), "no acceptance in 20 tests"


def test_curves_are_bounded_by_their_tests_together(home: Path):
    one = plans.curve(home, "medusa", 0, 0.5, tested_by_depth=[20, 20, 19])
    low, rates, high = (pooled_rates([one], errors) for errors in (-2.0, 0.0, 2.0))
    assert rates == [0.5, 0.5]
    assert high[0] - low[0] > 0.4, "20 tests leave much open"
    more = [one, dataclasses.replace(one, tested_by_depth=[2000] * 3)]
    assert pooled_rates(more, 2)[0] - pooled_rates(more, -2)[0] < 0.05
    unknown = dataclasses.replace(one, tested_by_depth=[])
    (most,) = pooled_rates([unknown], 2)
    assert most == binomial_bound(HALF / 2, HALF, 2)


def test_a_plan_shows_what_few_tests_leave_open(home: Path, tmp_path: Path, capsys: Any):
    file = tmp_path / "acceptance.jsonl"
    widths = []
    for tests in ([20, 20, 20], [4000, 4000, 4000]):
        write_curves(file, [plans.curve(home, "medusa", 0, 0.6, tested_by_depth=tests)])
        row = plans.rows_in(plans.again(home, tmp_path, acceptance=str(file)))[2]
        assert (row.acceptance, row.alpha_by_depth[0]) == (MEASURED, pytest.approx(0.6))
        assert row.speedup_low is not None and row.speedup_high is not None
        assert row.speedup_low < (row.predicted_speedup or 0) < row.speedup_high
        assert (row.equal_alpha_low or 0) < (row.equal_alpha or 0) < (row.equal_alpha_high or 0)
        widths.append((row.alpha_high[0] - row.alpha_low[0], row.speedup_high - row.speedup_low))
        assert f"0.60 [{row.alpha_low[0]:.2f}" in capsys.readouterr().out
    assert widths[0][0] > 0.3 and widths[1][0] < 0.05, "a control: many tests leave little open"
    assert widths[0][1] > 5 * widths[1][1]
