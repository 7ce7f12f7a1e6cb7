"""Rows of a plan: what each candidate needs, what it is predicted to gain, and what it costs.

The prediction is the speedup formula (decoding/costs/prediction.py) with the measured costs of the
candidate, and with acceptance rates that are predicted from those of trained drafters
(eval/plan/acceptance.py), or measured if this drafter was trained already.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from decoding.costs.prediction import Costs, needed_alpha, predicted_speedup
from eval.plan.acceptance import (
    HALF,
    USUAL_TOKENS,
    AcceptanceModel,
    Prospect,
    choose_curves,
    usual_prompts,
)
from eval.plan.candidates import Candidate
from eval.plan.config import PlanConfig
from eval.plan.costs import MeasuredCosts
from eval.plan.curves import Curve
from eval.statistics import metrics
from training.models.build import dtype_of

MEASURED, PREDICTED, NONE = "measured", "predicted", ""
ERRORS = 2.0  # standard errors to either side of a prediction
# acceptance rates by depth, and their lower and upper bounds; empty where they are not known
Rates = tuple[list[float], list[float], list[float]]


@dataclass(frozen=True)
class Need:
    """The acceptance rate, equal at all depths, that reaches a speedup."""

    speedup: float
    alpha: float | None  # None: no acceptance reaches it
    num_draft_tokens: int | None  # draft length at which this rate is enough


@dataclass(frozen=True)
class PlanRow:
    """A line of plan.jsonl. Times in ms, rates in tokens/s of all rows, ratios plain."""

    drafter: str
    kind: str
    draft_shape: str
    layers: int  # of a pruned model; 0 for a head
    hidden_size: int  # of a pruned model; 0 for a head
    parameters: int
    draft_vocab_size: int  # 0: all tokens
    memory_bytes: int  # weights, and keys and values of the batch, while serving
    t_draft_ms: float  # of a step; of a complete draft if one_pass
    t_target_ms: dict[int, float]  # new tokens -> a target forward
    V: dict[int, float]
    cost_ratio: float
    one_pass: bool
    overhead_ms: float  # of a round, outside its parts
    plain_ms: float  # a round without a draft
    nodes: dict[int, int]  # draft length -> verified tokens
    unreliable: str  # why the costs are unreliable, as a clause; empty: they are reliable
    needs: list[Need]
    acceptance: str  # measured | predicted | empty: not known
    alpha_by_depth: list[float]
    alpha_low: list[float]  # two standard errors below
    alpha_high: list[float]
    num_draft_tokens: int | None  # draft length with the largest predicted speedup
    speedup_by_length: dict[int, float]
    predicted_speedup: float | None
    speedup_low: float | None  # at two standard errors of the acceptance
    speedup_high: float | None
    equal_alpha: float | None  # rate, equal at all depths, that gives the predicted speedup
    equal_alpha_low: float | None  # that gives speedup_low
    equal_alpha_high: float | None
    tokens_per_second: float | None  # predicted
    training_tokens: int
    training_flop: float
    training_hours: float  # at assumed_tflops or, without it, at the machine's
    measured_on: list[str] = field(default_factory=list)  # prompts of a measured acceptance
    tree_nodes: int = 0  # of its deepest trees; 0: a chain
    trained: bool = False  # these weights were evaluated, in any shape of drafts
    best: bool = True  # the best of the chains and trees of these weights

    @property
    def needed(self) -> float | None:
        """The acceptance rate for the first of the speedups."""
        return self.needs[0].alpha

    @property
    def weights(self) -> tuple[Any, ...]:
        """What is trained: chains and trees of the same weights have it in common."""
        return self.kind, self.layers, self.hidden_size, self.draft_vocab_size


@dataclass(frozen=True)
class Outlook:
    """All rows of a plan, and what they share."""

    rows: list[PlanRow]
    curves: list[Curve]  # of this target, that the predictions use
    error: float | None  # standard error of predicted log-odds; None: no curves
    forms: int  # of drafters that predicted each other; 0: too few are known
    known_tokens: tuple[int, int]  # see AcceptanceModel.tokens_range; (0, 0): no curves
    # Medians over the rows with reliable costs, or over all rows if none is reliable.
    baseline_tokens_per_second: float  # without a drafter
    V: dict[int, float]
    tflops: float  # at which a training's hours are given
    prompts: str = ""  # for which acceptance is predicted; empty: no curves

    @property
    def reliable(self) -> list[PlanRow]:
        """The rows whose costs are reliable."""
        return [row for row in self.rows if not row.unreliable]

    @property
    def knows_acceptance(self) -> bool:
        """Whether any acceptance of this target was measured."""
        return self.error is not None


def build_outlook(
    config: PlanConfig,
    found: Sequence[tuple[Candidate, MeasuredCosts]],
    curves: Sequence[Curve],
    tflops: float,
) -> Outlook:
    """Return the plan. curves: of this target. tflops: TFLOP/s of a training."""
    chosen = choose_curves(curves)
    model = AcceptanceModel.fit(chosen) if chosen else None
    prompts = config.prompts or usual_prompts(chosen)
    usual = model.usual.training_tokens if model else USUAL_TOKENS
    tokens = config.training_tokens or round(usual)
    costs = [one.costs for _, one in found]
    reliable = [one for one in costs if not one.unreliable] or costs
    baseline = 1000 * config.batch_size / median(one.plain_ms for one in reliable)
    rows = [_row(config, *one, model, chosen, prompts, tokens, baseline, tflops) for one in found]
    best = {row.weights: row for row in reversed(ranked(rows))}
    rows = [replace(row, best=row is best[row.weights]) for row in rows]
    forwards: dict[int, list[float]] = defaultdict(list)
    for row in [row for row in rows if not row.unreliable] or rows:
        for n, ratio in row.V.items():
            forwards[n].append(ratio)
    V = {n: median(ratios) for n, ratios in sorted(forwards.items())}
    if model is None:
        return Outlook(rows, chosen, None, 0, (0, 0), baseline, V, tflops)
    forms = len(model.left_out)
    known = model.tokens_range
    return Outlook(rows, chosen, model.error, forms, known, baseline, V, tflops, prompts)


def _row(
    config: PlanConfig,
    one: Candidate,
    measured: MeasuredCosts,
    model: AcceptanceModel | None,
    curves: Sequence[Curve],
    prompts: str,
    tokens: int,
    baseline: float,
    tflops: float,
) -> PlanRow:
    costs, ratios, width = measured.costs, measured.ratios, dtype_of(config.target.dtype).itemsize
    nodes = measured.tree_nodes
    prospect = one.prospect(tokens, config.temperature, prompts, nodes)
    same = curves_like(config, prospect, curves)
    source, rates = acceptance_of(prospect, model, same, max(measured.nodes))
    flop = one.flops_a_token * tokens
    cache = config.batch_size * (config.context + max(config.max_draft_tokens, nodes))
    return PlanRow(
        drafter=one.name,
        **{
            name: getattr(one, name)
            for name in ("kind", "draft_shape", "layers", "hidden_size", "parameters")
        },
        draft_vocab_size=one.draft_vocab_size,
        memory_bytes=one.parameters * width + cache * one.cache_bytes_a_token,
        t_draft_ms=costs.t_draft_ms,
        t_target_ms=dict(enumerate(costs.t_target_ms, start=1)),
        V=dict(ratios.V),
        cost_ratio=ratios.cost_ratio,
        one_pass=measured.one_pass,
        overhead_ms=costs.overhead_ms,
        plain_ms=costs.plain_ms,
        nodes=measured.nodes,
        unreliable=costs.unreliable,
        needs=[need(speedup, ratios) for speedup in config.speedups],
        acceptance=source,
        **_gain(rates, ratios, baseline),
        training_tokens=tokens,
        training_flop=flop,
        training_hours=flop / tflops / 1e12 / 3600,
        measured_on=sorted({curve.benchmark for curve in same}),
        tree_nodes=nodes,
        trained=any(_of_weights(config, prospect, curve) for curve in curves),
    )


def _gain(rates: Rates, costs: Costs, baseline: float) -> dict[str, Any]:
    """Return a row's fields on acceptance and on what it gains, at the best draft length."""
    middle, low, high = rates
    speedups = predicted_speedups(middle, costs) if middle else {}
    length = max(speedups, key=lambda gamma: (speedups[gamma], -gamma)) if speedups else None

    def at_length(alpha_D: list[float]) -> float | None:
        return None if length is None else predicted_speedup(alpha_D, length, costs)

    def equal_alpha(speedup: float | None) -> float | None:
        return None if speedup is None else need(speedup, costs).alpha

    speedup, slowest, fastest = at_length(middle), at_length(low), at_length(high)
    return {
        "alpha_by_depth": middle,
        "alpha_low": low,
        "alpha_high": high,
        "num_draft_tokens": length,
        "speedup_by_length": speedups,
        "predicted_speedup": speedup,
        "speedup_low": slowest,
        "speedup_high": fastest,
        "equal_alpha": equal_alpha(speedup),
        "equal_alpha_low": equal_alpha(slowest),
        "equal_alpha_high": equal_alpha(fastest),
        "tokens_per_second": None if speedup is None else baseline * speedup,
    }


