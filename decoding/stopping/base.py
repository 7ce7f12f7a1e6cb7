"""Stopping policies: each request has one, which is called after every sampled token.

The policies are in decoding/stopping/policies.py, the decisions by cost in planner.py. A sampled
token is kept and tested. Dropping it because of its confidence would bias the output (Leviathan et
al. 2023 need x ~ q given everything that earlier tests read); stopping after it does not. A policy
keeps the state of its request alone, so a row's output depends neither on its neighbors nor on
earlier requests.
"""

import math

from decoding.interfaces import Stopping, TokenConfidence

# For a token that was looked up and not sampled from a distribution.
UNKNOWN = TokenConfidence(confidence=0.5, entropy=math.log(2))


def cut(drafted: list[int], policy: "Stopping") -> list[int]:
    """Return the beginning of a looked-up continuation that a policy keeps."""
    for depth in range(1, len(drafted)):
        if not policy.more(depth, UNKNOWN):
            return drafted[:depth]
    if drafted:
        policy.more(len(drafted), UNKNOWN)  # policies count the last token too
    return drafted


class Fixed:
    """Policy that drafts exactly the budget."""

    reads = "nothing"

    def limit(self, budget: int) -> int:
        """Return the budget."""
        return budget

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        """Return true."""
        return True

    def update(self, drafted: int, accepted: int) -> None:
        """Do nothing."""
