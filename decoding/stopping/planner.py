"""Planners of a request's rounds: whether to draft, and the size of the chain or tree.

Every decision compares tokens with milliseconds. The costs of a round are measured, and the chances
of acceptance are estimated from the request's past rounds, so the output of a row depends neither
on its neighbors nor on earlier requests. There are two kinds of decisions:

- Before a round, the planner maximizes the expected tokens per millisecond of the round
  (`best_prefix`), with the mean chances of past rounds.
- During a round, another draft step or node pays if its expected tokens exceed those that the
  request gains in the same time: optimal stopping of a renewal-reward process. For trees it is
  OPT-Tree with costs (Wang et al. 2024, arXiv 2406.17276).

A decision to test a token never depends on the token itself.

Shapes: L levels, W nodes of a level, M nodes of a tree.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from torch import Tensor

from decoding.interfaces import RoundCosts

# Every estimate starts at an acceptance rate that is usual for trained drafters. Its weight is that
# of a few tests, so the first rounds of a request replace it.
PRIOR = 0.7
WEIGHT = 6.0
DECAY = 0.99  # weight of the observations so far, at every update
RETRY_EVERY = 16  # rounds between the retries of a batch

Chance = TypeVar("Chance", float, Tensor)


class DecayedRate:
    """Ratio of two decaying sums and a prior that does not decay."""

    def __init__(self, prior: float = PRIOR, weight: float = WEIGHT) -> None:
        """Start at the ratio `prior`, which counts as a denominator of `weight`."""
        self.prior, self.weight = prior, weight
        self._gained = self._spent = 0.0

    @property
    def value(self) -> float:
        """Estimated ratio, with the default prior."""
        return self.value_with(self.prior)

    def value_with(self, prior: float) -> float:
        """Return the estimate with another prior of the same weight."""
        return (self.weight * prior + self._gained) / (self.weight + self._spent)

    def sample(self, generator: random.Random) -> float:
        """Return a ratio sampled from its Beta posterior, whose mean is `value`.

        The prior must lie between 0 and 1, and the ratio be that of successes to trials.
        """
        gained = self.weight * self.prior + self._gained
        return generator.betavariate(gained, self.weight + self._spent - gained)

    def update(self, gained: float, spent: float) -> None:
        """Let the sums decay and add a round; two zeros bring the estimate closer to its prior."""
        self._gained = self._gained * DECAY + gained
        self._spent = self._spent * DECAY + spent


class LevelRates:
    """Estimates like `DecayedRate` of a level's nodes, with a common denominator."""

    def __init__(self, width: int) -> None:
        """Start without observations of `width` nodes."""
        self._gained_W, self._spent = [0.0] * width, 0.0

    def values_with(self, priors_W: Iterable[float]) -> list[float]:
        """Return the estimates with these priors."""
        spent = WEIGHT + self._spent
        pairs = zip(priors_W, self._gained_W)
        return [(WEIGHT * prior + gained) / spent for prior, gained in pairs]

    def update(self, gained_W: Iterable[float], spent: float) -> None:
        """Let the sums decay and add a round; nodes beyond `gained_W` gain nothing."""
        pairs = zip_longest(self._gained_W, gained_W, fillvalue=0.0)
        self._gained_W = [before * DECAY + gained for before, gained in pairs]
        self._spent = self._spent * DECAY + spent


class Backoff:
    """Rule that pauses drafting while it does not pay.

    During a pause the estimates return to their priors; a single row resumes as soon as they
    predict a gain. The rows of a batch resume in the same rounds, because the draft of one row
    lengthens the round of all.
    """

    def __init__(self, rows: int) -> None:
        self._every = RETRY_EVERY if rows > 1 else 1
        self._round, self._paused = -1, False

    def drafts(self, pays: bool) -> bool:
        """Return whether the row drafts in this round; call it once per round, at its start.

        pays: whether the estimates predict a gain from drafting.
        """
        self._round += 1
        self._paused = not pays or (self._paused and self._round % self._every != 0)
        return not self._paused