def need(speedup: float, costs: Costs) -> Need:
    """Return what reaches a speedup under these costs."""
    found = needed_alpha(speedup, costs)
    return Need(speedup, None, None) if found is None else Need(speedup, *found)


def predicted_speedups(alpha_D: Sequence[float], costs: Costs) -> dict[int, float]:
    """Return draft length -> predicted speedup."""
    return {gamma: predicted_speedup(alpha_D, gamma, costs) for gamma in costs.gammas}


def _of_weights(config: PlanConfig, one: Prospect, curve: Curve) -> bool:
    """Return whether a curve is of the weights of a drafter, in any shape of drafts.

    They have its kind, size and draft vocabulary, and were trained on as many tokens if
    `training_tokens` is set.
    """
    same = ("kind", "layers", "hidden_size", "draft_vocab_size")
    alike = all(getattr(curve, name) == getattr(one, name) for name in same)
    return alike and config.training_tokens in (0, curve.training_tokens)


def curves_like(config: PlanConfig, one: Prospect, curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves of a drafter's weights with its shape and size of drafts and temperature.

    They are those on its prompts or, without any, on others.
    """
    drafts = (one.draft_shape, one.tree_nodes, one.temperature)
    same = [
        curve
        for curve in curves
        if (curve.draft_shape, curve.tree_nodes, curve.temperature) == drafts
        and _of_weights(config, one, curve)
    ]
    return [curve for curve in same if curve.benchmark == one.benchmark] or same


def acceptance_of(
    prospect: Prospect, model: AcceptanceModel | None, same: Sequence[Curve], depths: int
) -> tuple[str, Rates]:
    """Return where a candidate's acceptance rates come from, and the rates with lower and upper.

    same: measured drafters like it; without any it is predicted. depths: number of rates.
    """
    if model is None:
        return NONE, ([], [], [])
    if same:
        middle, low, high = (pooled_rates(same, n)[:depths] for n in (0.0, -ERRORS, ERRORS))
        return MEASURED, (middle, low, high)
    middle, low, high = (model.predict(prospect, depths, n) for n in (0.0, -ERRORS, ERRORS))
    return PREDICTED, (middle, low, high)


def binomial_bound(accepted: float, tests: float, errors: float) -> float:
    """Return a rate's bound some standard errors above it, or below it if they are negative.

    It is the score bound, which few tests do not move beyond 0 or 1 (Wilson 1927).
    """
    rate, share = accepted / tests, errors**2 / tests
    spread = errors * math.sqrt((rate * (1 - rate) + share / 4) / tests)
    return min(1.0, max(0.0, (rate + share / 2 + spread) / (1 + share)))


def pooled_rates(curves: Sequence[Curve], errors: float = 0.0) -> list[float]:
    """Return the acceptance rates of all curves together, before the first depth with few tests.

    Curves without numbers of tests count only where no other is given, and for depth 1 alone, as
    HALF tests each. errors: standard errors above the rates, by the numbers of tests.
    """
    counted = [one for one in curves if one.tested_by_depth]
    if not counted:
        rate, tests = fmean(one.alpha_by_depth[0] or 0.0 for one in curves), HALF * len(curves)
        return [binomial_bound(rate * tests, tests, errors) if errors else rate]
    tested_D = metrics.add_by_depth([one.tested_by_depth for one in counted])
    accepted_D = [0.0] * len(tested_D)
    for one in counted:
        rates = zip(one.alpha_by_depth, one.tested_by_depth, strict=True)
        for k, (alpha, tests) in enumerate(rates):
            accepted_D[k] += (alpha or 0.0) * tests
    found: list[float] = []
    for tested, accepted in zip(tested_D, accepted_D, strict=True):
        if tested < (metrics.MIN_TESTS if found else 1):
            break
        found.append(binomial_bound(accepted, tested, errors) if errors else accepted / tested)
    return found


def ranked(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the rows, the fastest predicted first, and those without speedup by their need.

    Rows with unreliable costs are last.
    """
    return sorted(
        rows,
        key=lambda row: (
            bool(row.unreliable),
            -(row.predicted_speedup or 0.0),
            2.0 if row.needed is None else row.needed,
        ),
    )


def best_trained(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return the fastest drafter whose acceptance was measured; None if there is none.

    Those with unreliable costs are left out.
    """
    trained = [row for row in rows if row.acceptance == MEASURED and not row.unreliable]
    return max(trained, key=lambda row: row.predicted_speedup or 0.0, default=None)


def worth_training(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the candidates to train, the one with the largest predicted speedup first.

    It must be faster than no drafter and than every trained one. The others reach its speedup at
    their upper bound, and each of them trains in fewer FLOPs than those before it; a tree whose
    weights were evaluated as a chain needs none. Where no acceptance is known, the result is the
    candidate that needs the least. Candidates with unreliable costs are left out.
    """
    reliable = [row for row in rows if not row.unreliable]
    if all(row.acceptance == NONE for row in rows):
        able = [row for row in reliable if row.needed is not None]
        return sorted(able, key=lambda row: row.needed or 0.0)[:1]
    trained = best_trained(rows)
    to_beat = max(1.0, (trained.predicted_speedup or 0.0) if trained else 0.0)
    new = [row for row in reliable if row.acceptance == PREDICTED]
    faster = [row for row in new if (row.predicted_speedup or 0.0) > to_beat]
    chosen: list[PlanRow] = []

    def cost(row: PlanRow) -> float:
        return 0.0 if row.trained else row.training_flop

    for row in sorted(faster, key=lambda row: -(row.predicted_speedup or 0.0)):
        close = not chosen or (row.speedup_high or 0.0) >= (chosen[0].predicted_speedup or 0.0)
        if close and all(cost(row) < cost(other) for other in chosen):
            chosen.append(row)
    return chosen


def row_of(values: dict[str, Any]) -> PlanRow:
    """Return the row in a line of plan.jsonl."""
    for name in ("t_target_ms", "V", "nodes", "speedup_by_length"):  # JSON has no integer keys
        values[name] = {int(n): value for n, value in values[name].items()}
    values["needs"] = [Need(**one) for one in values["needs"]]
    return PlanRow(**values)
