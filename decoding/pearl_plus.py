"""PEARL+: per request, and from cycle to cycle, the schedule and the draft length that promise the most tokens a millisecond.

PEARL (Liu et al. 2025, arXiv 2408.11850) spends a whole target forward on one token in pre-verify, and fixes its chunk. That loses to serial
decoding where the drafter is fast or often wrong. Here every cycle (from one empty draft to the next) begins with a choice, by closed forms of
the request's own acceptance so far and of the measured costs:

- serial: draft, then verify, nothing at the same time;
- pearl: pre-verify and post-verify;
- eager: draft a chunk at once in place of a pre-verify, then verify it while the next one is drafted.

The draft length is part of the choice: where the lanes overlap, the best one has the drafter go on until the target is done. What is chosen
hangs on verified tokens alone, so all rules keep their laws.
"""

from dataclasses import dataclass
from functools import cache

from decoding.batch import OnTokens, Row, Settings
from decoding.drafter import Drafter
from decoding.pearl import Pearl
from decoding.pearl_wall import PearlWall
from decoding.stopping import RoundCosts
from decoding.target import Target

PRIOR, WEIGHT, DISCOUNT = 0.6, 4.0, 0.97  # acceptance before anything was seen, the tests it stands for, memory a round
HIGHEST = 0.995  # acceptance in the closed forms, whose cycles never end at 1


@dataclass(frozen=True)
class Choice:
    """A schedule and its draft length, with what they promise."""

    mode: str  # serial, pearl or eager
    gamma: int
    rate: float  # tokens a millisecond


def serial_rate(alpha: float, gamma: int, costs: RoundCosts) -> float:
    """Tokens a millisecond of draft-then-verify: E(gamma) / (gamma t_draft + t_target(gamma + 1))."""
    tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return tokens / (gamma * costs.t_draft_ms + costs.target_ms(gamma + 1) + costs.overhead_ms)


def pearl_rate(alpha: float, gamma: int, costs: RoundCosts, overlap: float) -> float:
    """Tokens a millisecond of PEARL's cycle: 1 / alpha pre-verify rounds of a token, then 1 / (1 - alpha^gamma) post-verify rounds."""
    before, after = 1 / alpha, 1 / (1 - alpha**gamma)
    tokens = before + after * (1 - alpha**gamma) / (1 - alpha)
    spent = before * _lanes(gamma, 1, costs, overlap) + after * _lanes(gamma, gamma, costs, overlap)
    return tokens / (spent + (before + after) * costs.overhead_ms)


def eager_rate(alpha: float, gamma: int, costs: RoundCosts, overlap: float) -> float:
    """Tokens a millisecond of: a chunk drafted alone, a round that tests it and the next one's first token, then post-verify rounds."""
    later = alpha ** (gamma + 1) / (1 - alpha**gamma)
    tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha) + later * (1 - alpha**gamma) / (1 - alpha)
    spent = (
        gamma * costs.t_draft_ms
        + _lanes(gamma, gamma + 1, costs, overlap)
        + later * _lanes(gamma, gamma, costs, overlap)
    )
    return tokens / (spent + (1 + later) * costs.overhead_ms)


@cache
def choose(alpha: float, longest: int, costs: RoundCosts, overlap: float) -> Choice:
    """The best schedule and draft length at this acceptance; remembered, so ask in round numbers."""
    alpha = min(max(alpha, 0.01), HIGHEST)
    found = []
    for gamma in range(1, longest + 1):
        found.append(Choice("serial", gamma, serial_rate(alpha, gamma, costs)))
        found.append(Choice("pearl", gamma, pearl_rate(alpha, gamma, costs, overlap)))
        found.append(Choice("eager", gamma, eager_rate(alpha, gamma, costs, overlap)))
    return max(found, key=lambda choice: choice.rate)


def _lanes(drafted: int, width: int, costs: RoundCosts, overlap: float) -> float:
    """Milliseconds of both lanes: their sum less the share of the shorter one that is hidden."""
    draft_ms, target_ms = drafted * costs.t_draft_ms, costs.target_ms(width)
    return draft_ms + target_ms - overlap * min(draft_ms, target_ms)


class PearlPlus(Pearl):
    """One row under the schedule that pays, with a virtual clock."""

    one_row = True
    overlap = 1.0  # the virtual clock's

    def __init__(
        self, target: Target, drafter: Drafter | None, rows: list[Row], settings: Settings, on_tokens: OnTokens | None
    ) -> None:
        super().__init__(target, drafter, rows, settings, on_tokens)
        assert settings.costs is not None, "decoding.schedules asks for them"
        self._costs = settings.costs
        self._passed, self._tested = PRIOR * WEIGHT, WEIGHT
        self._seen = (0, 0)
        self.chosen: list[Choice] = []  # of all cycles

    def round(self) -> None:
        """At the start of a cycle choose; then a round as PEARL's, its states switched on and off."""
        if not self.lanes[0].tokens:
            alpha, overlap = round(self._passed / self._tested, 2), round(self._measured_overlap(), 2)
            choice = choose(alpha, self.gamma, self._costs, overlap)
            self.chosen.append(choice)
            self.pre_verify, self.post_verify = choice.mode == "pearl", choice.mode != "serial"
            self.chunk = choice.gamma
        generation = self.rows[0].generation
        super().round()
        seen = (generation.accepted, generation.tested)
        self._passed = PRIOR * WEIGHT + (self._passed - PRIOR * WEIGHT) * DISCOUNT + seen[0] - self._seen[0]
        self._tested = WEIGHT + (self._tested - WEIGHT) * DISCOUNT + seen[1] - self._seen[1]
        self._seen = seen

    def _measured_overlap(self) -> float:
        return self.overlap


class PearlPlusWall(PearlPlus, PearlWall):
    """The same with the drafter in a worker: the overlap is what this request has measured so far."""

    overlap = 0.9  # until it is measured

    def _measured_overlap(self) -> float:
        drafting, verifying, both = self._both
        if not both:
            return self.overlap
        return max(0.0, (drafting + verifying - both) / min(drafting, verifying))

    def open(self) -> None:
        """As PEARL on the wall."""
        self._both = [0.0, 0.0, 0.0]  # seconds of the drafter's lane, the target's, and both, in rounds that had both
        super().open()

    def round(self) -> None:
        """As PEARL+; rounds with two lanes teach the overlap."""
        super().round()
        if self._draft_seconds > 0 and self._target_seconds > 0:
            for i, seconds in enumerate((self._draft_seconds, self._target_seconds, self._lanes_seconds)):
                self._both[i] += seconds
