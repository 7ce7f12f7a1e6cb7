"""Acceptance of drafters that are not trained yet, predicted from those that are.

The log-odds of the acceptance rate at depth k are linear in what is known before a training: the
drafter's kind, for a model the logarithms of its layers and width, for a draft vocabulary that of
its size, for a tree that of its nodes, the logarithms of the tokens trained on and of k, the
temperature, and the prompts: what one set of prompts adds is the same for all drafters. The weights
come from a ridge regression (Hoerl and Kennard 1970). Its penalty has the smallest error if every
form of drafter is left out in turn and predicted from the others, and this error is taken as that
of a new drafter. A kind of head that no drafter has is predicted near the mean of the other heads.

Shapes: N measured depths of all curves, F features, G groups that are left out together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.plan.curves import EVALUATION, FIXED, MODELS, TREE, Curve

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# Penalty, and standard error of the log-odds, if fewer forms than FEWEST_FORMS are known. Two of
# these errors turn a rate of 0.5 into one of 0.27 to 0.73.
UNKNOWN_PENALTY, UNKNOWN_ERROR = 1.0, 0.5
FEWEST_FORMS = 3  # of drafters whose predictions give an error and a penalty
HALF = 50  # tests at which a rate has half of the largest weight
USUAL_TOKENS = 100_000_000  # trained on, if no drafter is known

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
    draft_vocab_size: int = 0  # 0: all tokens
    benchmark: str = ""  # the prompts
    tree_nodes: int = 0  # 0: a chain, or an unknown number

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
    """Return the curves of evaluations, and of trainings whose drafter has no evaluation there.

    Of the evaluations of a drafter on the same prompts, those of drafts of a fixed size suffice: a
    rule that ends drafts early raises the rates at larger depths.
    """
    evaluated = {(one.drafter_hash, one.temperature) for one in curves if one.source == EVALUATION}
    fixed = {_without_size(one) for one in curves if one.stopping == FIXED}
    return [
        one
        for one in curves
        if (one.stopping == FIXED or _without_size(one) not in fixed)
        and (one.source == EVALUATION or (one.drafter_hash, one.temperature) not in evaluated)
    ]


def _without_size(one: Curve) -> tuple[Any, ...]:
    """Return the key of a curve of drafts of one size, whatever this size is."""
    return replace(one, stopping=FIXED, tree_nodes=0).key


def usual_prompts(curves: Sequence[Curve]) -> str:
    """Return the prompts on which the most forms of drafters were measured; of several, the last.

    Empty without curves.
    """
    forms: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for one in reversed(curves):
        forms[one.benchmark].add(one.form)
    return max(forms, key=lambda name: len(forms[name]), default="")


@dataclass(frozen=True)
class Usual:
    """Medians of the known drafters, whose logarithms count as 0."""

    training_tokens: float
    layers: float  # of the models
    hidden_size: float  # of the models
    draft_vocab_size: float = 1.0  # of the drafters that do not propose all tokens
    tree_nodes: float = 1.0  # of the trees

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Usual:
        """Return the medians of these curves' drafters."""
        tokens = [one.training_tokens for one in curves if one.training_tokens]
        models = [one for one in curves if one.kind in MODELS]
        return cls(
            median(tokens or [USUAL_TOKENS]),
            median([one.layers for one in models] or [1]),
            median([one.hidden_size for one in models] or [1]),
            median([one.draft_vocab_size for one in curves if one.draft_vocab_size] or [1]),
            median([one.tree_nodes for one in curves if one.tree_nodes] or [1]),
        )


