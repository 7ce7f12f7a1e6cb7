"""How far eval.plan's predictions are from measurements that they do not know.

A drafter is predicted from the planned costs and the acceptance of the other forms of drafters. As
a control, it is also predicted from the mean acceptance of those at depth 1.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decoding.costs.prediction import predicted_speedup
from eval.plan.candidates import Candidate
from eval.plan.config import PlanConfig
from eval.plan.costs import MeasuredCosts
from eval.plan.curves import Curve
from eval.plan.rows import build_outlook
from eval.statistics.schema import Row
from scripts.bench import common

MEDIAN_GOAL, WORST_GOAL = 0.10, 0.20


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a drafter from the others alone."""

    alpha: float  # acceptance rate at depth 1
    cost_ratio: float  # c
    baseline_tokens_per_second: float
    tokens_per_second: dict[int, float]  # draft length -> tokens/s
    by_mean: dict[int, float]  # the same, from the others' mean acceptance for all depths


def predict_without(
    config: PlanConfig,
    found: Sequence[tuple[Candidate, MeasuredCosts]],
    curves: Sequence[Curve],
    name: str,
    lengths: Sequence[int],
) -> Prediction:
    """Return what eval.plan predicts of a drafter from the others alone.

    found: all planned drafters. lengths: those to predict; a head that drafts fewer tokens than one
    of them counts with its longest draft.
    """
    one, measured = next(pair for pair in found if pair[0].name == name)
    form = (one.kind, one.draft_shape, one.layers, one.hidden_size)
    others = [curve for curve in curves if curve.form != form]
    outlook = build_outlook(config, found, others, tflops=1.0)
    row = next(row for row in outlook.rows if row.drafter == name)
    alpha = statistics.mean(curve.alpha_by_depth[0] or 0.0 for curve in others)
    drafted = {length: min(length, max(measured.nodes)) for length in lengths}
    baseline = outlook.baseline_tokens_per_second
    return Prediction(
        row.alpha_by_depth[0],
        row.cost_ratio,
        baseline,
        {length: baseline * row.speedup_by_length[gamma] for length, gamma in drafted.items()},
        {
            length: baseline * predicted_speedup([alpha], gamma, measured.ratios)
            for length, gamma in drafted.items()
        },
    )


def fastest(speeds: Mapping[int, float]) -> int:
    """Return the draft length with the most tokens/s; ties go to the shorter one."""
    return max(speeds, key=lambda length: (speeds[length], -length))


def regret(planned: Mapping[int, float], measured: Mapping[int, float]) -> float:
    """Return the share of the measured speed that the planned draft length loses."""
    return 1 - measured[fastest(planned)] / max(measured.values())


def compare(planned: Prediction, row: Row, sweep: Sequence[Row]) -> dict[str, Any]:
    """Return a drafter's measured figures and the predicted ones, with their relative errors.

    row: of the main part, at the draft length that the evaluation chose. sweep: the rows of all
    drafters in the sweep.
    """
    length, speed = row.num_draft_tokens, row.tokens_per_second
    speedup = planned.tokens_per_second[length] / planned.baseline_tokens_per_second
    measured = {
        one.num_draft_tokens: one.tokens_per_second for one in sweep if one.drafter == row.drafter
    }
    return {
        "drafter": row.drafter,
        "alpha": row.alpha_by_depth[0],
        "planned_alpha": planned.alpha,
        "c": row.cost_ratio,
        "planned_c": planned.cost_ratio,
        "baseline": row.baseline_tokens_per_second,
        "planned_baseline": planned.baseline_tokens_per_second,
        "speedup": row.speedup,
        "low": row.speedup_low,
        "high": row.speedup_high,
        "gamma": length,
        "tokens/s": speed,
        "planned": planned.tokens_per_second[length],
        "error": planned.tokens_per_second[length] / speed - 1,
        "error_by_mean": planned.by_mean[length] / speed - 1,
        "speedup_error": speedup / row.speedup - 1,
        "best_gamma": fastest(measured),
        "planned_gamma": fastest(planned.tokens_per_second),
        "regret": regret(planned.tokens_per_second, measured),
        "regret_by_mean": regret(planned.by_mean, measured),
    }


def summary(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median and worst error and regret of all drafters, and whether goals are met."""
    found: dict[str, Any] = {}
    for name in ("error", "error_by_mean", "speedup_error", "regret", "regret_by_mean"):
        sizes = [abs(one[name]) for one in figures]
        found |= {f"median_{name}": statistics.median(sizes), f"worst_{name}": max(sizes)}
    for name, most in (("median_error", MEDIAN_GOAL), ("worst_error", WORST_GOAL)):
        found[name] = common.goal(found[name], found[name] <= most)
    return found


def summary_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the summary in sentences."""
    return [
        f"error of tokens/s, predicted from the other drafters: median "
        f"{found['median_error']['found']:.1%} (goal {MEDIAN_GOAL:.0%}), worst "
        f"{found['worst_error']['found']:.1%} (goal {WORST_GOAL:.0%})",
        f"error of tokens/s, predicted from their mean acceptance: median "
        f"{found['median_error_by_mean']:.1%}, worst {found['worst_error_by_mean']:.1%}",
        f"error of speedups, which a change of the machine's speed after the plan does not move: "
        f"median {found['median_speedup_error']:.1%}, worst "
        f"{found['worst_speedup_error']:.1%}",
        f"speed lost by the planned draft length: median {found['median_regret']:.1%}, worst "
        f"{found['worst_regret']:.1%}; by that of the mean acceptance: median "
        f"{found['median_regret_by_mean']:.1%}, worst {found['worst_regret_by_mean']:.1%}",
    ]
