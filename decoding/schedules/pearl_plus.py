"""PEARL+: for each request and cycle, the schedule with the most expected tokens per millisecond.

PEARL (Liu et al. 2025, arXiv 2408.11850) spends a whole target forward on one token in pre-verify,
and fixes its chunk. That loses to serial decoding where the drafter is fast or often wrong. Here
every cycle (from one empty draft to the next) begins with a choice, by closed forms of the
request's own acceptance so far and of the measured costs:

- serial: draft, then verify, nothing at the same time;
- pearl: pre-verify and post-verify;
- eager: draft a chunk at once in place of a pre-verify, then verify it while the next one is
  drafted.

The draft length is part of the choice: where the lanes overlap, the best one keeps the drafter
busy until the target is done. It is chosen for every chunk, the schedule for every cycle. A choice
depends on verified tokens and on the clock, never on unverified drafts, so all rules keep their
laws. With given costs and on the virtual clock it depends on the tokens alone, and the same seed
gives the same text under every rule.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter

from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.rounds.batch import OnTokens, Row
from decoding.rounds.settings import Settings
from decoding.schedules.pearl import LaneSeconds, Pearl
from decoding.schedules.pearl_wall import PearlWall
from decoding.stopping.planner import DecayedRate

HIGHEST = 0.995  # acceptance in the closed forms, whose cycles never end at 1


@dataclass(frozen=True)
class Acceptance:
    """Chances that a drafted token is accepted.

    Acceptance comes in runs, so a single number would underestimate long chunks.
    """

    first: float  # after a token of the target
    next: float  # after an accepted one


@dataclass(frozen=True)
class Choice:
    """A schedule, its draft length and their expected rate."""

    mode: str  # serial, pearl or eager
    gamma: int
    rate: float  # tokens a millisecond


def serial_rate(chance: Acceptance, gamma: int, costs: RoundCosts) -> float:
    """Return the tokens per millisecond of E(gamma) / (gamma t_draft + t_target(gamma + 1))."""
    tokens = 1 + chance.first * (1 - chance.next**gamma) / (1 - chance.next)
    return tokens / costs.round_ms(gamma, gamma)


def pearl_rate(
    chance: Acceptance, gamma: int, costs: RoundCosts, overlap: float, rest_ms: float
) -> float:
    """Return the tokens per millisecond of PEARL's cycle.

    It has 1 / first pre-verify rounds of a token, then 1 / (1 - next^gamma) post-verify rounds.
    rest_ms: the time of a round of two lanes that is in neither lane.
    """
    before, after = 1 / chance.first, 1 / (1 - chance.next**gamma)
    tokens = before + 1 / (1 - chance.next)
    spent = before * _lanes(gamma, 1, costs, overlap) + after * _lanes(gamma, gamma, costs, overlap)
    return tokens / (spent + (before + after) * rest_ms)


def eager_rate(
    chance: Acceptance, gamma: int, costs: RoundCosts, overlap: float, rest_ms: float
) -> float:
    """Return the tokens per millisecond of the eager cycle.

    A chunk is drafted alone, a round tests it and the next chunk's first token, and post-verify
    rounds follow.
    """
    later = chance.first * chance.next**gamma / (1 - chance.next**gamma)
    tokens = 1 + chance.first / (1 - chance.next)
    # The cycle of a chunk of one token ends with its first round.
    if gamma == 1:
        later, tokens = 0.0, 1 + chance.first
    spent = (
        gamma * costs.t_draft_ms
        + _lanes(gamma, gamma + 1, costs, overlap)
        + later * _lanes(gamma, gamma, costs, overlap)
    )
    return tokens / (spent + (1 + later) * rest_ms)


@lru_cache(maxsize=4096)
def choose(
    first: float, next_: float, longest: int, costs: RoundCosts, overlap: float, rest_ms: float
) -> dict[str, Choice]:
    """Return the best draft length of each schedule at these chances.

    Results are cached, so the arguments should be rounded.
    """
    chance = Acceptance(*(min(max(rate, 0.01), HIGHEST) for rate in (first, next_)))
    best = {}
    for mode, rate in (
        ("serial", partial(serial_rate, chance, costs=costs)),
        ("pearl", partial(pearl_rate, chance, costs=costs, overlap=overlap, rest_ms=rest_ms)),
        ("eager", partial(eager_rate, chance, costs=costs, overlap=overlap, rest_ms=rest_ms)),
    ):
        best[mode] = max(
            (Choice(mode, g, rate(g)) for g in range(1, longest + 1)),
            key=lambda choice: choice.rate,
        )
    return best


def _coarse(share: float) -> float:
    """Return a share rounded to 1/40, so that choices are found in the cache."""
    return round(40 * share) / 40


def _lanes(drafted: int, width: int, costs: RoundCosts, overlap: float) -> float:
    """Return the milliseconds of both lanes: their sum less the hidden share of the shorter one."""
    draft_ms, target_ms = drafted * costs.t_draft_ms, costs.target_ms(width)
    return draft_ms + target_ms - overlap * min(draft_ms, target_ms)


class PearlPlus(Pearl):
    """One row under the fastest schedule, on a virtual clock."""

    one_row = True
    overlap = 1.0  # the virtual clock's

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rows: list[Row],
        settings: Settings,
        on_tokens: OnTokens | None,
    ) -> None:
        super().__init__(target, drafter, rows, settings, on_tokens)
        assert settings.costs is not None, "decoding.schedules.by_name asks for them"
        self._costs = settings.costs
        self.overall, self.first, self.next = DecayedRate(), DecayedRate(), DecayedRate()
        self.chosen: list[Choice] = []  # of all cycles
        self._deciding = 0.0  # seconds of this round

    def _round(self) -> None:
        """Choose at the start of a cycle, then run a round of PEARL with its states on or off."""
        began = perf_counter()
        choices = self._choices()
        self._deciding = perf_counter() - began
        if not self.lanes[0].tokens:
            choice = max(choices.values(), key=lambda choice: choice.rate)
            self.chosen.append(choice)
            self.pre_verify, self.post_verify = choice.mode == "pearl", choice.mode != "serial"
            self._fresh = True
        # A cycle keeps its schedule, but each chunk has the best length of the moment: a run of
        # accepted tokens lengthens them.
        self._ask_for(choices[self.chosen[-1].mode].gamma)
        generation = self.rows[0].generation
        accepted, tested = generation.accepted, generation.tested
        super()._round()
        self._learn(generation.accepted - accepted, generation.tested - tested)

    def _charge(self, rows: list[Row], steps: int, took: LaneSeconds, rest: float) -> None:
        """Charge the time of the choice to the rest of the round, on the virtual clock too."""
        super()._charge(rows, steps, took, rest + self._deciding)

    def _learn(self, accepted: int, tested: int) -> None:
        """Update the acceptance rates by a round's tests."""
        if not tested:
            return
        firsts = int(self._fresh)
        self._fresh = False
        # All decay: what a choice no longer tests returns to its prior, and is tried again.
        self.overall.update(accepted, tested)
        self.first.update(min(accepted, firsts), firsts)
        self.next.update(accepted - min(accepted, firsts), tested - firsts)

    def _ask_for(self, gamma: int) -> None:
        """Set the length of the next chunk."""
        self.chunk = gamma

    def _choices(self) -> dict[str, Choice]:
        """Return the best draft length of each schedule for this request."""
        overall = self.overall.value
        first, next_ = (_coarse(rate.value_with(overall)) for rate in (self.first, self.next))
        return choose(
            first,
            next_,
            self.gamma,
            self._costs,
            _coarse(self._measured_overlap()),
            self._rest_ms(),
        )

    def _measured_overlap(self) -> float:
        return self.overlap

    def _rest_ms(self) -> float:
        """Return the time of a round of two lanes that is in neither lane."""
        return max(0.0, self._costs.overhead_ms)


