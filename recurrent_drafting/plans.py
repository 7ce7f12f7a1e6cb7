"""How much a row drafts: how many steps, how many beams each of them starts from, and how many
nodes are verified.

A plan belongs to one row and its rounds, so a row's drafts do not depend on other rows. There
are four kinds:

- `Fixed`: all beams to the end of the budget. Where the host runs ahead of the device, their tree
  gets as much room in the target's forward as the row's last trees needed (`Room`); elsewhere its
  nodes are counted.
- `ByPassing`: with costs and a single beam, as many steps as pay by how often the row's drafted
  tokens passed before.
- `ByReading`: of beams, every step is read and weighed by measured costs
  (decoding/stopping/marginal_gain.py).
- `ByHistory`: with costs where a look at a step would be a wait for the device, and in batches,
  whose rounds are as wide as their widest row. Steps, beams and nodes are said before the round, by
  the rounds before (decoding/drafters/trees/sizing.py); which ones these are is found on the
  device.

With costs, at most as many beams are searched as pay on the machine at all (`width_worth`).

What is left out is left out for its place or for its chance, which are known before anything is
tested. Of drawn beams no node is left out once it is drawn: plans say how many children are drawn,
before they are, and from how many of the drawn ones the search goes on.

Shapes: W beams.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

from decoding.drafters.trees.sampled_children import SECOND_CHANCE
from decoding.drafters.trees.sizing import TreeSize
from decoding.interfaces import RoundCosts
from decoding.stopping.base import Tries
from decoding.stopping.marginal_gain import WEIGHT, Share, Worth


def ladder(most: int) -> tuple[int, ...]:
    """Numbers of beams that steps are timed from, and that one is chosen of before a round: the
    powers of two, and the most.
    """
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


# the chance of a step's likeliest node to pass; these are rates of a head of chat24m
FIRST_PASSES = 0.66
# that of a later one, where those before it failed (of drawn ones see
# decoding/drafters/trees/sampled_children.py)
PICKED_PASSES = 0.2
DEEPEST = 5  # steps that are thought of
# how many times a chain's rate a drawn tree must promise: drawing and testing it costs beside the
# steps that are timed
DRAWN_TREE = 1.1
# of a drafting round over a plain one: a head's step is dear, and is paid before it tells that
# nothing is worth verifying
MARGIN = 1.05
# The same of picked beams where tokens are sampled, and how many rounds the hope for them lasts:
# they pass by their own p, which seldom pays.
PICKS_MARGIN, PICKS_PATIENCE = 1.15, 1.0
# a chain of them is thought to pass so often at first, and tries a token where that pays; 0.24
# passed of a head of chat24m
PICKS_TRY = 0.4
# Tests that a chain's prior stands for: with 4, a few unlucky ones ended drafting where it paid
# (docs/experiments/2026-11-23-chain-length-by-past.md).
CHAIN_PATIENCE = 12.0


def width_rate(costs: RoundCosts, width: int, drawn: bool) -> float:
    """Tokens a millisecond of so many beams at their best length, every node verified."""
    later = [SECOND_CHANCE / rank if drawn else PICKED_PASSES for rank in range(1, width)]
    passes = 1 - (1 - FIRST_PASSES) * prod(1 - chance for chance in later)
    tokens, best = 1.0, 0.0
    for steps in range(1, DEEPEST + 1):
        tokens += passes**steps
        best = max(best, tokens / costs.drafted_ms(costs.steps_ms(steps, width), steps * width))
    return best


@lru_cache
def width_worth(costs: RoundCosts, most: int, drawn: bool) -> int:
    """How many beams pay on this machine, of `ladder(most)`: by measured costs alone, so that every
    request has as many.

    Where a forward over more tokens costs nearly nothing that is all of them; where it is dear, a
    chain, which is also drawn faster.
    """

    def rate(width: int) -> float:
        return width_rate(costs, width, drawn) / (DRAWN_TREE if drawn and width > 1 else 1.0)

    return max(ladder(most), key=lambda width: (rate(width), -width))


class Room:
    """Nodes of a row's tree of fixed beams that the target's forward has room for: as many as its
    last trees needed, of W x L at most.

    What goes beyond is left out: nodes of the last steps, which are reached least often. The true
    number is read after the round, so a row is short of room for one round.
    """

    ROUNDS = 8

    def __init__(self) -> None:
        self._last: deque[tuple[int, int]] = deque(maxlen=self.ROUNDS)  # nodes needed, and seen
        self._most = 0

    def nodes(self, most: int) -> int:
        """Of a draft that sees `most` nodes."""
        self._most = most
        return max((-(-needed * most // seen) for needed, seen in self._last), default=most)

    def learn(self, needed: int) -> None:
        """The round is over."""
        if self._most:
            self._last.append((needed, self._most))
        self._most = 0


class Fixed:
    """All beams to the end of the budget."""

    def __init__(self, width: int, ahead: bool) -> None:
        self._width, self._room = width, Room() if ahead else None
        self.depth = 0  # steps of this round
        # nodes of a tree that are proposed at most; None: as many as there are
        self.room: int | None = None

    def begin(self, budget: int) -> int:
        """A round begins. How many steps it has."""
        self.depth = budget
        self.room = None if self._room is None else self._room.nodes(self._width * budget)
        return budget

    def learn(self, answer: Any, accepted: int) -> None:
        """The round is over. answer: the number of nodes; None where it was not asked for."""
        if self._room is not None and answer is not None:
            self._room.learn(answer)


class ByPassing(Fixed):
    """A chain as long as pays by how often the row's drafted tokens passed before.

    It is drafted like a fixed one: no step is looked at. That a look costs, tenths of a millisecond
    in Python and a wait, is what a chain's length by its own chances did not bring back
    (docs/experiments/2026-11-23-chain-length-by-past.md).
    """

    def __init__(self, costs: RoundCosts, margin: float, prior: float, patience: float) -> None:
        """margin: how many times a plain round's tokens a millisecond a drafting one must promise.
        prior: the share of tokens that pass, before any was tested. patience: tests that it stands
        for.
        """
        super().__init__(1, ahead=False)
        self._costs, self._least = costs, margin / costs.plain_ms
        self._rounds_ms: list[float] = []  # of 1, 2, ... steps, as many as were asked for so far
        self._passes = Share(prior, 1.0, patience)
        self._tries = Tries(costs)

    def begin(self, budget: int) -> int:
        """A round begins. How many steps it has; none where drafting does not pay."""
        for steps in range(len(self._rounds_ms) + 1, budget + 1):
            self._rounds_ms.append(self._costs.drafted_ms(self._costs.steps_ms(steps, 1), steps))
        passes, tokens = self._passes.now, 1.0
        most, best = self._least, 0
        for steps, round_ms in enumerate(self._rounds_ms[:budget], 1):
            tokens += passes**steps
            rate = tokens / round_ms
            if rate > most:
                most, best = rate, steps
        self.depth = best if self._tries(best > 0) else 0
        return self.depth

    def learn(self, answer: Any, accepted: int) -> None:
        """The round is over; a row that did not draft comes nearer to its prior, whatever was
        accepted in place of a draft.
        """
        drafted = self.depth > 0
        self._passes.learn(accepted * drafted, min(accepted + 1, self.depth))
        self.depth = 0


class ByReading:
    """As many steps, beams and nodes as this round's own chances make worth their cost."""

    reads = True

    def __init__(self, costs: RoundCosts, margin: float, patience: float) -> None:
        """As `decoding.stopping.marginal_gain.Worth` has them."""
        self._worth = Worth(costs, margin=margin, patience=patience)
        self._draws = False  # in the step that is taken
        self.depth = 0  # steps of this round at most

    @property
    def steps(self) -> int:
        """Taken in this round."""
        return self._worth.steps

    @property
    def nodes(self) -> int:
        """That are verified."""
        return self._worth.verified

    @property
    def _goes_on(self) -> bool:
        return not self._worth.ended and self._worth.steps < self.depth

    def begin(self, budget: int) -> int:
        """A round begins. How many steps it has at most; none where drafting does not pay."""
        self.depth = budget * self._worth.drafts()
        return self.depth

    def saw(self, chances_W: Sequence[float]) -> int:
        """A step picked nodes with these chances. From how many of them the next one starts; 0:
        from none.
        """
        if self._goes_on:
            self._worth.saw(chances_W)
        return self._worth.frontier if self._goes_on else 0

    def admit(self, chances_W: Sequence[float]) -> int:
        """How many children a step draws, the worthiest, if these are the chances of those that it
        could draw.
        """
        self._draws = self._goes_on
        return sum(self._worth.admit(chances_W)) if self._draws else 0

    def drew(self, chances_W: Sequence[float]) -> int:
        """The drawn children have these chances. From how many of them the next step starts; 0:
        from none.
        """
        if self._draws:
            self._worth.drew(chances_W)
        return self._worth.frontier if self._goes_on else 0

    def learn(self, answer: Any, accepted: int) -> None:
        """The round is over."""
        self._worth.learn(accepted)


