"""Calibration of a head's confidences: one temperature for each depth of a draft.

A confidence c_k = sigmoid(z_k / T_k) is the chance that the token at depth k is accepted if those
before it are, so the product of the first k + 1 is the chance that the draft survives to depth k.
Sequential temperature scaling (DSpark, arXiv 2607.05147) fits T_0, T_1, ... in turn: a grid search
for the smallest expected calibration error of the product up to that depth, given the temperatures
before it. The error sorts predictions into bins of equal width and averages the distances between
a bin's mean prediction and its share of survivors (Guo et al. 2017, arXiv 1706.04599, section 2).

Shapes: M drafts, K drafted tokens, N drafts whose outcome at a depth is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 15
# from 1/8 to 8; among equal errors the first, nearest to 1, is taken
GRID = sorted((2 ** (step / 8) for step in range(-24, 25)), key=lambda each: abs(math.log(each)))
LEAST_DRAFTS = 30  # that survive to a depth, if its temperature is fitted
BEFORE, AFTER = "calibration/error_before", "calibration/error_after"
_TEMPERATURE = "calibration/temperature"


@dataclass(frozen=True)
class Drafts:
    """Confidences of drafts, and what became of the tokens; on the host."""

    logits_MK: Tensor  # z, in float64
    # chance that verification accepts the draft up to each depth: 0 or 1 for greedy answers
    survived_MK: Tensor
    known_MK: Tensor  # bool: the answer has a token there; true up to some depth
    answers_M: Tensor  # number of the answer

    def select(self, chosen_M: Tensor) -> "Drafts":
        """Return some of the drafts."""
        return Drafts(*(each[chosen_M] for each in vars(self).values()))


def confidences(logits: Tensor, temperatures_K: Tensor) -> Tensor:
    """Return the calibrated confidences of logits (..., K). Temperatures of 1 leave every bit."""
    return (logits / temperatures_K).sigmoid()


def predict_survival(logits_MK: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return the predicted chance [M, K] that a draft survives to each depth."""
    return confidences(logits_MK, logits_MK.new_tensor(temperatures)).cumprod(dim=1)


def calibration_error(predicted_N: Tensor, observed_N: Tensor) -> float:
    """Return the expected calibration error of predicted chances; 0 without any."""
    bins_N = (predicted_N * BINS).long().clamp_max(BINS - 1)
    gaps = torch.bincount(bins_N, predicted_N - observed_N, BINS)
    return float(gaps.abs().sum()) / max(1, len(predicted_N))


def mean_error(predicted_MK: Tensor, drafts: Drafts) -> float:
    """Return the mean over the depths of the calibration error of predicted survival."""
    errors = []
    for depth in range(predicted_MK.shape[1]):
        known_M = drafts.known_MK[:, depth]
        predicted_N, survived_N = (
            each[known_M, depth] for each in (predicted_MK, drafts.survived_MK)
        )
        errors.append(calibration_error(predicted_N, survived_N))
    return sum(errors) / len(errors)


def fit_temperatures(drafts: Drafts) -> list[float]:
    """Return a temperature for each depth, by sequential temperature scaling.

    It is 1 for a depth to which fewer than LEAST_DRAFTS drafts survive: the error of the few is
    smallest where their predicted chance is nearest to 0, at the end of the grid.
    """
    temperatures: list[float] = []
    before_M = drafts.logits_MK.new_ones(len(drafts.logits_MK))
    for depth in range(drafts.logits_MK.shape[1]):
        known_M = drafts.known_MK[:, depth]
        logits_M, survived_N = drafts.logits_MK[:, depth], drafts.survived_MK[known_M, depth]
        logits_N, before_N = logits_M[known_M], before_M[known_M]
        errors = [
            calibration_error(before_N * (logits_N / each).sigmoid(), survived_N) for each in GRID
        ]
        reached = drafts.survived_MK[known_M, depth - 1].sum() if depth else known_M.sum()
        best = GRID[errors.index(min(errors))]
        temperatures.append(best if reached >= LEAST_DRAFTS else 1.0)
        before_M = before_M * (logits_M / temperatures[-1]).sigmoid()
    return temperatures


def calibrate(drafts: Drafts) -> dict[str, float]:
    """Return the temperatures that fit all drafts, and the calibration errors before and after.

    The error after is measured on answers to which its temperatures were not fitted: every second
    answer has the temperatures that fit the others, and the others have those that fit it.
    """
    logits_MK, second_M = drafts.logits_MK, drafts.answers_M % 2 == 1
    predicted_MK = torch.empty_like(logits_MK)
    for half_M in (second_M, ~second_M):
        fitted = fit_temperatures(drafts.select(~half_M))
        predicted_MK[half_M] = predict_survival(logits_MK[half_M], fitted)
    plain_MK = predict_survival(logits_MK, [1.0] * logits_MK.shape[1])
    errors = {BEFORE: mean_error(plain_MK, drafts), AFTER: mean_error(predicted_MK, drafts)}
    fitted = fit_temperatures(drafts)
    return errors | {f"{_TEMPERATURE}{depth}": each for depth, each in enumerate(fitted)}


def read_temperatures(figures: Mapping[str, float]) -> tuple[float, ...]:
    """Return the temperatures among held-out figures; empty if there are none."""
    count = sum(name.startswith(_TEMPERATURE) for name in figures)
    return tuple(figures[f"{_TEMPERATURE}{depth}"] for depth in range(count))


def describe_calibration(figures: Mapping[str, float]) -> str:
    """Return a line about the calibration among held-out figures; "" if there is none."""
    if BEFORE not in figures:
        return ""
    shown = ", ".join(f"{each:.2f}" for each in read_temperatures(figures))
    return (
        f"confidence: calibration error {figures[BEFORE]:.2%}, and {figures[AFTER]:.2%} with "
        f"temperatures, on held-out answers that these were not fitted to; temperatures by depth "
        f"{shown}"
    )
