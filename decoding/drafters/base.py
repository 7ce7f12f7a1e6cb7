"""Default methods of drafters."""

from collections.abc import Sequence

from decoding.interfaces import Observation, RoundCosts, Target


class StatelessDrafter:
    """Default methods of a chain drafter that ignores the target, the costs and the outcomes."""

    num_layers = num_parameters = 0

    def width(self, gamma: int) -> int:
        """Return gamma, the length of the chain."""
        return gamma

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Ignore the target and the costs."""

    def observe(self, observation: Observation) -> None:
        """Ignore the outcome of a round."""

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Do nothing, as no cache holds drafted tokens."""
