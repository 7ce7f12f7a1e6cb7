"""PEARL+: run each cycle with the schedule that has the most expected tokens per millisecond.

PEARL (Liu et al. 2025, arXiv 2408.11850) spends a complete target forward on one token in
pre-verify, and its chunks have a fixed length. It loses to serial decoding if the drafter is fast
or inaccurate. Here every cycle, from one empty draft to the next, begins with a choice among three
schedules, from closed forms in the request's acceptance rates and the measured costs:

- serial: draft, then verify, without overlap;
- pearl: pre-verify and post-verify;
- eager: draft a chunk instead of a pre-verify, then verify it while the next one is drafted.

The schedule is chosen for every cycle, the draft length for every chunk: with overlap, the best
length keeps the drafter busy until the target is done. A choice depends on verified tokens and the
clock, never on unverified drafts, so all rules keep their laws. With given costs on the virtual
clock it depends on tokens alone, and the same seed gives the same text under every rule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter

from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.rounds.batch import OnTokens, Row
from decoding.rounds.settings import Settings
from decoding.schedules.pearl import LaneSeconds, Pearl
from decoding.schedules.pearl_wall import PearlWall
from decoding.stopping.planner import DecayedRate

# Limits of acceptance in the closed forms: at 1 a cycle never ends.
LOWEST, HIGHEST = 0.01, 0.995


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates of a draft token, given the token before it.

    Acceptance is correlated, so a single rate would underestimate long chunks.
    """

    first: float  # after a token of the target
    next: float  # after an accepted token


@dataclass(frozen=True)
class Choice:
    """A schedule and its draft length, with the expected tokens per millisecond."""

    mode: str  # serial, pearl or eager
    gamma: int
    rate: float


def serial_rate(
    chance: Acceptance, gamma: int, costs: RoundCosts, overlap: float = 0.0, rest_ms: float = 0.0
) -> float:
    """Return the expected tokens per millisecond of serial rounds. overlap, rest_ms: ignored."""
    tokens = 1 + chance.first * (1 - chance.next**gamma) / (1 - chance.next)
    return tokens / costs.round_ms(gamma, gamma)


def pearl_rate(
    chance: Acceptance, gamma: int, costs: RoundCosts, overlap: float, rest_ms: float
) -> float:
    """Return the expected tokens per millisecond of PEARL's cycle.

    On average it has 1 / first pre-verify rounds of one token and 1 / (1 - next^gamma) post-verify
    rounds. overlap: the hidden share of the shorter lane. rest_ms: milliseconds of a round outside
    both lanes.
    """
    before, after = 1 / chance.first, 1 / (1 - chance.next**gamma)
    tokens = before + 1 / (1 - chance.next)
    spent = before * _lanes(gamma, 1, costs, overlap) + after * _lanes(gamma, gamma, costs, overlap)
    return tokens / (spent + (before + after) * rest_ms)


def eager_rate(
    chance: Acceptance, gamma: int, costs: RoundCosts, overlap: float, rest_ms: float
) -> float:
    """Return the expected tokens per millisecond of the eager cycle.

    A chunk is drafted alone; a round tests it and the next chunk's first token; post-verify rounds
    follow. overlap, rest_ms: see `pearl_rate`.
    """
    later = chance.first * chance.next**gamma / (1 - chance.next**gamma)
    tokens = 1 + chance.first / (1 - chance.next)
    # The cycle of a chunk of one token ends with its first round.
    if gamma == 1:
        later, tokens = 0.0, 1 + chance.first
    spent = (
        costs.steps_ms(gamma)
        + _lanes(gamma, gamma + 1, costs, overlap)
        + later * _lanes(gamma, gamma, costs, overlap)
    )
    return tokens / (spent + (1 + later) * rest_ms)


def _lanes(drafted: int, width: int, costs: RoundCosts, overlap: float) -> float:
    """Return the milliseconds of both lanes: their sum less the hidden share of the shorter one."""
    draft_ms, target_ms = costs.steps_ms(drafted), costs.target_ms(width)
    return draft_ms + target_ms - overlap * min(draft_ms, target_ms)


RATES: dict[str, Callable[[Acceptance, int, RoundCosts, float, float], float]] = {
    "serial": serial_rate,
    "pearl": pearl_rate,
    "eager": eager_rate,
}


@lru_cache(maxsize=4096)
def choose(
    first: float, next_: float, longest: int, costs: RoundCosts, overlap: float, rest_ms: float
) -> dict[str, Choice]:
    """Return each schedule's best draft length, at most `longest`, with its rate.

    first, next_: see `Acceptance`. overlap, rest_ms: see `pearl_rate`. Results are cached, so the
    arguments should be rounded.
    """
    chance = Acceptance(*(min(max(rate, LOWEST), HIGHEST) for rate in (first, next_)))
    best = {}
    for mode, rate in RATES.items():
        rates = {g: rate(chance, g, costs, overlap, rest_ms) for g in range(1, longest + 1)}
        gamma = max(rates, key=rates.__getitem__)
        best[mode] = Choice(mode, gamma, rates[gamma])
    return best


