"""Default methods of drafters."""

from collections.abc import Sequence

from decoding.interfaces import Observation, RoundCosts, Target


class StatelessDrafter:
    """Defaults of a drafter of chains that ignores the target, its costs and its verdicts."""

    num_layers = num_parameters = 0

    def width(self, gamma: int) -> int:
        """Return gamma, the length of the chain."""
        return gamma

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Ignore the target and its costs."""

    def observe(self, observation: Observation) -> None:
        """Ignore the outcome of a round."""

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Keep everything, as no cache holds drafted tokens."""
