"""When to stop drafting inside a round: one policy a request, asked after every drawn token. The
policies are in decoding/stopping/policies.py.

A token once drawn is kept and tested. Dropping it because of what the policy saw would bias the
output (Leviathan et al. 2023 need x ~ q given everything that earlier tests saw); stopping *after*
it does not. Policies remember their own request only, so a row's output hangs neither on its
neighbours nor on what was decoded before.
"""

import math

from decoding.interfaces import RoundCosts, Sign, Stopping

# Of a token that was looked up: it has no distribution.
UNKNOWN = Sign(confidence=0.5, entropy=math.log(2))


def cut(drafted: list[int], policy: "Stopping") -> list[int]:
    """The beginning of a looked-up continuation that a policy keeps."""
    for depth in range(1, len(drafted)):
        if not policy.more(depth, UNKNOWN):
            return drafted[:depth]
    if drafted:
        policy.more(len(drafted), UNKNOWN)  # it counts the last token too
    return drafted


class Tries:
    """When a row that gave up drafting tries again: of a batch at rounds to which all its rows come
    together, though none asks another.
    """

    EVERY = 16  # rounds

    def __init__(self, costs: RoundCosts) -> None:
        self._every = self.EVERY if costs.rows > 1 else 1
        self._round, self._idle = -1, False

    def __call__(self, pays: bool) -> bool:
        """Whether the row drafts in the round that begins. pays: what it expects."""
        self._round += 1
        self._idle = not pays or (self._idle and self._round % self._every != 0)
        return not self._idle


class Fixed:
    """Draft exactly the budget."""

    reads = "nothing"

    def limit(self, budget: int) -> int:
        return budget

    def more(self, depth: int, sign: Sign | None) -> bool:
        return True

    def update(self, drafted: int, accepted: int) -> None:
        """Nothing to learn."""
