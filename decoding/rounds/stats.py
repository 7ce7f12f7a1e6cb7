"""Counts of one generation, which are summed over rows and runs before rates are computed.

A round is one target forward; prefill is not a round. Only emitted tokens are counted: tokens that
a round accepts after a stop token are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Headlines leave out texts whose distinct-4 is below this: loops are easy to predict and do not
# represent real text.
LOOPING_BELOW = 0.5


class Round(NamedTuple):
    """Counts of one row's round, and the wall seconds of the batch's round and of its parts.

    The rest of the seconds goes to committing, to reporting the round to the drafter, and to
    counting. A round of an overlapped schedule includes what was drafted since the one before.
    """

    drafted: int
    tested: int
    accepted: int
    emitted: int
    seconds: float
    # in the drafter; of an overlapped schedule: its lane
    draft_seconds: float
    # in the target's forward, and in the verification rule; 0: not measured
    forward_seconds: float
    verify_seconds: float


@dataclass
class Generation:
    """The output of one prompt and its counts.

    Seconds are wall time of the whole batch while this row ran. An overlapped schedule drafts and
    verifies at the same time, in two lanes.
    """

    # includes the stop token
    tokens: list[int] = field(default_factory=list)
    # "length" or "stop"
    finish: str = "length"
    rounds: int = 0
    drafted: int = 0
    # forwards of the draft model, for the whole batch
    draft_steps: int = 0
    # sum over the draft steps of their frontiers: the nodes of a row that a step continues from
    draft_frontiers: int = 0
    # nodes of the target's forwards without the tip, padding included
    verified: int = 0
    # tests at depth 1, 2, ... (all earlier depths were accepted)
    tested_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    # One character per emitted token: "1" an accepted draft, "0" the target's token in place of a
    # rejected draft, "." where no draft was tested.
    trace: str = ""
    # prompt tokens that were read, without those that a session had cached
    prefilled: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    # part of decode_seconds spent in the drafter
    draft_seconds: float = 0.0
    # parts of decode_seconds spent in the target's forwards and in the verification rule; 0 for
    # overlapped schedules and on devices that work while the host continues
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    # overlapped schedules: seconds of the target's lane
    target_seconds: float = 0.0
    # overlapped schedules: seconds of the shorter lane of each round, which overlap can hide
    shorter_seconds: float = 0.0
    # overlapped schedules: seconds of the longer lane of each round, a part of decode_seconds
    lanes_seconds: float = 0.0
    # from the start of the prefill to the end of the first round
    first_token_seconds: float = 0.0
    # sums over the rounds up to each one
    totals: list[Round] = field(default_factory=list)

    @property
    def tested(self) -> int:
        """Number of tested draft tokens."""
        return sum(self.tested_by_depth)

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return sum(self.accepted_by_depth)

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens per target forward (tau), the bonus token included, prefill excluded."""
        return len(self.tokens) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding, prefill excluded."""
        return len(self.tokens) / max(self.decode_seconds, 1e-9)

    @property
    def by_round(self) -> list[Round]:
        """Return each round's own numbers."""
        before = [Round._make([0] * len(Round._fields)), *self.totals]
        return [
            Round._make(now - then for now, then in zip(*pair, strict=True))
            for pair in zip(self.totals, before, strict=False)
        ]

    def end_round(self) -> None:
        """Note the sums after a round; without a target forward it is no round of its own."""
        if self.rounds > len(self.totals):
            counts = (self.drafted, self.tested, self.accepted, len(self.tokens))
            seconds = (self.decode_seconds, self.draft_seconds)
            self.totals.append(Round(*counts, *seconds, self.forward_seconds, self.verify_seconds))

    def count(self, drafted: int, tested: int, accepted: int, emitted: int) -> None:
        """Add one round's numbers of drafted, tested, accepted and emitted tokens."""
        self.rounds += 1
        self.trace += "1" * accepted + "0" * (tested - accepted) + "." * (emitted - tested)
        self.drafted += drafted
        missing = tested - len(self.tested_by_depth)
        if missing > 0:
            self.tested_by_depth += [0] * missing
            self.accepted_by_depth += [0] * missing
        for depth in range(tested):
            self.tested_by_depth[depth] += 1
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1


def distinct_n(tokens: Sequence[int], n: int = 4) -> float:
    """Return the number of distinct n-grams over the number of n-grams.

    It is 1 without repetition, near 0 for a text that loops, and 1 for fewer than n tokens.
    """
    grams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0
