"""Pictures of a plan: needed acceptance by cost, predicted speedups, and the target's forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from decoding.costs.prediction import Costs
from eval.plan.curves import CHAIN
from eval.plan.rows import NONE, Outlook, PlanRow, need
from eval.report.plots import (
    MUTED,
    SETTINGS,
    Plot,
    Styles,
    drafter_styles,
    make_axes,
    make_plot,
    shorten,
)

STEPS = 61  # points of a line


def plan_plots(outlook: Outlook, speedups: Sequence[float]) -> list[Plot]:
    """Return the pictures of a plan. speedups: those for which the acceptance is shown."""
    styles = drafter_styles({row.drafter: "" for row in outlook.rows})
    found = [acceptance_by_cost(outlook, speedups, styles)]
    if outlook.knows_acceptance:
        found += [speedup_by_length(outlook.rows, styles)]
        found += [speedup_by_training(outlook.rows, styles)]
    return [*found, target_forwards(outlook.V)]


@rc_context(SETTINGS)
def acceptance_by_cost(outlook: Outlook, speedups: Sequence[float], styles: Styles) -> Plot:
    """Plot the needed acceptance over the cost ratio, and the candidates' acceptances."""
    axes = make_axes("Acceptance that pays, by cost", "cost ratio c", "acceptance rate at depth 1")
    rows = outlook.rows
    steps = [row for row in rows if row.draft_shape == CHAIN and not row.one_pass]
    chain = (steps or list(rows))[0]
    ratios = np.linspace(0, max(0.05, 1.25 * max(row.cost_ratio for row in rows)), STEPS)
    for number, speedup in enumerate(speedups):
        needs = [need(speedup, _chain_costs(chain, ratio)).alpha for ratio in ratios]
        known = [np.nan if alpha is None else alpha for alpha in needs]
        dashes = (3, 1 + 2 * number)
        axes.plot(ratios, known, color=MUTED, linewidth=1, dashes=dashes, label=f"{speedup:g}x")
    for row in rows:
        if row.acceptance != NONE:
            y = row.alpha_by_depth[0]
            _draw(axes, row, styles, row.cost_ratio, y, row.alpha_low[0], row.alpha_high[0])
        elif row.needed is not None:
            _draw(axes, row, styles, row.cost_ratio, row.needed, row.needed, row.needed)
    axes.set_ylim(0, 1.02)
    what = "the acceptance that each drafter needs"
    if outlook.knows_acceptance:
        what = "acceptance, measured or predicted with two standard errors"
    return make_plot(
        axes,
        f"Dashed: acceptance that reaches these speedups, for a chain of single steps with the "
        f"rest of a round of {chain.drafter}. Points: {what}.",
    )


def _chain_costs(row: PlanRow, cost_ratio: float) -> Costs:
    """Return the costs of a row's chain at another cost ratio."""
    t_1 = row.t_target_ms[1]
    return Costs(
        float(cost_ratio),
        row.V,
        overhead=row.overhead_ms / t_1,
        baseline_overhead=row.plain_ms / t_1 - 1,
        deepest=max(row.nodes),
    )


def _draw(
    axes: Axes, row: PlanRow, styles: Styles, x: float, y: float, low: float, high: float
) -> None:
    """Draw the point of a drafter with a bar from `low` to `high`."""
    look = styles[row.drafter]
    bars: Any = [[max(0.0, y - low)], [max(0.0, high - y)]]
    axes.errorbar(
        [x],
        [y],
        bars,
        color=look.colour,
        marker=look.marker,
        linestyle="none",
        elinewidth=1,
        label=shorten(row.drafter),
    )


@rc_context(SETTINGS)
def speedup_by_length(rows: Sequence[PlanRow], styles: Styles) -> Plot:
    """Plot the predicted speedup over the draft length."""
    axes = make_axes("Predicted speedup by draft length", "draft length", speedup=True)
    for row in rows:
        lengths, look = sorted(row.speedup_by_length), styles[row.drafter]
        speeds = [row.speedup_by_length[gamma] for gamma in lengths]
        name = shorten(row.drafter)
        axes.plot(lengths, speeds, color=look.colour, marker=look.marker, label=name)
    axes.set_xticks(range(1, 1 + max(gamma for row in rows for gamma in row.speedup_by_length)))
    return make_plot(axes, "Of a tree: by its depth. The best length of each is in the table.")


@rc_context(SETTINGS)
def speedup_by_training(rows: Sequence[PlanRow], styles: Styles) -> Plot:
    """Plot the predicted speedup over the FLOPs of the training."""
    axes = make_axes("Predicted speedup by training", "PFLOP of training", speedup=True)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    for row in rows:
        if row.predicted_speedup is not None:
            assert row.speedup_low is not None and row.speedup_high is not None
            bounds = row.predicted_speedup, row.speedup_low, row.speedup_high
            _draw(axes, row, styles, row.training_flop / 1e15, *bounds)
    return make_plot(axes, "Bars: two standard errors of the predicted acceptance.")


@rc_context(SETTINGS)
def target_forwards(V: dict[int, float]) -> Plot:
    """Plot the time of a target forward over its new tokens."""
    axes = make_axes("Target forward by new tokens", "new tokens of a row", "V")
    axes.plot(list(V), list(V.values()), marker="o", color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.1 * max(V.values()))
    return make_plot(axes, "V(n): time of a forward over n tokens, over that of one token.")
