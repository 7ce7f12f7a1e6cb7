"""The predicted speedup of a chain on the target's answers, by which checkpoints are selected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decoding.costs.prediction import Costs, chain_speedup
from training.held_out.rounds import walk

SPEEDUP, TOKENS = "predicted_speedup", "predicted_block_efficiency"
LENGTH = "predicted_draft_length"
COST_RATIO = "cost_ratio"
UNRELIABLE = "predicted_speedup_unreliable"  # 1, where the costs are; else there is no such figure
LONGEST_DRAFT = 8  # of a chain of single tokens


@dataclass(frozen=True)
class SpeedupPrediction:
    """Prediction of the best draft length from walked rounds and measured costs."""

    costs: Costs
    # largest number of tokens of an answer
    max_new_tokens: int
    # longest draft length to consider
    draft_tokens: int

    def figures(self, survival_ATK: np.ndarray, lengths_A: Sequence[int]) -> dict[str, float]:
        """Return block efficiency and speedup at the best draft length, this length, c and `score`.

        The score is the predicted speedup. survival_ATK, lengths_A: see `walk`. Ties go to the
        shorter draft. A prediction from unreliable costs is marked.
        """
        found = []
        for gamma in self.costs.gammas:
            if gamma <= self.draft_tokens:
                rounds = walk(survival_ATK, lengths_A, gamma, self.max_new_tokens)
                tokens = rounds.block_efficiency
                found.append((chain_speedup(tokens, gamma, self.costs), -gamma, tokens))
        speedup, minus_gamma, tokens = max(found)
        return {
            TOKENS: tokens,
            SPEEDUP: speedup,
            LENGTH: float(-minus_gamma),
            COST_RATIO: self.costs.cost_ratio,
            "score": speedup,
            **({UNRELIABLE: 1.0} if self.costs.unreliable else {}),
        }


def describe_prediction(figures: Mapping[str, float]) -> str:
    """Describe a prediction like `tau 2.10, predicted 1.24x at length 3`; "" if there is none.

    An unreliable speedup is not shown.
    """
    if SPEEDUP not in figures:
        return ""
    speedup = "unreliable" if UNRELIABLE in figures else f"{figures[SPEEDUP]:.2f}x"
    return f"tau {figures[TOKENS]:.2f}, predicted {speedup} at length {figures[LENGTH]:.0f}"


def selecting_figure(figures: Mapping[str, float], without_costs: str) -> str:
    """Return the name of the figure that selects the best checkpoint.

    without_costs: its name if no costs are known.
    """
    return SPEEDUP if SPEEDUP in figures else without_costs
