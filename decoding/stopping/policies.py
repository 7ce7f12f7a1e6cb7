"""Stopping policies by name: thresholds, Thompson sampling, and policies that compare with costs.

The rules that policies follow are in decoding/stopping/base.py, the decisions from costs in
decoding/stopping/planner.py.
"""

import math
import random
from collections.abc import Sequence

from decoding.errors import UserError
from decoding.interfaces import RoundCosts, Stopping, TokenConfidence
from decoding.stopping.base import Fixed
from decoding.stopping.planner import DecayedRate, RoundPlanner, chance_of


class Confidence(Fixed):
    """Policy that stops after a token whose probability is below a threshold.

    It works like Hugging Face's `assistant_confidence_threshold`, with the same default.
    """

    reads = "confidence"
    ends_itself = True

    def __init__(self, threshold: float = 0.4) -> None:
        self.threshold = threshold

    @classmethod
    def make(cls, key: int, threshold: float | None) -> "Confidence":
        return cls() if threshold is None else cls(threshold)

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        assert token is not None
        return token.confidence >= self.threshold


class Assisted(Confidence):
    """Policy of Hugging Face's assisted generation: an adaptive length limit and a threshold.

    The limit starts at 5. It grows by two after a round in which all tokens are accepted, and
    shrinks by one after any other.
    """

    learns = True

    def __init__(self, threshold: float = 0.4) -> None:
        super().__init__(threshold)
        self.length = 5

    def limit(self, budget: int) -> int:
        return min(self.length, budget)

    def update(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.length = self.length + 2 if accepted == drafted else max(1, self.length - 1)


class AdaptiveConfidence(Confidence):
    """Draft & Verify's policy: a confidence threshold that adapts to the acceptance rate.

    The threshold moves towards an acceptance of 90 % of the drafted tokens. Source: Zhang et al.
    2024 (arXiv 2309.08168), section 3.3.
    """

    learns = True

    GOAL, STEP = 0.9, 0.01

    def __init__(self, threshold: float = 0.6) -> None:
        super().__init__(threshold)
        self._rate, self._budget = self.GOAL, 0

    def limit(self, budget: int) -> int:
        self._budget = budget
        return budget

    def update(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self._rate = 0.5 * self._rate + 0.5 * accepted / drafted
        # a draft that reached the budget gives no reason for a lower threshold
        lower = 0.0 if drafted == self._budget else self.STEP
        step = self.STEP if self._rate < self.GOAL else -lower
        self.threshold = min(1.0, max(0.0, self.threshold + 0.1 * step))


class Entropy(AdaptiveConfidence):
    """AdaEDL's policy (arXiv 2410.18351): stop at a small lower bound of the acceptance rate.

    The bound, 1 - sqrt(0.2 H(q)), is computed from the distribution q of the last token and
    compared with a threshold, which adapts as in Draft & Verify. The last token is kept: its draft
    step is already taken, and verifying it costs little.
    """

    reads = "entropy"
    FACTOR = 0.2  # the paper's gamma: cross-entropy of q and p as a multiple of H(q)

    def __init__(self, threshold: float = 0.3) -> None:
        super().__init__(threshold)

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        assert token is not None
        return 1 - math.sqrt(self.FACTOR * max(token.entropy, 0.0)) >= self.threshold


class Thompson(Fixed):
    """Thompson sampling as in EESD (arXiv 2406.03853), for acceptance rates that change.

    Before each token but the first it samples an acceptance rate from its Beta posterior, and
    continues with this probability. Old rounds lose their weight, and a round drafts at least one
    token, unlike in `PublishedThompson`.
    """

    learns = True
    ends_itself = True
    DISCOUNT = 0.99  # weight of old rounds, at every update

    def __init__(self, key: int) -> None:
        self._random = random.Random(key)
        self.accepted = self.rejected = 1.0

    @classmethod
    def make(cls, key: int, threshold: float | None) -> "Thompson":
        return cls(key)

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        return self._random.random() < self._random.betavariate(self.accepted, self.rejected)

    def update(self, drafted: int, accepted: int) -> None:
        self.accepted = 1.0 + (self.accepted - 1.0) * self.DISCOUNT + accepted
        self.rejected = 1.0 + (self.rejected - 1.0) * self.DISCOUNT + (accepted < drafted)


class PublishedThompson(Thompson):
    """EESD's policy as published (arXiv 2406.03853): Thompson sampling before every token.

    The posterior counts the request's accepted tokens, and a rejection for every draft with one,
    from the prior Beta(1, 1); tokens after a rejected one are not tested. A token is drafted with
    the probability that is sampled from it, the first of a round too.
    """

    DISCOUNT = 1.0

    def limit(self, budget: int) -> int:
        """Return the budget, or 0 if the round ends before its first token."""
        return budget if budget and self.more(0, None) else 0


class CostRatioByRound(Fixed):
    """Policy that chooses the draft length before a round, from the request's acceptance rate.

    It serves devices that the host runs ahead of, where reading a confidence would wait, and
    batches, whose rounds are as long as their longest draft.
    """

    def __init__(self, costs: RoundCosts) -> None:
        self.planner = RoundPlanner(costs)
        self._asked = 0  # tokens at most, in this round

    def limit(self, budget: int) -> int:
        """Return the draft length with the most expected tokens per millisecond, 0 if none pays."""
        self._asked = self.planner.chain_length(budget)
        return self._asked

    def update(self, drafted: int, accepted: int) -> None:
        """Update the acceptance rate and the tokens per millisecond.

        A drafter that was asked for tokens and drafted none has taken a step for nothing.
        """
        was_asked, self._asked = self._asked, 0
        if was_asked and not drafted:
            return self.planner.learn_dropped()
        self.planner.learn_round(drafted, accepted, self.planner.costs.round_ms(drafted, drafted))


class CostRatio(CostRatioByRound):
    """Policy that drafts while the next token's expected gain exceeds its cost.

    The gain is the token's chance of acceptance: the product of the acceptance rates of the tokens
    drafted so far (estimated separately for each tenth of confidence) and of the mean acceptance
    rate. The cost is the number of tokens that the request gains in the time of a draft step and
    of a wider forward (decoding/stopping/planner.py).
    """

    reads = "confidence"
    TENTHS = 10

    def __init__(self, costs: RoundCosts) -> None:
        super().__init__(costs)
        middles = [(tenth + 0.5) / self.TENTHS for tenth in range(self.TENTHS)]
        self._by_tenth = [DecayedRate(chance_of(middle)) for middle in middles]
        self._sampled: list[DecayedRate] = []  # the estimates of this round's tokens
        self._survival = 1.0

    def limit(self, budget: int) -> int:
        """Return the budget, or 0 if drafting does not pay."""
        self._sampled, self._survival = [], 1.0
        return budget if self.planner.drafts() else 0

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        """Return whether another token is expected to gain more than it costs."""
        assert token is not None
        tenth = min(int(token.confidence * self.TENTHS), self.TENTHS - 1)
        self._sampled.append(self._by_tenth[tenth])
        self._survival *= self._chance(self._by_tenth[tenth])
        return self.planner.step_gain(self._survival, 1, depth) > 0

    def _chance(self, rate: DecayedRate) -> float:
        """Return the acceptance rate of a token to decide with."""
        return rate.value

    def update(self, drafted: int, accepted: int) -> None:
        """Update the acceptance rates and the tokens per millisecond."""
        for depth, rate in enumerate(self._sampled[: min(accepted + 1, drafted)]):
            rate.update(depth < accepted, 1.0)
        super().update(drafted, accepted)


class CalibratedThompson(CostRatio):
    """Thompson sampling with calibrated confidences and costs, in place of EESD's Calibration-TS.

    It is `CostRatio` with acceptance rates that are sampled from their posteriors: a token's chance
    comes from the request's tokens of like confidence, and the draft ends where its sampled gain
    does. Rates that are uncertain are therefore tried more often. With several rows, or on a
    device that the host runs ahead of, `CostRatioByRound` takes its place.
    """

    def __init__(self, costs: RoundCosts, key: int) -> None:
        super().__init__(costs)
        self._random = random.Random(key)

    def _chance(self, rate: DecayedRate) -> float:
        return rate.sample(self._random)


# Every policy but those that are made from costs.
POLICIES: dict[str, type[Fixed]] = {
    "fixed": Fixed,
    "confidence": Confidence,
    "assisted": Assisted,
    "adaptive_confidence": AdaptiveConfidence,
    "entropy": Entropy,
    "thompson": Thompson,
    "thompson_published": PublishedThompson,
}
CALIBRATED = "thompson_calibrated"
BY_COST = ("cost_ratio", CALIBRATED)
NAMES = (*POLICIES, *BY_COST)
# Policies that compare each sampled token with a threshold, which on a GPU waits for the device.
EAGER = tuple(name for name, kind in POLICIES.items() if kind.reads != "nothing")


def make_stopping(
    name: str,
    keys_B: Sequence[int],
    threshold: float | None,
    costs: RoundCosts | None,
    per_token: bool = True,
) -> list[Stopping]:
    """Return a policy for each row.

    keys_B: random keys derived from seed and request, for policies with random numbers. threshold:
    None for the policy's default. per_token: whether the policies in BY_COST may read sampled
    tokens; with several rows they never do, and choose lengths before a round. Raises UserError for
    an unknown name, for a threshold if the policy has none, and for one in BY_COST without costs.
    """
    if name not in NAMES:
        raise UserError(f"stopping '{name}' is unknown, expected one of {', '.join(NAMES)}.")
    if threshold is not None and name not in EAGER:
        raise UserError(
            f"stopping '{name}' takes no threshold, found {threshold}. Remove stopping_threshold."
        )
    if name in POLICIES:
        return [POLICIES[name].make(key, threshold) for key in keys_B]
    if costs is None:
        raise UserError(
            f"stopping '{name}' needs measured costs, found None. Use "
            f"Settings(costs=time_parts(...).costs)."
        )
    if not per_token or costs.rows > 1:
        return [CostRatioByRound(costs) for _ in keys_B]
    if name == CALIBRATED:
        return [CalibratedThompson(costs, key) for key in keys_B]
    return [CostRatio(costs) for _ in keys_B]
