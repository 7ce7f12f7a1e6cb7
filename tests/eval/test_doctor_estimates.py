"""Estimates of the doctor: bounds of Student's distribution, and how often chance alone is sure."""

import numpy as np
import pytest
from scipy import stats

from eval.doctor.estimates import (
    DOUBT,
    Counts,
    difference,
    difference_of_groups,
    is_sure,
    rate,
    student_quantile,
)

PROMPTS, TOKENS, TRIALS = 12, 40, 2000


def counts(generator: np.random.Generator, alpha: float, spread: float = 0.1) -> Counts:
    """Return simulated counts of prompts whose own acceptance varies around alpha."""
    alpha_P = np.clip(generator.normal(alpha, spread, PROMPTS), 0, 1)
    tested_P = generator.integers(TOKENS // 2, 2 * TOKENS, PROMPTS)
    return Counts(generator.binomial(tested_P, alpha_P).astype(float), tested_P.astype(float))


@pytest.mark.parametrize("freedom", [3, 5, 11, 31, 200])
def test_quantiles_are_those_of_students_distribution(freedom: int) -> None:
    exact = float(stats.t.ppf(1 - DOUBT, freedom))
    # the expansion is short of the exact value where few prompts are left
    assert student_quantile(freedom) == pytest.approx(exact, rel=0.15 if freedom < 5 else 0.01)


def test_two_prompts_are_never_sure() -> None:
    few = Counts(np.array([0.0, 0.0]), np.array([50.0, 50.0]))
    other = Counts(np.array([50.0, 50.0]), np.array([50.0, 50.0]))
    assert not is_sure(difference(other, few))


@pytest.mark.parametrize("groups", [False, True])
def test_equal_drafters_are_rarely_told_apart_and_unequal_ones_mostly(groups: bool) -> None:
    generator = np.random.default_rng(0)
    compare = difference_of_groups if groups else difference

    def share(gain: float) -> float:
        found = [
            is_sure(compare(counts(generator, 0.6 + gain), counts(generator, 0.6)))
            for _ in range(TRIALS // 2)
        ]
        return float(np.mean(found))

    assert share(0.0) < 5 * DOUBT
    assert share(0.3) > 0.9


def test_intervals_of_a_rate_hold_it() -> None:
    generator = np.random.default_rng(1)
    misses = 0
    for _ in range(TRIALS):
        found = rate(counts(generator, 0.6))
        misses += not found.low <= 0.6 <= found.high
    assert misses / TRIALS < 8 * DOUBT


def test_agreement_by_chance_is_not_certainty() -> None:
    """Check that four prompts with one test each, all accepted, do not show a rate of 1."""
    found = rate(Counts(np.ones(4), np.ones(4)))
    assert found.low < 0.6
