"""Policies that end a row's draft."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TokenConfidence:
    """A sampled token's probability, and the entropy of the distribution it was sampled from.

    The entropy is in nats, and NaN if the stopping policy does not read it.
    """

    confidence: float
    entropy: float = math.nan


class Stopping(Protocol):
    """Policy that may end a row's draft before its budget is spent."""

    # Input of `more`: "nothing", "time", "confidence" or "entropy". With "nothing" the draft length
    # may be decided before the draft. For the last two, the host waits for the device at every
    # drafted token.
    reads: str

    def limit(self, budget: int) -> int:
        """Begin a round; return its maximum draft length, at most `budget`."""

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        """Return whether to draft another token after `depth` tokens, of which `token` is the last.

        token: None if the policy reads nothing.
        """

    def update(self, drafted: int, accepted: int) -> None:
        """Record the numbers of drafted and accepted tokens of the round that ends."""


Policies = Sequence[Stopping]  # one for every row
