"""Thompson sampling on simulated streams: EESD's posterior, and where the calibrated policy stops.

A stream's tokens are accepted independently, with chances that the test knows.
"""

import random

import pytest

from decoding.interfaces import RoundCosts, TokenConfidence
from decoding.stopping.policies import (
    CalibratedThompson,
    CostRatio,
    PublishedThompson,
    Thompson,
    make_stopping,
)

COSTS = RoundCosts(0.15, (1.0, 1.05))
BUDGET = 12


def accepted_of(chances: list[float], stream: random.Random) -> int:
    """Return the number of tokens before the first that the stream rejects."""
    for count, chance in enumerate(chances):
        if stream.random() >= chance:
            return count
    return len(chances)


def test_the_published_posterior_counts_every_tested_token() -> None:
    """Check the counts after rounds of a known length, and the mean against the stream's rate."""
    policy, stream = PublishedThompson(1), random.Random(0)
    accepted = rejected = 0
    for number in range(400):
        drafted = number % 5
        passed = accepted_of([0.7] * drafted, stream)
        policy.update(drafted, passed)
        accepted += passed
        rejected += passed < drafted  # later tokens are not tested
    assert (policy.accepted, policy.rejected) == (1 + accepted, 1 + rejected)
    mean = policy.accepted / (policy.accepted + policy.rejected)
    assert mean == pytest.approx(0.7, abs=0.05)


def test_the_published_policy_drafts_each_token_with_its_posterior_mean() -> None:
    """Check that lengths are geometric, from 0, as chances are sampled anew for every token."""
    policy = PublishedThompson(2)
    policy.accepted, policy.rejected = 3.0, 2.0
    lengths = []
    for _ in range(4000):
        length = 0
        if policy.limit(BUDGET):
            length = next(d for d in range(1, 99) if not policy.more(d, None))
        lengths.append(length)
    for least in range(4):
        share = sum(length > least for length in lengths) / sum(n >= least for n in lengths)
        assert share == pytest.approx(0.6, abs=0.04)
    assert policy.limit(0) == 0
    always = Thompson(2)
    assert {always.limit(BUDGET) for _ in range(99)} == {BUDGET}, (
        "the other drafts a token at least"
    )


def test_the_published_posterior_forgets_nothing() -> None:
    """Compare with the policy that discounts, on a stream whose rate falls."""
    means = []
    for kind in (PublishedThompson, Thompson):
        policy, stream = kind(3), random.Random(1)
        for number in range(600):
            chance = 0.95 if number < 300 else 0.1
            policy.update(1, accepted_of([chance], stream))
        means.append(policy.accepted / (policy.accepted + policy.rejected))
    assert means[0] == pytest.approx((0.95 + 0.1) / 2, abs=0.05)
    assert means[1] == pytest.approx(0.1, abs=0.1)


def true_chance(confidence: float) -> float:
    """Return the acceptance rate of an overconfident drafter."""
    return confidence**2


def agreement(policy: CostRatio, rounds: int = 1500) -> float:
    """Return the share of decisions that the true chances would have made, after some rounds."""
    stream, agreed, decisions = random.Random(5), 0, 0
    for number in range(rounds):
        chances: list[float] = []
        survival = 1.0
        if policy.limit(BUDGET):
            while len(chances) < BUDGET:
                confidence = 0.05 + 0.1 * stream.randrange(10)
                chances.append(true_chance(confidence))
                survival *= chances[-1]
                depth = len(chances)
                goes_on = policy.more(depth, TokenConfidence(confidence))
                gains = policy.planner.step_gain(survival, 1, depth) > 0
                if number >= rounds // 2:
                    agreed, decisions = agreed + (goes_on == gains), decisions + 1
                if not goes_on:
                    break
        policy.update(len(chances), accepted_of(chances, stream))
    assert decisions > 200
    return agreed / decisions


class Uncalibrated(CalibratedThompson):
    """The control: chances from priors of the confidence alone, which no outcome corrects."""

    def update(self, drafted: int, accepted: int) -> None:
        self._sampled = []
        super().update(drafted, accepted)


def test_the_calibrated_policy_stops_where_the_expected_gain_ends() -> None:
    assert agreement(CalibratedThompson(COSTS, 1)) > 0.9
    assert agreement(Uncalibrated(COSTS, 1)) < 0.85, "the control"


def test_the_calibrated_policy_samples_its_chances() -> None:
    """Check that uncertain chances vary and that known ones do not, and that keys repeat them."""

    def stops(key: int, rounds: int) -> list[int]:
        (policy,) = make_stopping("thompson_calibrated", [key], None, COSTS)
        for _ in range(rounds):
            policy.limit(1)
            policy.more(1, TokenConfidence(0.5))
            policy.update(1, 1)
        lengths = []
        for _ in range(60):
            policy.limit(99)
            lengths.append(
                next((d for d in range(1, 30) if not policy.more(d, TokenConfidence(0.5))), 30)
            )
        return lengths

    assert stops(1, 0) == stops(1, 0) != stops(2, 0)
    assert len(set(stops(1, 0))) > len(set(stops(1, 900)))