def chance_of(probability: Chance) -> Chance:
    """Return the chance that a token is accepted, given its probability under the drafter.

    It is a prior, linear in the probability: 1 for a certain token, and half of PRIOR for an
    improbable one. The estimates of each request correct it.
    """
    return probability * (1 - PRIOR / 2) + PRIOR / 2


def sibling_chance(place: Chance) -> Chance:
    """Return the chance that a sibling is accepted after those before it were rejected.

    place: 1 for the second sibling, 2 for the third.
    """
    return (1 - PRIOR) / (place + 1)


def best_prefix(chances: Iterable[float], round_ms: Callable[[int], float]) -> tuple[int, float]:
    """Return how many of the first nodes give the most expected tokens per millisecond.

    Also returns this rate. chances: each node's chance of acceptance. round_ms: returns the
    milliseconds of a round with a number of verified nodes. Ties go to the smaller number.
    """
    tokens, best, most = 1.0, 0, 1 / round_ms(0)
    for count, chance in enumerate(chances, 1):
        tokens += chance
        rate = tokens / round_ms(count)
        if rate > most:
            best, most = count, rate
    return best, most


class RoundPlanner:
    """Decisions for one request, from measured costs and its past rounds."""

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.acceptance = DecayedRate()  # accepted over tested draft steps
        # Drafting is tried at first unless it loses even with an accepted token in every round.
        first_ms = costs.round_ms(1, 1)
        self._drafting_rate = DecayedRate(2 / first_ms, WEIGHT * first_ms)
        self._backoff = Backoff(costs.rows)

    @property
    def rate(self) -> float:
        """Tokens per millisecond of this request, with or without drafts: the higher of the two."""
        return max(self._drafting_rate.value, 1 / self.costs.plain_ms)

    def drafts(self) -> bool:
        """Return whether the request drafts in this round; call it once per round."""
        return self._backoff.drafts(self._drafting_rate.value > 1 / self.costs.plain_ms)

    def chain_length(self, budget: int) -> int:
        """Return the draft length with the most expected tokens per millisecond, 0 if none pays.

        None pays either where the request's rounds with drafts, dropped ones too, have had fewer
        tokens per millisecond than a round without. Call it once per round.
        """
        accepted = self.acceptance.value
        chances = (accepted**depth for depth in range(1, budget + 1))
        length, rate = best_prefix(chances, lambda length: self.costs.round_ms(length, length))
        gains = self._drafting_rate.value_with(rate) > 1 / self.costs.plain_ms
        return length if self._backoff.drafts(length > 0 and gains) else 0

    def step_gain(self, reached: float, frontier: int, nodes: int) -> float:
        """Return the expected tokens of another draft step, less what the request gains meanwhile.

        reached: the chance that a node which the step starts from is accepted. frontier: the number
        of these nodes. nodes: the number of nodes that are verified without this step.
        """
        verify_ms = self.costs.target_ms(nodes + 2) - self.costs.target_ms(nodes + 1)
        more_ms = self.costs.step_ms(frontier) + verify_ms
        return reached * self.acceptance.value - self.rate * more_ms

    def learn_round(self, steps: int, accepted: int, ms: float) -> None:
        """Update the estimates after a round of `steps` draft steps that took `ms` milliseconds.

        A round without a draft brings them closer to their priors; accepted tokens of another
        drafter do not count.
        """
        if not steps:
            accepted, ms = 0, 0.0
        self._drafting_rate.update((1 + accepted) * bool(steps), ms)
        self.acceptance.update(accepted, min(accepted + 1, steps))

    def learn_dropped(self) -> None:
        """Update the estimates after a round whose draft step was taken and its tokens dropped."""
        self._drafting_rate.update(1, self.costs.drafted_ms(self.costs.step_ms(1), 0))
        self.acceptance.update(0, 0)


