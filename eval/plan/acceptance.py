"""Acceptance of drafters that are not trained yet, predicted from those that are.

The log-odds of the acceptance rate at depth k are linear in what is known before a training: the
drafter's kind, for a model the logarithms of its layers and width, the logarithms of the tokens
trained on and of k, and the temperature. The weights are a ridge regression, whose penalty is the
one that predicts best when every drafter is left out in turn. The error of these predictions is
that of a new one. A kind that no drafter has is predicted as the mean of the other heads.

Shapes: N measured depths of all curves, F features, G groups that are left out together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from eval.plan.curves import CHAIN, EVALUATION, PARALLEL, TREE, Curve

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# Standard error of the log-odds if fewer than three drafters are known: it turns a rate of 0.5 into
# one of 0.27 to 0.73 within two errors.
UNKNOWN_ERROR = 0.5
HALF = 50  # tests at which a rate has half of the largest weight
USUAL_TOKENS = 100_000_000  # trained on, if no drafter is known
WIDTH_UNIT = 512  # hidden size whose logarithm counts as 0, as that of one layer does

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Prospect:
    """What the model knows of a drafter before its training."""

    kind: str
    draft_shape: str
    layers: int
    hidden_size: int
    training_tokens: int
    temperature: float

    @classmethod
    def of(cls, curve: Curve) -> Prospect:
        """Return the prospect of a measured drafter."""
        return cls(**{name: getattr(curve, name) for name in cls.__dataclass_fields__})


def logit(rate: float) -> float:
    """Return the log-odds of a rate between 0 and 1."""
    return math.log(rate / (1 - rate))


def rate_of(log_odds: float) -> float:
    """Return the rate with these log-odds."""
    return 1 / (1 + math.exp(-log_odds))


def choose_curves(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves of evaluations, and of trainings whose drafter has no evaluation there."""
    evaluated = {(one.drafter_hash, one.temperature) for one in curves if one.source == EVALUATION}
    return [
        one
        for one in curves
        if one.source == EVALUATION or (one.drafter_hash, one.temperature) not in evaluated
    ]


@dataclass(frozen=True)
class AcceptanceModel:
    """Ridge regression of the log-odds of acceptance rates."""

    names: list[str]  # of the features
    means: Vector  # F
    weights: Vector  # F
    constant: float
    usual_tokens: int  # for trainings of an unknown number of tokens
    # smallest and largest number of tokens of a training: acceptance is not extrapolated beyond
    tokens_range: tuple[int, int]
    error: float  # standard error of the log-odds of a drafter that was left out
    # drafter -> mean difference of its log-odds from their prediction without it
    left_out: dict[str, float] = field(default_factory=dict)

    @classmethod
    def fit(cls, curves: Sequence[Curve]) -> AcceptanceModel:
        """Fit the curves of one target; there must be at least one."""
        tokens = [one.training_tokens for one in curves if one.training_tokens]
        usual = round(median(tokens)) if tokens else USUAL_TOKENS
        tokens_range = min(tokens, default=usual), max(tokens, default=usual)
        names = sorted({name for one in curves for name in features(Prospect.of(one), 1, usual)})
        rows, y, w, groups = [], [], [], []
        for curve in curves:
            for k, alpha in enumerate(curve.alpha_by_depth, start=1):
                tests = curve.tested_by_depth[k - 1] if curve.tested_by_depth else HALF
                if alpha is None or not tests:
                    continue
                known = features(Prospect.of(curve), k, usual)
                rows.append([known.get(name, 0.0) for name in names])
                y.append(logit((alpha * tests + 0.5) / (tests + 1)))
                w.append(tests / (tests + HALF))
                groups.append(str(curve.form))
        X, targets, importance = np.array(rows), np.array(y), np.array(w)
        found = []
        for penalty in PENALTIES:
            differences = _left_out(X, targets, importance, groups, penalty)
            squares = [difference**2 for difference in differences.values()]
            found.append((math.sqrt(sum(squares) / len(squares)), penalty, differences))
        error, penalty, differences = min(found, key=lambda one: one[0])
        if len(differences) < 3:
            error, penalty = UNKNOWN_ERROR, 1.0
        means, weights, constant = _ridge(X, targets, importance, penalty)
        return cls(names, means, weights, constant, usual, tokens_range, error, differences)

    def predict(self, one: Prospect, depths: int, errors: float = 0.0) -> list[float]:
        """Return the acceptance rates at depths 1 to `depths`.

        errors: standard errors that are added to the log-odds.
        """
        least, most = self.tokens_range
        one = replace(one, training_tokens=min(max(one.training_tokens, least), most))
        found = []
        for k in range(1, depths + 1):
            known = features(one, k, self.usual_tokens)
            x = np.array([known.get(name, 0.0) for name in self.names]) - self.means
            found.append(rate_of(self.constant + float(x @ self.weights) + errors * self.error))
        return found


def features(one: Prospect, depth: int, usual_tokens: int) -> dict[str, float]:
    """Return the features of a drafter at a depth; absent ones are 0."""
    found = {
        f"kind {one.kind}": 1.0,
        "tokens": math.log2((one.training_tokens or usual_tokens) / usual_tokens),
        "depth": math.log2(depth),
        "temperature": one.temperature,
    }
    if one.draft_shape == TREE:
        found["tree"] = 1.0
    if one.kind in (CHAIN, PARALLEL):
        found |= {"model": 1.0, "layers": math.log2(one.layers)}
        found["width"] = math.log2(one.hidden_size / WIDTH_UNIT)
    return found


def _ridge(X: Vector, y: Vector, w: Vector, penalty: float) -> tuple[Vector, Vector, float]:
    """Return (means, weights, constant) of a weighted ridge regression; the constant is free."""
    means, mean = np.average(X, axis=0, weights=w), float(np.average(y, weights=w))
    Z = X - means
    weights = np.linalg.solve(
        Z.T @ (w[:, None] * Z) + penalty * np.eye(X.shape[1]), Z.T @ (w * (y - mean))
    )
    return means, weights, mean


def _left_out(
    X: Vector, y: Vector, w: Vector, groups: Sequence[str], penalty: float
) -> dict[str, float]:
    """Return each group's mean difference from its prediction by all others."""
    found: dict[str, float] = {}
    for group in dict.fromkeys(groups):
        mine = np.array([one == group for one in groups])
        if mine.all():
            return {group: UNKNOWN_ERROR}
        means, weights, constant = _ridge(X[~mine], y[~mine], w[~mine], penalty)
        predicted = constant + (X[mine] - means) @ weights
        found[group] = float(np.average(y[mine] - predicted, weights=w[mine]))
    return found
