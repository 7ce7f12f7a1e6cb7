"""What a draft is worth on this machine: how long it is drafted, from how many nodes each step goes
on, and which nodes are verified, by measured costs.

A node's chance to be accepted is estimated by the drafter: its path's probability. Summed over
nodes these are the tokens that a round gains, over the milliseconds that it takes the rate that is
maximised (OPT-Tree, Wang et al. 2024, arXiv 2406.17276, with costs, as
decoding/drafters/trees/ranked.py does). Estimates are trusted as far as they came true in the row's
own rounds before. Estimates belong to a row, so its output does not depend on other rows. Nothing
looks at a token before its chance to be tested is decided.
"""

from collections.abc import Sequence
from itertools import accumulate

from decoding.interfaces import RoundCosts
from decoding.stopping.base import Tries

PASSES = 0.66  # of a step, the chance that one of its nodes passes, before any was tested
WEIGHT = 4.0  # rounds, or tests, that a prior stands for


class Share:
    """What came over what was spent: a prior that stays, and what was seen, forgotten
    by degrees.
    """

    # of what was seen, every round: a row that gave up drafting tries again some day
    DISCOUNT = 0.99

    def __init__(self, came: float, spent: float, weight: float = WEIGHT) -> None:
        """The prior, which stands for `weight` times as much."""
        self._prior = (weight * came, weight * spent)
        self._came, self._spent = self._prior

    @property
    def now(self) -> float:
        return self._came / self._spent

    def learn(self, came: float, spent: float) -> None:
        """A round is over."""
        first, cost = self._prior
        self._came = first + (self._came - first) * self.DISCOUNT + came
        self._spent = cost + (self._spent - cost) * self.DISCOUNT + spent


class Worth:
    """The decisions of one row."""

    def __init__(
        self,
        costs: RoundCosts,
        most: int | None = None,
        margin: float = 1.0,
        patience: float = WEIGHT,
    ) -> None:
        """most: nodes that `best` chooses at most. margin: how many times a plain round's tokens a
        millisecond a drafting one must bring.
        patience: rounds that the hope to do so stands for.
        """
        self.costs, self.most, self.margin = costs, most, margin
        self._tries = Tries(costs)
        # A round before any was seen: one step, one node, accepted.
        self._rounds = Share(2.0, costs.round_ms(1, 1), patience)  # tokens over milliseconds
        self._promises = Share(1.0, 1.0)  # accepted over promised tokens
        self._steps = Share(PASSES, 1.0)  # steps of which a node passed, of those that were tested
        self.begin()

    def begin(self) -> None:
        """Forget the last round's draft."""
        self.steps = self.verified = 0
        self.ended = False
        self.frontier = (
            1  # nodes of the last step that the next one is to start from: the likeliest
        )
        self.nodes: list[float] = []  # estimated chances of this round's nodes, trust included
        self._draft_ms = 0.0
        self._best_rate = 0.0  # tokens a millisecond, if the draft ended here

    @property
    def trust(self) -> float:
        """Accepted over promised tokens."""
        return self._promises.now

    def drafts(self) -> bool:
        """Whether drafting pays in the round that begins; asked once a round."""
        return self._tries(self._rounds.now > self.margin / self.costs.plain_ms)

    def _rate(self, tokens: float, nodes: int) -> float:
        """Tokens a millisecond after the steps so far."""
        return tokens / (
            self.costs.drafted_ms(self._draft_ms, nodes) if self.steps else self.costs.plain_ms
        )

    def best(self) -> tuple[list[int], float]:
        """The nodes whose verification promises most, in order, and the tokens a millisecond that
        they promise.

        A parent is never less likely than its child and comes before it, so paths stay whole.
        """
        ranked = sorted(range(len(self.nodes)), key=lambda node: (-self.nodes[node], node))
        tokens, most, taken = 1.0, 0.0, 0
        for count, node in enumerate(ranked[: self.most], 1):
            tokens += self.nodes[node]
            rate = self._rate(tokens, count)
            if rate > most:
                most, taken = rate, count
        self.verified = taken
        return sorted(ranked[:taken]), most

    def saw(self, chances_W: Sequence[float], mass: float | None = None) -> None:
        """A step chose nodes with these chances; `ended` tells afterwards whether another step is
        worth its cost.

        mass: the chances of those that the next step would go on from; None: `frontier` tells from
        how many it is to.
        """
        self._step()
        self.nodes += [self.trust * chance for chance in chances_W]
        self._decide(chances_W if mass is None else [mass], self.best()[1])

    def _step(self) -> None:
        """Another step was taken."""
        self.steps += 1
        self._draft_ms += self.costs.step_ms(self.frontier)

    def settle(self, chances_M: Sequence[float]) -> int:
        """The draft has these nodes after all. How many of the likeliest are verified."""
        self.nodes = [self.trust * chance for chance in chances_M]
        return len(self.best()[0])

    def admit(self, chances_W: Sequence[float]) -> list[bool]:
        """Which children, not drawn yet, a step draws; all of them are verified. `drew` follows
        where it is known which tokens they are.
        """
        self._step()
        order = sorted(range(len(chances_W)), key=lambda child: (-chances_W[child], child))
        tokens = 1.0 + sum(self.nodes)
        most, taken = self._rate(tokens, len(self.nodes)), 0
        for count, child in enumerate(order, 1):
            tokens += self.trust * chances_W[child]
            rate = self._rate(tokens, len(self.nodes) + count)
            if chances_W[child] > 0 and rate > most:
                most, taken = rate, count
        admitted = set(order[:taken])
        self.verified += taken
        self.nodes += [self.trust * chances_W[child] for child in sorted(admitted)]
        self._decide([sum(chances_W[child] for child in admitted)], most)
        return [child in admitted for child in range(len(chances_W))]

    def drew(self, chances_W: Sequence[float]) -> None:
        """The children that were admitted have these chances, now that they are drawn; 0 of the
        others. `frontier` tells how many of them the next step is to expand: that depends on their
        tokens, and says nothing of those of their own children.
        """
        self._decide(chances_W, self._best_rate)

    def _decide(self, chances_W: Sequence[float], rate: float) -> None:
        """From how many of these nodes another step pays most, if from any.

        It gains a token where one of the nodes that it starts from is reached and one of its own
        passes, which happens as often as in this row's steps before: how likely this step's nodes
        are tells nothing of the next one's
        (docs/experiments/2026-11-23-acceptance-of-sampled-children.md).
        """
        most, sums = 0.0, accumulate(sorted(chances_W, reverse=True))
        self.frontier, self._best_rate = 0, rate
        for count, mass in enumerate(sums, 1):
            gain = self.trust * mass * self._steps.now - rate * self.costs.step_ms(count)
            if gain > most:
                most, self.frontier = gain, count
        self.ended = self.frontier == 0

    def learn(self, accepted: int) -> None:
        """The round is over; a row that did not draft comes nearer to its prior, whatever was
        accepted in place of a draft.
        """
        promised = sum(sorted(self.nodes, reverse=True)[: self.verified]) / self.trust
        drafted = self.steps > 0
        ms = self.costs.drafted_ms(self._draft_ms, self.verified) if drafted else 0.0
        self._rounds.learn((1 + accepted) * drafted, ms)
        self._promises.learn(accepted * drafted, promised)
        self._steps.learn(accepted * drafted, min(accepted + 1, self.steps))
        self.begin()
