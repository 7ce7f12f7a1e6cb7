"""The stopping policies by name: fixed thresholds, those that adapt, Thompson sampling, and ours, which weighs a token's chance against its cost.

What a policy is asked, and what it may do with a drawn token, stands in decoding/stopping.py.
"""

import math
import random
from collections.abc import Sequence

from decoding.errors import UserError
from decoding.stopping import Fixed, RoundCosts, Sign, Stopping, Tries


class Confidence(Fixed):
    """Stop after a token whose own probability is below a threshold (Hugging Face's assistant_confidence_threshold, 0.4)."""

    reads = "confidence"

    def __init__(self, threshold: float = 0.4) -> None:
        self.threshold = threshold

    def more(self, depth: int, sign: Sign | None) -> bool:
        assert sign is not None
        return sign.confidence >= self.threshold


class Assisted(Confidence):
    """Hugging Face's assisted generation: two tokens more after a round that passed whole, one less after any other, from 5 on,
    and its confidence threshold inside the round."""

    def __init__(self, threshold: float = 0.4) -> None:
        super().__init__(threshold)
        self.length = 5

    def limit(self, budget: int) -> int:
        return min(self.length, budget)

    def update(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.length = self.length + 2 if accepted == drafted else max(1, self.length - 1)


class _OnlineThreshold:
    """A threshold that moves until a share `goal` of the drafted tokens is accepted (Zhang et al. 2024, Draft & Verify,
    arXiv 2309.08168, section 3.3; AdaEDL takes it over)."""

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
    """Draft & Verify's rule (arXiv 2309.08168): a confidence threshold that follows the acceptance rate."""

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
    """AdaEDL (arXiv 2410.18351): stop once the lower bound 1 - sqrt(0.2 H(q)) of the acceptance falls below a threshold.

    The bound is of the token that was just drawn, which is kept: its forward is paid, and one more row of the target is nearly free.
    """

    reads = "entropy"
    FACTOR = 0.2  # the paper's gamma: cross-entropy of q and p as a multiple of H(q)

    def __init__(self, threshold: float = 0.3) -> None:
        super().__init__(threshold)

    def more(self, depth: int, sign: Sign | None) -> bool:
        assert sign is not None
        return 1 - math.sqrt(self.FACTOR * max(sign.entropy, 0.0)) >= self.online.value


class Thompson(Fixed):
    """EESD's control (arXiv 2406.03853): before each token draw an acceptance from its Beta posterior and go on with that chance."""

    DISCOUNT = 0.99  # of old rounds

    def __init__(self, key: int) -> None:
        self._random = random.Random(key)
        self.passed = self.failed = 1.0

    def more(self, depth: int, sign: Sign | None) -> bool:
        return self._random.random() < self._random.betavariate(self.passed, self.failed)

    def update(self, drafted: int, accepted: int) -> None:
        self.passed = 1.0 + (self.passed - 1.0) * self.DISCOUNT + accepted
        self.failed = 1.0 + (self.failed - 1.0) * self.DISCOUNT + (accepted < drafted)


class CostRatio(Fixed):
    """Ours: go on while the chance that the next token survives, over what it costs, beats the tokens a millisecond so far.

    Optimal stopping of a renewal-reward process: with rho the long-run rate, the k-th further token is worth its
    P(survive) when that exceeds rho (t_draft + t_target(k + 1) - t_target(k)). P(survive) is the product of acceptance
    estimates: of a drawn token by its confidence (a Beta count in each tenth, which starts from `prior`), of the next one by the
    running acceptance. rho is that of this request: emitted tokens over the modelled milliseconds of its rounds.

    per_token=False is for devices that the host runs ahead of, where a confidence costs a wait: nothing is read, and each round takes the
    draft length with the most expected tokens a millisecond at the running acceptance. So it is in a batch, whose rounds are as long as their
    longest draft (`RoundCosts.rows`).
    """

    BINS = 10  # of confidence, and one more count for all tokens
    WEIGHT = 4.0  # tests that a count's prior stands for
    DISCOUNT = 0.99  # of what was seen, every round: a row that gave up drafting tries again some day

    def __init__(self, costs: RoundCosts, per_token: bool = True) -> None:
        self.costs, self.per_token = costs, per_token and costs.rows == 1
        self.reads = "confidence" if self.per_token else "nothing"
        self._tries = Tries(costs)
        confidences = [*((i + 0.5) / self.BINS for i in range(self.BINS)), 0.5]
        self._prior = [self.WEIGHT * self.prior(confidence) for confidence in confidences]
        self._passed, self._tested = list(self._prior), [self.WEIGHT] * len(confidences)
        self._round: list[int] = []  # bins of the tokens drawn in this round
        self._survival = 1.0
        # One autoregressive step: a drafter has to beat it.
        self._tokens, self._ms = 1.0, costs.plain_ms

    @staticmethod
    def prior(confidence: float) -> float:
        """Acceptance before anything was seen."""
        return 0.3 + 0.65 * confidence

    @property
    def acceptance(self) -> float:
        """Accepted over tested, all confidences together."""
        return self._passed[-1] / self._tested[-1]

    def limit(self, budget: int) -> int:
        if not self.per_token:
            length = max(range(budget + 1), key=self._rate)
            return length * self._tries(length > 0)
        self._round, self._survival = [], 1.0
        return budget if self._worth(0) else 0

    def _rate(self, length: int) -> float:
        """Expected tokens a millisecond of a round with this draft length."""
        tokens = sum(self.acceptance**depth for depth in range(length + 1))
        return tokens / self.costs.round_ms(length, length)

    def more(self, depth: int, sign: Sign | None) -> bool:
        if not self.per_token:
            return True
        assert sign is not None
        bin_ = min(int(sign.confidence * self.BINS), self.BINS - 1)
        self._round.append(bin_)
        self._survival *= self._passed[bin_] / self._tested[bin_]
        return self._worth(depth)

    def _worth(self, depth: int) -> bool:
        """Is token depth + 1 worth its cost?"""
        more_ms = self.costs.round_ms(depth + 1, depth + 1) - self.costs.round_ms(depth, depth)
        return self._survival * self.acceptance * self._ms > self._tokens * more_ms

    def update(self, drafted: int, accepted: int) -> None:
        self._passed = [at + (x - at) * self.DISCOUNT for x, at in zip(self._passed, self._prior)]
        self._tested = [self.WEIGHT + (x - self.WEIGHT) * self.DISCOUNT for x in self._tested]
        for depth, bin_ in enumerate(self._round[: accepted + 1]):
            for count in (bin_, -1) if depth < drafted else ():
                self._tested[count] += 1
                self._passed[count] += depth < accepted
        if not self.per_token:
            self._tested[-1] += min(accepted + 1, drafted)
            self._passed[-1] += accepted
        self._tokens += accepted + 1
        self._ms += self.costs.round_ms(drafted, drafted)


# Policies that read what was drawn: on a GPU each drafted token waits for the device.
EAGER = ("confidence", "assisted", "adaptive_confidence", "entropy")
NAMES = ("fixed", "confidence", "assisted", "adaptive_confidence", "entropy", "thompson", "cost_ratio")


def make_stopping(
    name: str, keys_B: Sequence[int], threshold: float | None, costs: RoundCosts | None, per_token: bool = True
) -> list[Stopping]:
    """A policy for each row. keys_B: of (seed, request), for those that draw numbers; threshold: None takes the policy's own;
    per_token: whether `cost_ratio` looks at every drawn token (see there).

    Raises UserError for an unknown name, and for `cost_ratio` without measured costs.
    """
    given = {} if threshold is None else {"threshold": threshold}
    if name in EAGER:
        kind = {"confidence": Confidence, "assisted": Assisted, "entropy": Entropy}.get(name, AdaptiveConfidence)
        return [kind(**given) for _ in keys_B]
    if given:
        raise UserError(f"stopping '{name}' takes no threshold, found {threshold}.")
    if name == "fixed":
        return [Fixed() for _ in keys_B]
    if name == "thompson":
        return [Thompson(key) for key in keys_B]
    if name == "cost_ratio":
        if costs is None:
            raise UserError("stopping 'cost_ratio' needs measured costs: Settings(costs=time_parts(...).costs).")
        return [CostRatio(costs, per_token) for _ in keys_B]
    raise UserError(f"stopping '{name}' is unknown, expected one of {', '.join(NAMES)}.")
