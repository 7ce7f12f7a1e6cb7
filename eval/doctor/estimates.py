"""Acceptance rates and their differences, with errors over prompts.

Tokens of one prompt are no independent draws, so the errors come from the spread over prompts, and
bounds from Student's distribution. A fault is named only if its loss is beyond doubt (`is_sure`): a
probe of a healthy drafter then names one with a probability of DOUBT.

Shapes: P prompts.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

# One-sided probability that a bound of an estimate is wrong. The doctor runs about a dozen probes,
# so it names a cause on one healthy drafter in some hundred.
DOUBT = 0.001
# Losses of acceptance that are too small to report as a cause, whatever is sure about them.
LEAST_LOSS = 0.01


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, of `freedom` + 1 prompts."""

    value: float
    error: float
    freedom: int

    @property
    def low(self) -> float:
        """Return the lower bound, wrong with a probability of DOUBT."""
        return self.value - student_quantile(self.freedom) * self.error

    @property
    def high(self) -> float:
        """Return the upper bound, wrong with a probability of DOUBT."""
        return self.value + student_quantile(self.freedom) * self.error

    def __str__(self) -> str:
        spread = NormalDist().inv_cdf(0.975) * self.error
        return f"{self.value:.3f} +- {spread:.3f}"


def is_sure(loss: Estimate, least: float = LEAST_LOSS) -> bool:
    """Return whether a loss is beyond doubt, and at least `least`."""
    return loss.value >= least and loss.low > 0


def student_quantile(freedom: int) -> float:
    """Return the quantile 1 - DOUBT of Student's distribution; infinite below 3 degrees.

    Source: Abramowitz and Stegun, 26.7.5, an expansion in 1 / freedom.
    """
    if freedom < 3:
        return math.inf
    z = NormalDist().inv_cdf(1 - DOUBT)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


@dataclass(frozen=True)
class Counts:
    """Tested draft tokens of each prompt, and the accepted ones among them."""

    accepted_P: np.ndarray
    tested_P: np.ndarray

    @property
    def accepted(self) -> float:
        return float(self.accepted_P.sum())

    @property
    def tested(self) -> float:
        return float(self.tested_P.sum())

    @property
    def rate(self) -> float:
        """Return accepted / tested; NaN without a test."""
        return self.accepted / self.tested if self.tested else math.nan

    @property
    def deviations_P(self) -> np.ndarray:
        """Return what each prompt adds to the rate's deviation from its mean."""
        return (self.accepted_P - self.rate * self.tested_P) / self.tested


def rate(counts: Counts) -> Estimate:
    """Return the acceptance rate."""
    return _estimate(counts.rate, counts.deviations_P, counts.tested)


def difference(after: Counts, before: Counts) -> Estimate:
    """Return the rate `after` less the rate `before`, of the same prompts in the same order."""
    deviations_P = after.deviations_P - before.deviations_P
    return _estimate(after.rate - before.rate, deviations_P, min(after.tested, before.tested))


def difference_of_groups(after: Counts, before: Counts) -> Estimate:
    """Return the rate `after` less the rate `before`, of different prompts."""
    one, other = rate(after), rate(before)
    freedom = min(one.freedom, other.freedom)
    return Estimate(one.value - other.value, math.hypot(one.error, other.error), freedom)


def mean_by_prompt(sums_P: np.ndarray, counts_P: np.ndarray) -> Estimate:
    """Return the sum of `sums_P` over that of `counts_P`, a mean over tokens of any values."""
    total = max(float(counts_P.sum()), 1e-12)
    value = float(sums_P.sum()) / total
    deviations_P = (sums_P - value * counts_P) / total
    return Estimate(value, _spread(deviations_P), _freedom(counts_P))


def _estimate(value: float, deviations_P: np.ndarray, tested: float) -> Estimate:
    """Return an estimate whose error is at least that of independent tests.

    Few prompts may agree by chance, which would otherwise look like certainty.
    """
    share = (min(abs(value), 1 - abs(value)) * tested + 1) / (tested + 2)
    floor = math.sqrt(share * (1 - share) / max(tested, 1.0))
    return Estimate(value, max(_spread(deviations_P), floor), _freedom(deviations_P))


def _spread(deviations_P: np.ndarray) -> float:
    """Return the standard error of a sum over prompts."""
    count = max(len(deviations_P), 2)
    return math.sqrt(float((deviations_P**2).sum()) * count / (count - 1))


def _freedom(values_P: np.ndarray) -> int:
    return len(values_P) - 1
