"""When to stop drafting inside a round. Fixed: at the budget.

A policy may look at a drafted token's probability; a token once drawn is kept and tested, since dropping it because of
its probability would bias the output (Leviathan et al. 2023 need x ~ q given everything earlier tests saw).

Shapes: B rows.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from decoding.errors import UserError


class Stopping(Protocol):
    """A policy that ends the drafting of rows before their budget is spent."""

    @property
    def reads_probability(self) -> bool:
        """Whether `more` wants the probability of each row's last drafted token."""
        ...

    def more(self, depth: int, probability_B: Tensor | None) -> Sequence[bool] | None:
        """After `depth` drafted tokens: which rows draft another. None: all that have budget."""
        ...

    def update(self, drafted_B: Sequence[int], accepted_B: Sequence[int]) -> None:
        """Learn from a verified round."""
        ...


class Fixed:
    """Draft exactly the budget."""

    reads_probability = False

    def more(self, depth: int, probability_B: Tensor | None) -> None:
        """All rows that have budget go on."""

    def update(self, drafted_B: Sequence[int], accepted_B: Sequence[int]) -> None:
        """Nothing to learn."""


def make_stopping(name: str) -> Stopping:
    """The policy of a name in `Settings.stopping`."""
    policies = {"fixed": Fixed}
    if name not in policies:
        raise UserError(f"stopping '{name}' is unknown, expected one of {', '.join(policies)}.")
    return policies[name]()