class PearlPlusWall(PearlPlus, PearlWall):
    """PEARL+ with the drafter in a worker; the overlap and the rest of a round are measured.

    The rest of a serial round does not measure the rest of one with two lanes: it includes the
    message to the worker and back, which overlapping lanes hide.

    A chunk that is drafted while the target verifies continues past its best length until the
    target is done, as these tokens are free. Chunks then end by the clock, which does not change
    greedy and coupled outputs. Token verification keeps the chosen length, and with it the same
    text for the same seed and choices.

    A worker and a target with separate cores keep them in serial cycles too: changing threads costs
    more than such a cycle gains.
    """

    overlap = 0.9  # until it is measured

    def _measured_overlap(self) -> float:
        return max(0.0, self._hidden / self._shorter) if self._shorter else self.overlap

    def _rest_ms(self) -> float:
        if not self._verifying:
            return super()._rest_ms()
        # In steps of the target, so that the machine's pace drops out.
        return self._costs.target_ms(1) * _coarse(self._beside / self._verifying)

    def _ask_for(self, gamma: int) -> None:
        """Ask for at least gamma tokens, and for more while the target is busy anyway."""
        overlaps = self.post_verify and (self.pre_verify or bool(self.lanes[0].tokens))
        continues = overlaps and self.chooser.rule in ("greedy", "coupled")
        self.chunk, self.least = (None, gamma) if continues else (gamma, None)

    def open(self) -> None:
        """Open as PEARL does, and reset what is measured."""
        # seconds of lanes that ran at the same time, and of the shorter lanes
        self._hidden = self._shorter = 0.0
        # of rounds with two lanes: seconds beside them, and in the target's lane
        self._beside = self._verifying = 0.0
        super().open()

    def _charge(self, rows: list[Row], steps: int, took: LaneSeconds, rest: float) -> None:
        """Charge a round as PEARL+ does; rounds with two lanes measure the overlap and the rest."""
        super()._charge(rows, steps, took, rest)
        if took.draft > 0 and took.target > 0:
            self._hidden += took.draft + took.target - took.both
            self._shorter += min(took.draft, took.target)
            self._beside += rest + self._deciding
            self._verifying += took.target
