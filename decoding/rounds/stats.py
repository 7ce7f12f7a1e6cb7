"""What one generation did: counts that add up over rows and runs, and are turned into rates once,
by the reader.

A round is one target forward; prefill is not one. Only tokens that were emitted are counted: what a
round accepted behind a stop token is as if it had not been.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# Texts that repeat themselves more than this (distinct-4) do not count in a headline: a loop is
# easy to guess, and says nothing about real text.
LOOPING_BELOW = 0.5


@dataclass
class Generation:
    """The output of one prompt and its counts. Seconds are the wall time of the whole batch while
    this row ran.
    """

    tokens: list[int] = field(default_factory=list)  # the stop token included
    finish: str = "length"  # or "stop"
    rounds: int = 0
    drafted: int = 0
    draft_steps: int = 0  # the drafter's model's forwards, of the whole batch
    # of a row, that these started from, summed; one each in a chain
    draft_frontiers: int = 0
    verified: int = 0  # nodes that the target's forwards ran over besides the tip, padding included
    # tests at depth 1, 2, ...; those before had passed
    tested_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    # A character a token: "1" a draft that passed, "0" the target's in place of one that failed,
    # "." where none was tested.
    trace: str = ""
    # prompt tokens that were read; those that a session's cache held are not among them
    prefilled: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0  # part of decode_seconds spent in the drafter
    target_seconds: float = 0.0  # of an overlapped schedule: the target's lane
    # of an overlapped schedule: the shorter lane of each round, what overlap can hide
    shorter_seconds: float = 0.0
    # part of decode_seconds: the longer lane of each round of an overlapped schedule
    lanes_seconds: float = 0.0
    first_token_seconds: float = 0.0  # from the start of the prefill to the end of the first round

    @property
    def tested(self) -> int:
        """Tested draft tokens."""
        return sum(self.tested_by_depth)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens."""
        return sum(self.accepted_by_depth)

    @property
    def block_efficiency(self) -> float:
        """tau: tokens a target forward, the bonus token included, prefill excluded."""
        return len(self.tokens) / self.rounds if self.rounds else 0.0

    def count(self, drafted: int, tested: int, accepted: int, emitted: int) -> None:
        """Add one round."""
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
    """Distinct n-grams / n-grams: 1 when nothing repeats, near 0 when the text loops. Shorter than
    n counts as 1.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