@dataclass(frozen=True)
class AcceptanceModel:
    """Ridge regression of the log-odds of acceptance rates."""

    names: list[str]  # of the features
    means: Vector  # F
    weights: Vector  # F
    constant: float
    usual: Usual  # its tokens are those of trainings of an unknown number
    # Smallest and largest number of tokens of a training, and of nodes of a tree (0: no tree of a
    # known number): acceptance is not extrapolated beyond.
    tokens_range: tuple[int, int]
    nodes_range: tuple[int, int]
    error: float  # standard error of the log-odds of a drafter that was left out
    # form of drafter -> mean difference of its log-odds from their prediction without it; empty
    # if fewer than FEWEST_FORMS are known
    left_out: dict[str, float] = field(default_factory=dict)

    @classmethod
    def fit(cls, curves: Sequence[Curve]) -> AcceptanceModel:
        """Fit the curves of one target; there must be at least one."""
        usual = Usual.of(curves)
        tokens = [one.training_tokens or round(usual.training_tokens) for one in curves]
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
        error, penalty, left_out = UNKNOWN_ERROR, UNKNOWN_PENALTY, dict[str, float]()
        if len(set(groups)) >= FEWEST_FORMS:
            tried = [
                (penalty, _left_out(X, targets, importance, groups, penalty))
                for penalty in PENALTIES
            ]
            penalty, left_out = min(tried, key=lambda one: _root_mean_square(one[1].values()))
            error = _root_mean_square(left_out.values())
        means, weights, constant = _ridge(X, targets, importance, penalty)
        nodes = [one.tree_nodes for one in curves if one.tree_nodes] or [0]
        ranges = (min(tokens), max(tokens)), (min(nodes), max(nodes))
        return cls(names, means, weights, constant, usual, *ranges, error, left_out)

    def predict(self, one: Prospect, depths: int, errors: float = 0.0) -> list[float]:
        """Return the acceptance rates at depths 1 to `depths`.

        errors: standard errors that are added to the log-odds.
        """
        tokens = one.training_tokens or round(self.usual.training_tokens)
        one = replace(
            one,
            training_tokens=_within(tokens, self.tokens_range),
            tree_nodes=one.tree_nodes and _within(one.tree_nodes, self.nodes_range),
        )
        found = []
        for k in range(1, depths + 1):
            known = features(one, k, self.usual)
            x = np.array([known.get(name, 0.0) for name in self.names]) - self.means
            found.append(rate_of(self.constant + float(x @ self.weights) + errors * self.error))
        return found


def features(one: Prospect, depth: int, usual: Usual) -> dict[str, float]:
    """Return the features of a drafter at a depth; absent ones are 0."""
    tokens = one.training_tokens or usual.training_tokens
    found = {
        f"kind {one.kind}": 1.0,
        "tokens": math.log2(tokens / usual.training_tokens),
        "depth": math.log2(depth),
        "temperature": one.temperature,
        f"prompts {one.benchmark}": 1.0,
    }
    if one.draft_shape == TREE:
        found["tree"] = 1.0
        if one.tree_nodes:
            found["nodes"] = math.log2(one.tree_nodes / usual.tree_nodes)
    if one.draft_vocab_size:
        found["some tokens"] = 1.0
        found["drafted tokens"] = math.log2(one.draft_vocab_size / usual.draft_vocab_size)
    if one.kind in MODELS:
        found |= {"model": 1.0, "layers": math.log2(one.layers / usual.layers)}
        found["width"] = math.log2(one.hidden_size / usual.hidden_size)
    return found


def _within(value: int, bounds: tuple[int, int]) -> int:
    return min(max(value, bounds[0]), bounds[1])


def _ridge(X: Vector, y: Vector, w: Vector, penalty: float) -> tuple[Vector, Vector, float]:
    """Return (means, weights, constant) of a weighted ridge regression; the constant is free."""
    means, mean = np.average(X, axis=0, weights=w), float(np.average(y, weights=w))
    Z = X - means
    squares = Z.T @ (w[:, None] * Z) + penalty * np.eye(X.shape[1])
    weights = np.linalg.solve(squares, Z.T @ (w * (y - mean)))
    return means, np.asarray(weights, np.float64), mean


def _left_out(
    X: Vector, y: Vector, w: Vector, groups: Sequence[str], penalty: float
) -> dict[str, float]:
    """Return each group's mean difference from its prediction by all others."""
    found: dict[str, float] = {}
    for group in dict.fromkeys(groups):
        mine = np.array([one == group for one in groups])
        means, weights, constant = _ridge(X[~mine], y[~mine], w[~mine], penalty)
        predicted = constant + (X[mine] - means) @ weights
        found[group] = float(np.average(y[mine] - predicted, weights=w[mine]))
    return found


def _root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(fmean(value**2 for value in values))
