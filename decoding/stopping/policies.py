"""The stopping policies by name: fixed thresholds, those that adapt, Thompson sampling, and ours,
which weighs a token's chance against its cost.

What a policy is asked, and what it may do with a drawn token, is in decoding/stopping/base.py.
"""

import math
import random
from collections.abc import Sequence

from decoding.errors import UserError
from decoding.interfaces import RoundCosts, Sign, Stopping
from decoding.stopping.base import Fixed, Tries


class Confidence(Fixed):
    """Stop after a token whose own probability is below a threshold (Hugging Face's
    assistant_confidence_threshold, 0.4).
    """

    reads = "confidence"

    def __init__(self, threshold: float = 0.4) -> None:
        self.threshold = threshold

    def more(self, depth: int, sign: Sign | None) -> bool:
        assert sign is not None
        return sign.confidence >= self.threshold


class Assisted(Confidence):
    """Hugging Face's assisted generation: two tokens more after a round that passed whole, one less
    after any other, from 5 on, and its confidence threshold inside the round.
    """

    def __init__(self, threshold: float = 0.4) -> None:
        super().__init__(threshold)
        self.length = 5

    def limit(self, budget: int) -> int:
        return min(self.length, budget)

    def update(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.length = self.length + 2 if accepted == drafted else max(1, self.length - 1)


class _OnlineThreshold:
    """A threshold that moves until a share `goal` of the drafted tokens is accepted (Zhang et al.
    2024, Draft & Verify, arXiv 2309.08168, section 3.3; AdaEDL takes it over).
    """

    def __init__(self, start: float, goal: float = 0.9, step: float = 0.01) -> None:
        self.value, self.goal, self.step = start, goal, step
        self.rate = goal

    def update(self, drafted: int, accepted: int, capped: bool) -> None:
        if not drafted:
            return
        self.rate = 0.5 * self.rate + 0.5 * accepted / drafted
        if self.rate < self.goal:
            wanted = self.value + self.step
        elif capped:
            wanted = self.value
        else:
            wanted = self.value - self.step
        self.value = min(1.0, max(0.0, 0.9 * self.value + 0.1 * wanted))


class AdaptiveConfidence(Fixed):
    """Draft & Verify's rule (arXiv 2309.08168): a confidence threshold that follows the acceptance
    rate.
    """

    reads = "confidence"

    def __init__(self, threshold: float = 0.6) -> None:
        self.online = _OnlineThreshold(threshold)
        self._budget = 0

    def limit(self, budget: int) -> int:
        self._budget = budget
        return budget

    def more(self, depth: int, sign: Sign | None) -> bool:
        assert sign is not None
        return sign.confidence >= self.online.value

    def update(self, drafted: int, accepted: int) -> None:
        self.online.update(drafted, accepted, capped=drafted == self._budget)


class Entropy(AdaptiveConfidence):
    """AdaEDL (arXiv 2410.18351): stop once the lower bound 1 - sqrt(0.2 H(q)) of the acceptance
    falls below a threshold.

    The bound is of the token that was just drawn, which is kept: its forward is paid, and one more
    row of the target is nearly free.
    """

    reads = "entropy"
    FACTOR = 0.2  # the paper's gamma: cross-entropy of q and p as a multiple of H(q)

    def __init__(self, threshold: float = 0.3) -> None:
        super().__init__(threshold)

    def more(self, depth: int, sign: Sign | None) -> bool:
        assert sign is not None
        return 1 - math.sqrt(self.FACTOR * max(sign.entropy, 0.0)) >= self.online.value


class Thompson(Fixed):
    """EESD's control (arXiv 2406.03853): before each token but the first draw an acceptance from
    its Beta posterior and go on with that chance.

    A round drafts one token at least, here as under every rule without costs; the paper asks before
    that one too.
    """

    DISCOUNT = 0.99  # of old rounds

    def __init__(self, key: int) -> None:
        self._random = random.Random(key)
        self.passed = self.failed = 1.0

    def more(self, depth: int, sign: Sign | None) -> bool:
        return self._random.random() < self._random.betavariate(self.passed, self.failed)

    def update(self, drafted: int, accepted: int) -> None:
        self.passed = 1.0 + (self.passed - 1.0) * self.DISCOUNT + accepted
        self.failed = 1.0 + (self.failed - 1.0) * self.DISCOUNT + (accepted < drafted)


LEAST_CHANCE, CHANCE_SLOPE = 0.3, 0.65  # an untried token's chance to pass, by its probability


class Passed:
    """Accepted over tested tokens: a prior that stands for WEIGHT tests, and what was seen, old
    rounds forgotten by degrees.
    """

    WEIGHT = 4.0
    # of what was seen, every round: a row that gave up drafting tries again some day
    DISCOUNT = 0.99

    def __init__(self, confidence: float = 0.5) -> None:
        self._prior = self._passed = self.WEIGHT * (LEAST_CHANCE + CHANCE_SLOPE * confidence)
        self._tested = self.WEIGHT

    @property
    def share(self) -> float:
        return self._passed / self._tested

    def forget(self) -> None:
        """A round is over."""
        self._passed = self._prior + (self._passed - self._prior) * self.DISCOUNT
        self._tested = self.WEIGHT + (self._tested - self.WEIGHT) * self.DISCOUNT

    def learn(self, passed: int, tested: int = 1) -> None:
        self._passed += passed
        self._tested += tested


class CostRatio(Fixed):
    """Ours: go on while the chance that the next token survives, over what it costs, beats the
    tokens a millisecond so far.

    Optimal stopping of a renewal-reward process: with rho the long-run rate, the k-th further token
    is worth its P(survive) when that exceeds rho (t_draft + t_target(k + 1) - t_target(k)).
    P(survive) is the product of acceptance
    estimates: of a drawn token by its confidence (a count in each tenth), of the next one by the
    running acceptance. rho is that of this request: emitted tokens over the modelled milliseconds
    of its rounds.
    """

    reads = "confidence"
    BINS = 10  # of confidence

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.passed = Passed()
        self._by_confidence = [Passed((i + 0.5) / self.BINS) for i in range(self.BINS)]
        self._round: list[Passed] = []  # counts of the tokens drawn in this round
        self._survival = 1.0
        # One autoregressive step: a drafter has to beat it.
        self._tokens, self._ms = 1.0, costs.plain_ms

    def limit(self, budget: int) -> int:
        self._round, self._survival = [], 1.0
        return budget if self._worth(0) else 0

    def more(self, depth: int, sign: Sign | None) -> bool:
        assert sign is not None
        count = self._by_confidence[min(int(sign.confidence * self.BINS), self.BINS - 1)]
        self._round.append(count)
        self._survival *= count.share
        return self._worth(depth)

    def _worth(self, depth: int) -> bool:
        """Is token depth + 1 worth its cost?"""
        more_ms = self.costs.round_ms(depth + 1, depth + 1) - self.costs.round_ms(depth, depth)
        return self._survival * self.passed.share * self._ms > self._tokens * more_ms

    def update(self, drafted: int, accepted: int) -> None:
        for count in (self.passed, *self._by_confidence):
            count.forget()
        tested = min(accepted + 1, drafted)
        for depth, count in enumerate(self._round[:tested]):
            self.passed.learn(depth < accepted)
            count.learn(depth < accepted)
        self._tokens += accepted + 1
        self._ms += self.costs.round_ms(drafted, drafted)


class CostRatioByRound(Fixed):
    """The same decision before the round, from past rounds alone: the length with the most expected
    tokens a millisecond at the running acceptance.

    For devices that the host runs ahead of, where a confidence costs a wait, and for batches, whose
    rounds are as long as their longest draft (`RoundCosts.rows`).
    """

    def __init__(self, costs: RoundCosts) -> None:
        self.costs, self.passed, self._tries = costs, Passed(), Tries(costs)

    def limit(self, budget: int) -> int:
        length = max(range(budget + 1), key=self._rate)
        return length * self._tries(length > 0)

    def _rate(self, length: int) -> float:
        """Expected tokens a millisecond of a round with this draft length."""
        tokens = sum(self.passed.share**depth for depth in range(length + 1))
        return tokens / self.costs.round_ms(length, length)

    def update(self, drafted: int, accepted: int) -> None:
        self.passed.forget()
        self.passed.learn(accepted, min(accepted + 1, drafted))


# Policies that read what was drawn: on a GPU each drafted token waits for the device.
EAGER: dict[str, type[Confidence | AdaptiveConfidence | Entropy]] = {
    "confidence": Confidence,
    "assisted": Assisted,
    "adaptive_confidence": AdaptiveConfidence,
    "entropy": Entropy,
}
NAMES = ("fixed", *EAGER, "thompson", "cost_ratio")


def make_stopping(
    name: str,
    keys_B: Sequence[int],
    threshold: float | None,
    costs: RoundCosts | None,
    per_token: bool = True,
) -> list[Stopping]:
    """A policy for each row. keys_B: of (seed, request), for those that draw numbers; threshold:
    None takes the policy's own;
    per_token: whether `cost_ratio` may look at drawn tokens (of several rows it never does).

    Raises UserError for an unknown name, and for `cost_ratio` without measured costs.
    """
    given = {} if threshold is None else {"threshold": threshold}
    if name in EAGER:
        return [EAGER[name](**given) for _ in keys_B]
    if given:
        raise UserError(f"stopping '{name}' takes no threshold, found {threshold}.")
    if name == "fixed":
        return [Fixed() for _ in keys_B]
    if name == "thompson":
        return [Thompson(key) for key in keys_B]
    if name == "cost_ratio":
        if costs is None:
            raise UserError(
                "stopping 'cost_ratio' needs measured costs: Settings(costs=time_parts(...).costs)."
            )
        kind = CostRatio if per_token and costs.rows == 1 else CostRatioByRound
        return [kind(costs) for _ in keys_B]
    raise UserError(f"stopping '{name}' is unknown, expected one of {', '.join(NAMES)}.")