class StepPlanner(RoundPlanner):
    """Decisions after each draft step, from the chances of the round's nodes.

    The drafter's estimates are multiplied by `trust`, the ratio of accepted tokens to the sum of
    the estimates in past rounds.
    """

    reads = True  # the chances of a step are read on the host

    def __init__(self, costs: RoundCosts, most: int | None = None) -> None:
        """Plan trees of at most `most` nodes."""
        super().__init__(costs)
        self.most, self.trust = most, DecayedRate(1.0)
        self.depth = 0  # maximum number of draft steps of this round
        self._clear()

    def _clear(self) -> None:
        self.steps = self.nodes = 0  # steps taken and nodes verified in this round
        self.frontier = 1  # nodes that the next step starts from, the likeliest; 0 ends the draft
        self._chances: list[float] = []
        self._draft_ms = 0.0

    @property
    def continues(self) -> bool:
        """Whether the draft takes another step."""
        return self.frontier > 0 and self.steps < self.depth

    def begin(self, budget: int) -> int:
        """Begin a round; return its maximum number of steps, 0 if drafting does not pay."""
        self._clear()
        self.depth = budget if self.drafts() else 0
        return self.depth

    def add(self, chances_W: Sequence[float]) -> None:
        """Add a draft step with the chances of its nodes; do nothing if the draft has ended."""
        if not self.continues:
            return
        self._take_step()
        self._chances += chances_W
        self.settle(self._chances)

    def settle(self, chances_M: Sequence[float]) -> int:
        """Return how many nodes of the tree to verify, likeliest first.

        chances_M: the chances of all its nodes. A parent is at least as likely as its child, so
        paths stay complete.
        """
        self._chances = sorted(chances_M, reverse=True)
        self.nodes = self._count_that_pays(self._chances[: self.most], 0)
        return self.nodes

    def admit(self, chances_W: Sequence[float]) -> int:
        """Return how many children a step samples, likeliest first; all of them are verified.

        chances_W: the chance of each possible child, estimated before it is sampled.
        """
        if not self.continues:
            return 0
        self._take_step()
        room = None if self.most is None else self.most - self.nodes
        ranked = sorted((chance for chance in chances_W if chance > 0), reverse=True)[:room]
        count = self._count_that_pays(ranked, self.nodes)
        self.nodes += count
        self._chances += ranked[:count]
        if count == 0 or self.nodes == self.most:
            self.frontier = 0
        return count

    def start_from(self, chances_W: Sequence[float]) -> int:
        """Return how many of these nodes the next step starts from, likeliest first.

        0 ends the draft. The chances may depend on the nodes' tokens, which carry no information
        about the tokens of their children.
        """
        if not self.continues:
            return 0
        best, reached, self.frontier = 0.0, 0.0, 0
        for count, chance in enumerate(sorted(chances_W, reverse=True), 1):
            reached += self.trust.value * chance
            gain = self.step_gain(reached, count, self.nodes)
            if gain > best:
                best, self.frontier = gain, count
        return self.frontier

    def learn(self, answer: Any, accepted: int) -> None:
        """End the round and update the estimates. answer: ignored."""
        drafted = self.steps > 0
        expected = sum(sorted(self._chances, reverse=True)[: self.nodes])
        self.trust.update(accepted * drafted, expected)
        self.learn_round(self.steps, accepted, self.costs.drafted_ms(self._draft_ms, self.nodes))
        self._clear()

    def _take_step(self) -> None:
        self.steps += 1
        self._draft_ms += self.costs.step_ms(self.frontier)

    def _count_that_pays(self, chances: Sequence[float], verified: int) -> int:
        """Return how many nodes, in this order, to verify for the largest gain.

        verified: number of nodes that are verified in any case. Without any, the result is at least
        1, as the draft steps are already taken.
        """
        without_ms, tokens, rate = self.costs.target_ms(verified + 1), 0.0, self.rate
        best, count = 0.0 if verified else float("-inf"), 0
        for number, chance in enumerate(chances, 1):
            tokens += self.trust.value * chance
            gain = tokens - rate * (self.costs.target_ms(verified + number + 1) - without_ms)
            if gain > best:
                best, count = gain, number
        return count
