"""Draft lengths of one-pass chains, chosen from measured costs and each request's past rounds."""

from collections.abc import Sequence

from decoding.interfaces import RoundCosts
from decoding.stopping.planner import RoundPlanner


class ChainPlans:
    """Planners of the rows of a batch; a length is settled before its round."""

    def __init__(self, costs: RoundCosts, rows: int) -> None:
        """Start the plans of new rows. costs: of a round; a draft of any length costs one pass."""
        self._costs = costs.of_one_pass()
        self._plans_B: list[RoundPlanner] = []
        self._drafted_B: list[int] = []  # tokens drafted in this round
        self.add_rows(rows)

    def add_rows(self, count: int) -> None:
        """Start the plans of further rows."""
        self._plans_B += [RoundPlanner(self._costs) for _ in range(count)]
        self._drafted_B += [0] * count

    def lengths(self, budgets_B: Sequence[int]) -> list[int]:
        """Return each row's draft length, at most its budget, and 0 where no draft pays."""
        pairs = zip(self._plans_B, budgets_B, strict=True)
        return [plan.chain_length(budget) if budget else 0 for plan, budget in pairs]

    def draft(self, counts_B: Sequence[int]) -> None:
        """Record the numbers of drafted tokens."""
        self._drafted_B = list(counts_B)

    def learn(self, accepted_B: Sequence[int]) -> None:
        """End the round; accepted tokens of rows without a draft belong to another drafter."""
        rows = zip(self._plans_B, self._drafted_B, accepted_B, strict=True)
        for plan, drafted, accepted in rows:
            plan.learn_round(drafted, accepted, self._costs.round_ms(drafted, drafted))
        self._drafted_B = [0] * len(self._plans_B)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._plans_B = [self._plans_B[row] for row in rows]
        self._drafted_B = [self._drafted_B[row] for row in rows]