class ByHistory:
    """Plan of as many steps, beams and nodes as paid in past rounds.

    It receives chances only after a round.
    """

    reads = False

    def __init__(self, costs: RoundCosts, width: int) -> None:
        self._size = TreeSize(costs, width, frontiers=ladder(width))
        self._width, self._taken = width, 0

    @property
    def depth(self) -> int:
        """Steps of this round."""
        return len(self._size.chosen)

    @property
    def steps(self) -> int:
        """Taken in this round: all of them."""
        return self.depth

    @property
    def nodes(self) -> int:
        """That are verified."""
        return sum(self._size.chosen)

    def begin(self, budget: int) -> int:
        """A round begins. How many steps it has; none where drafting does not pay."""
        self._taken = 0
        return len(self._size.choose(budget, self._width * budget))

    def admit(self, chances_W: Sequence[float]) -> int:
        """How many children a step draws, the worthiest."""
        return self._size.chosen[self._taken] if self._taken < self.depth else 0

    def saw(self, chances_W: Sequence[float]) -> int:
        """A step is over. From how many of its nodes the next one starts; 0: from none."""
        self._taken += 1
        return self._size.frontier if self._taken < self.depth else 0

    drew = saw

    def learn(self, answer: Any, accepted: int) -> None:
        """The round is over. answer: of each step the chances of its nodes, likeliest first; None
        where nothing was drafted.
        """
        self._size.learn(() if answer is None else answer, accepted)


ByCost = ByReading | ByHistory
Plan = Fixed | ByCost


def plan_of(costs: RoundCosts | None, width: int, ahead: bool, sampled_picks: bool = False) -> Plan:
    """How a row drafts. costs: None where beams are fixed. ahead: the host runs ahead of the
    device. sampled_picks: beams are picked, and tested as point masses by what is sampled, which
    seldom pays and is given up at once.
    """
    if costs is None:
        return Fixed(width, ahead)
    margin, patience = (PICKS_MARGIN, PICKS_PATIENCE) if sampled_picks else (MARGIN, WEIGHT)
    if width == 1:
        prior, tests = (
            (PICKS_TRY, PICKS_PATIENCE) if sampled_picks else (FIRST_PASSES, CHAIN_PATIENCE)
        )
        return ByPassing(costs, margin, prior, tests)
    if ahead or costs.rows > 1:
        return ByHistory(costs, width)
    return ByReading(costs, margin, patience)
