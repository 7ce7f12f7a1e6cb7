"""Pictures of a plan: acceptance, what rounds yield and cost, speedups, and target forwards."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from decoding.costs.prediction import expected_tokens
from eval.plan.rows import MEASURED, NONE, Outlook, PlanRow, ranked
from eval.report.plots import (
    INK,
    MUTED,
    SERIES,
    SETTINGS,
    Plot,
    Styles,
    drafter_styles,
    make_axes,
    make_plot,
    shorten,
)
from jobs.amounts import FLOP, operations

RATE = "acceptance rate, equal at all depths"
COST = "cost of a round, in steps without a drafter"
NAME_WIDTH = 20  # characters of a line of a drafter's name
LANE = 0.17  # distance of a drafter's two markers from its line


def plan_plots(outlook: Outlook, speedups: Sequence[float]) -> list[Plot]:
    """Return the pictures of a plan; none if no costs are reliable.

    The first one names the drafters with unreliable costs, and the others leave them out.
    speedups: those for which the acceptance is shown.
    """
    if not outlook.reliable:
        return []
    styles = drafter_styles({row.drafter: "" for row in outlook.rows})
    found = [needed_and_accepted(outlook, speedups)]
    outlook = replace(outlook, rows=outlook.reliable)
    if outlook.knows_acceptance:
        found += [tokens_by_cost(outlook.rows, speedups, styles)]
        found += [speedup_by_length(outlook.rows, styles)]
        found += [speedup_by_training(outlook.rows, styles)]
    return [*found, target_forwards(outlook)]


@rc_context(SETTINGS)
def needed_and_accepted(outlook: Outlook, speedups: Sequence[float]) -> Plot:
    """Plot what each candidate needs and, below it, the acceptance that it has or is expected to.

    Both are rates that are equal at all depths, so that a drafter reaches the first of the speedups
    where its second marker is not left of the first one.
    """
    rows, first, last = ranked(outlook.rows), speedups[0], speedups[-1]
    title = "Acceptance that is needed and expected"
    axes = make_axes(title, RATE, height=1.1 + 0.36 * len(rows))
    for place, row in enumerate(rows):
        if row.unreliable:
            axes.text(0.01, place, "unreliable costs", va="center", fontsize=9, color=MUTED)
            continue
        if row.needed is None:
            words = f"never {first:g}x"
            axes.text(1, place - LANE, words, va="center", ha="right", fontsize=9, color=SERIES[1])
        else:
            further = row.needs[-1].alpha
            label, end = f"needs for {first:g}x", 1.0 if further is None else further
            bounds = row.needed, min(row.needed, end), max(row.needed, end)
            look: dict[str, Any] = {"marker": "D", "color": SERIES[1], "label": label}
            _mark(axes, place - LANE, *bounds, **look)
        if row.acceptance != NONE:
            measured = row.acceptance == MEASURED
            look = {"label": "measured" if measured else "predicted", "color": SERIES[0]}
            look |= {"marker": "o", "markerfacecolor": SERIES[0] if measured else "white"}
            _mark(axes, place + LANE, *_equal_rates(row), **look)
    names = [textwrap.fill(row.drafter, NAME_WIDTH) for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9, linespacing=1.0)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.grid(axis="y", visible=False)
    bars = f"The bar of the first marker reaches to what {last:g}x needs. " * (last != first)
    known = "No acceptance of this target was measured yet."
    if outlook.knows_acceptance:
        known = (
            f"A drafter reaches {first:g}x where its round marker is not left of the other one. "
            f"Its bars: two standard errors."
        )
    return make_plot(axes, f"{bars}{known}")


def _equal_rates(row: PlanRow) -> tuple[float, float, float]:
    """Return the rate, equal at all depths, of a row's speedup, and its bounds."""
    assert row.equal_alpha is not None
    high = row.equal_alpha_high or row.equal_alpha
    return row.equal_alpha, row.equal_alpha_low or 0.0, high


def _mark(axes: Axes, y: float, x: float, low: float, high: float, **look: Any) -> None:
    """Draw a marker at `x` with a bar from `low` to `high`."""
    bars: Any = [[max(0.0, x - low)], [max(0.0, high - x)]]
    axes.errorbar([x], [y], xerr=bars, linestyle="none", elinewidth=1, **look)


@rc_context(SETTINGS)
def tokens_by_cost(rows: Sequence[PlanRow], speedups: Sequence[float], styles: Styles) -> Plot:
    """Plot what a round of each drafter yields over what it costs, at its best draft length.

    The cost is in steps of plain decoding, so the predicted speedup is the ratio of the two, for
    chains, trees and drafts in one forward alike. The rows must have one.
    """
    axes = make_axes("What a round yields and costs", COST, "block efficiency")
    costs = []
    for row in rows:
        gamma, speedup = row.num_draft_tokens, row.predicted_speedup
        assert gamma is not None and speedup is not None
        rates = row.alpha_by_depth, row.alpha_low, row.alpha_high
        tokens, low, high = (expected_tokens(alpha_D, gamma) for alpha_D in rates)
        costs.append(tokens / speedup)
        _draw(axes, row, styles, costs[-1], tokens, low, high)
    span = np.array([min(1.0, *costs), 1.05 * max(costs)])
    highest = axes.get_ylim()[1]
    for number, speedup in enumerate(speedups):
        look: dict[str, Any] = {"dashes": (3, 1 + 2 * number), "label": f"{speedup:g}x"}
        axes.plot(span, speedup * span, color=MUTED, linewidth=1, **look)
    axes.set_ylim(0.95, highest)  # a round emits one token at least
    return make_plot(
        axes,
        "Block efficiency: tokens of a round, by acceptance measured or predicted with two "
        "standard errors. Dashed: speedups. A drafter reaches one where its point is not below its "
        "line.",
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
    unit = operations(max(row.training_flop for row in rows)).split()[-1]
    axes = make_axes("Predicted speedup by training", f"{unit} of training", speedup=True)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    for row in rows:
        if row.predicted_speedup is not None:
            assert row.speedup_low is not None and row.speedup_high is not None
            bounds = row.predicted_speedup, row.speedup_low, row.speedup_high
            _draw(axes, row, styles, row.training_flop / FLOP[unit], *bounds)
    return make_plot(axes, "Bars: two standard errors of the acceptance.")


@rc_context(SETTINGS)
def target_forwards(outlook: Outlook) -> Plot:
    """Plot the time of a target forward over its new tokens."""
    V, t_1 = outlook.V, median(row.t_target_ms[1] for row in outlook.rows)
    axes = make_axes("Target forward by new tokens", "new tokens of a row", "V")
    axes.plot(list(V), list(V.values()), marker="o", color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.1 * max(V.values()))
    return make_plot(
        axes, f"V(n): time of a forward over n tokens, over that of one token, {t_1:.3g} ms here."
    )