def _coarse(share: float) -> float:
    """Round a share to a multiple of 1/40, so that `choose` finds it in its cache."""
    return round(40 * share) / 40


class PearlPlus(Pearl):
    """A batch of one row on the schedule with the highest expected rate, with a virtual clock."""

    one_row = True
    overlap = 1.0  # of the virtual clock

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rows: list[Row],
        settings: Settings,
        on_tokens: OnTokens | None,
    ) -> None:
        super().__init__(target, drafter, rows, settings, on_tokens)
        assert settings.costs is not None and drafter is not None, "by_name.py checks them"
        self._one_pass = drafter.capabilities.steps == "round"
        self._costs = settings.costs.of_one_pass() if self._one_pass else settings.costs
        self.overall, self.first, self.next = DecayedRate(), DecayedRate(), DecayedRate()
        self.chosen: list[Choice] = []  # by cycle
        self._deciding = 0.0  # seconds of this round's choice

    def _round(self) -> None:
        """Choose a schedule if a cycle begins, then run a round of it."""
        began = perf_counter()
        overall = self.overall.value
        first, next_ = (_coarse(rate.value_with(overall)) for rate in (self.first, self.next))
        overlap, rest_ms = _coarse(self._measured_overlap()), self._rest_ms()
        choices = choose(first, next_, self.gamma, self._costs, overlap, rest_ms)
        self._deciding = perf_counter() - began
        if not self.lanes[0].tokens:
            choice = max(choices.values(), key=lambda choice: choice.rate)
            self.chosen.append(choice)
            self.pre_verify, self.post_verify = choice.mode == "pearl", choice.mode != "serial"
            self._fresh = True
        # A cycle keeps its schedule, but each chunk has the best length at that time: a run of
        # accepted tokens lengthens them.
        self._set_length(choices[self.chosen[-1].mode].gamma)
        generation = self.rows[0].generation
        accepted, tested = generation.accepted, generation.tested
        super()._round()
        self._learn(generation.accepted - accepted, generation.tested - tested)

    def _charge(self, rows: list[Row], steps: int, took: LaneSeconds, rest: float) -> None:
        """Charge the time of the choice to the rest of the round, on the virtual clock too."""
        super()._charge(rows, steps, took, rest + self._deciding)

    def _learn(self, accepted: int, tested: int) -> None:
        """Update the acceptance rates after a round's tests."""
        if not tested:
            return
        firsts = int(self._fresh)
        self._fresh = False
        # All rates decay, so a rate that is no longer tested returns to its prior and is retried.
        self.overall.update(accepted, tested)
        self.first.update(min(accepted, firsts), firsts)
        self.next.update(accepted - min(accepted, firsts), tested - firsts)

    def _set_length(self, gamma: int) -> None:
        """Set the length of the next chunk."""
        self.chunk = gamma

    def _measured_overlap(self) -> float:
        return self.overlap

    def _rest_ms(self) -> float:
        """Return the milliseconds of a round outside both lanes."""
        return max(0.0, self._costs.overhead_ms)


class PearlPlusWall(PearlPlus, PearlWall):
    """PEARL+ with the drafter in a worker; the overlap and the rest of a round are measured.

    The rest of a serial round differs from that of a round with two lanes: it includes the message
    to the worker and back, which overlapping lanes hide.

    A chunk that is drafted during verification continues past its best length until the target is
    done, since these tokens are free. Chunks then end by the clock, which does not change greedy
    and coupled outputs. Token verification keeps the chosen length, so the same seed and choices
    give the same text. So does a drafter that drafts a chunk in one forward.

    A worker and a target with separate cores keep them in serial cycles: changing the number of
    threads costs more than such a cycle gains.
    """

    overlap = 0.9  # until it is measured

    def _measured_overlap(self) -> float:
        return max(0.0, self._hidden / self._shorter) if self._shorter else self.overlap

    def _rest_ms(self) -> float:
        if not self._verifying:
            return super()._rest_ms()
        # in units of target steps, which cancels the machine's speed
        return self._costs.target_ms(1) * _coarse(self._rest / self._verifying)

    def _set_length(self, gamma: int) -> None:
        """Set the next chunk's length, or its minimum if it continues until the target is done."""
        overlaps = self.post_verify and (self.pre_verify or bool(self.lanes[0].tokens))
        continues = overlaps and self.chooser.rule in ("greedy", "coupled") and not self._one_pass
        self.chunk, self.least = (None, gamma) if continues else (gamma, None)

    def open(self) -> None:
        """Open the batch as PEARL does, and reset the measurements."""
        # seconds during which both lanes ran, and seconds of the shorter lanes
        self._hidden = self._shorter = 0.0
        # of rounds with two lanes: seconds outside both, and in the target's lane
        self._rest = self._verifying = 0.0
        super().open()

    def _charge(self, rows: list[Row], steps: int, took: LaneSeconds, rest: float) -> None:
        """Charge a round as PEARL+ does; measure the overlap and the rest with two lanes."""
        super()._charge(rows, steps, took, rest)
        if took.draft > 0 and took.target > 0:
            self._hidden += took.draft + took.target - took.both
            self._shorter += min(took.draft, took.target)
            self._rest += rest + self._deciding
            self._verifying += took.target
