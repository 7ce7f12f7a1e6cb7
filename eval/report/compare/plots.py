"""The comparison's plots: depth against speedup, acceptance against cost with iso-speedup curves,
the Pareto front.

They are PNGs, for a folder, a page and Weights & Biases alike, so each carries its title and its
key. Colours are the report's own, light or dark; figures are drawn for a column 380 px wide, as
those of eval/report/plots.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from eval.report.compare.comparison import COSTS, Panel, chains, usual_costs
from eval.report.compare.entries import Entry
from eval.report.compare.palette import (
    Look,
    Paint,
    axes_of,
    in_order,
    key,
    png,
    speedup_axis,
    styled,
)
from eval.report.compare.words import IDLE
from eval.report.plots import INK, MUTED, short
from eval.statistics.prediction import iso_cost_ratio
from jobs.drafters import CONTROL

# speedups that get a curve, those that matter most first
LEVELS = (
    1.0,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    1.5,
    2.5,
    5.0,
    1.25,
    1.75,
    3.5,
)
# of alpha, between the labels of two curves; those that come closer are left out
LABEL_APART = 0.07
THE_CONTROL = "prompt lookup, the control"
LABELS_AT = 0.045  # of the width: where the curves are labelled
NAMES = {"parameters": "drafter parameters", "training_tokens": "training tokens"}  # of the costs


def depth(panel: Panel, look: dict[str, Look], paint: Paint) -> bytes:
    """Speedup over the number of layers, with 95 % intervals; the points of a series are joined,
    the control is a line across.

    A drafter that drafts nothing is hollow and joined to none: its speed is plain decoding's.
    """
    with styled(paint):
        figure, axes = axes_of(f"Depth against speedup: {panel.label}", paint)
        axes.axhline(1, color=paint[MUTED], linewidth=1)
        drawn = [entry for entry in in_order(panel.fastest) if entry.row.drafter != CONTROL]
        _controls(axes, panel, paint)
        for name in dict.fromkeys(entry.series for entry in drawn if entry.series):
            line = [entry for entry in drawn if entry.series == name and not entry.idle]
            if not line:
                continue
            at, speeds = [_x(entry, drawn) for entry in line], [_speed(entry) for entry in line]
            axes.plot(at, speeds, color=paint[look[line[0].name].colour], label=short(name, 60))
        for entry in drawn:
            label = "" if entry.series and not entry.idle else _said(entry)
            _point(
                axes,
                _x(entry, drawn),
                entry,
                look[entry.name],
                paint,
                label=label,
                hollow=entry.idle,
            )
        layers = sorted({entry.row.drafter_layers for entry in drawn})
        if layers:
            axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
            axes.set_xticks(layers)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("drafter layers")
        speedup_axis(axes)
        key(figure, axes)
        return png(figure, paint)


def acceptance(panel: Panel, look: dict[str, Look], paint: Paint) -> bytes:
    """alpha over the cost ratio, with the curves on which the closed form gives one speedup at the
    best gamma. See `chains` for whose points.
    """
    points = [
        (entry, alpha) for entry in in_order(chains(panel)) if (alpha := entry.alpha) is not None
    ]
    drawn = [entry for entry, _ in points]
    with styled(paint):
        figure, axes = axes_of(f"Acceptance against cost: {panel.label}", paint)
        widest = 1.3 * max(entry.row.cost_ratio for entry in drawn)
        for level, c_A, alpha_A in iso_speedup_curves(drawn, widest):
            axes.plot(
                c_A,
                alpha_A,
                color=paint[INK if level == 1 else MUTED],
                linewidth=1.2 if level == 1 else 0.8,
                zorder=1,
            )
            box = {"facecolor": paint.page, "edgecolor": "none", "pad": 0.8}
            here = float(np.interp(LABELS_AT * widest, c_A, alpha_A))
            axes.text(
                LABELS_AT * widest,
                here,
                f"{level:g}x",
                fontsize=8.5,
                color=paint[MUTED],
                zorder=1.5,
                va="center",
                ha="center",
                bbox=box,
            )
        for entry, alpha in points:
            mine = look[entry.name]
            axes.plot(
                entry.row.cost_ratio,
                alpha,
                mine.marker,
                color=paint[mine.colour],
                markersize=7,
                label=short(entry.name, 29),
            )
        axes.set_xlim(0, widest)
        axes.set_ylim(0, 1.02)
        # its 0 would meet that of alpha
        axes.xaxis.set_major_locator(MaxNLocator(6, prune="lower"))
        axes.set_xlabel("cost ratio c: a draft step over a target step")
        axes.set_ylabel("acceptance rate alpha")
        key(figure, axes)
        return png(figure, paint)


def iso_speedup_curves(
    entries: Sequence[Entry], widest: float
) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """(speedup, c_A, alpha_A) of the curves that cross the plot from c = 0 to `widest`, by speedup;
    as many of LEVELS as keep their labels apart.

    V, o and o_1 are the medians of `entries` (eval.report.compare.comparison.usual_costs). On a
    curve the best gamma gives just that speedup; above and to the left of it, more.
    """
    costs = usual_costs(entries)
    alpha_A = np.linspace(0.0, 1.0, 201)
    curves: list[tuple[float, np.ndarray, np.ndarray]] = []
    labels: list[float] = []
    for level in LEVELS:
        c_A = np.array([iso_cost_ratio(level, alpha, costs) for alpha in alpha_A])
        if c_A[-1] < LABELS_AT * widest:  # out of reach
            continue
        start = float(np.interp(LABELS_AT * widest, c_A, alpha_A))
        if all(abs(start - label) >= LABEL_APART for label in labels):
            curves.append((level, c_A, alpha_A))
            labels.append(start)
    return sorted(curves, key=lambda curve: curve[0])


def pareto(panel: Panel, cost: str, look: dict[str, Look], paint: Paint) -> bytes:
    """Speedup over a cost of eval.report.compare.comparison.COSTS; the stairs join the drafters
    that no other beats in both, the others are hollow.
    """
    with styled(paint):
        figure, axes = axes_of(f"Pareto, {NAMES[cost]}: {panel.label}", paint)
        axes.axhline(1, color=paint[MUTED], linewidth=1)
        places = {
            id(entry): value / 1e6
            for entry in panel.fastest
            if (value := COSTS[cost](entry)) is not None
        }
        marks = {
            id(standing.entry): standing.on_front.get(cost, False) for standing in panel.standings
        }
        drawn = [entry for entry in in_order(panel.fastest) if id(entry) in places]
        front = sorted(
            (entry for entry in drawn if marks[id(entry)]), key=lambda entry: places[id(entry)]
        )
        axes.plot(
            [places[id(entry)] for entry in front],
            [_speed(entry) for entry in front],
            color=paint[INK],
            linewidth=0.8,
            drawstyle="steps-post",
        )
        for entry in drawn:
            _point(
                axes,
                places[id(entry)],
                entry,
                look[entry.name],
                paint,
                label=_said(entry),
                hollow=not marks[id(entry)],
            )
        most = max([*places.values(), 1e-6])
        axes.set_xlim(-0.06 * most, 1.08 * most)
        axes.set_xlabel(f"{NAMES[cost]} in millions")
        speedup_axis(axes)
        key(figure, axes)
        return png(figure, paint)


def _speed(entry: Entry) -> float:
    assert entry.speedup is not None, "of ranked entries alone"
    return entry.speedup.value


def _said(entry: Entry) -> str:
    """The drafter in a key."""
    if entry.row.drafter == CONTROL:
        return THE_CONTROL
    return f"{short(entry.name, 29 - len(IDLE) - 2)}, {IDLE}" if entry.idle else entry.name


def _x(entry: Entry, drawn: Sequence[Entry]) -> float:
    """The entry's layers, moved a little where several have as many, so that their intervals can be
    told apart.
    """
    same = [other.name for other in drawn if other.row.drafter_layers == entry.row.drafter_layers]
    return entry.row.drafter_layers + 0.07 * (same.index(entry.name) - (len(same) - 1) / 2)


def _point(
    axes: Axes,
    x: float,
    entry: Entry,
    look: Look,
    paint: Paint,
    *,
    label: str,
    hollow: bool = False,
) -> None:
    speed = entry.speedup
    assert speed is not None, "of ranked entries alone"
    spread = None
    if speed.low is not None and speed.high is not None:
        spread = np.array([[speed.value - speed.low], [speed.high - speed.value]]).clip(min=0)
    axes.errorbar(
        x,
        speed.value,
        spread,
        color=paint[look.colour],
        marker=look.marker,
        markersize=6,
        markerfacecolor=paint.page if hollow else None,
        elinewidth=1,
        linestyle="none",
        label=short(label, 29),
    )


def _controls(axes: Axes, panel: Panel, paint: Paint) -> None:
    """A dashed line across for the control, the median of all runs, in a band from its least to its
    greatest: how much of a difference is chance.
    """
    speeds = [_speed(entry) for entry in panel.fastest if entry.row.drafter == CONTROL]
    if speeds:
        axes.axhspan(min(speeds), max(speeds), color=paint[MUTED], alpha=0.15, linewidth=0)
        axes.axhline(
            median(speeds), color=paint[MUTED], linewidth=0.9, dashes=(3, 2), label=THE_CONTROL
        )
