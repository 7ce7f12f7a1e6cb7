"""Plots of a comparison's panels: speedup against depth and cost, acceptance against cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from decoding.costs.prediction import iso_cost_ratio
from eval.report.plots import (
    INK,
    MUTED,
    PAGE,
    SETTINGS,
    Plot,
    Style,
    Styles,
    describe_intervals,
    drafter_styles,
    draw_errorbar,
    make_axes,
    make_plot,
    shift,
    shorten,
)
from eval.statistics.comparison.entries import Entry
from eval.statistics.comparison.panels import COSTS, Panel, chains, usual_costs
from eval.statistics.metrics import MIN_TESTS
from jobs.drafters import CONTROL

# Speedups that get an iso-speedup curve, in order of importance, and the place of their labels.
LEVELS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 1.5, 2.5, 5.0, 1.25, 1.75, 3.5)
LABELS_AT = 0.045  # share of the plot's width
LABELS_APART = 0.07  # in alpha; curves whose labels would be closer are left out
COST_NAMES = {"parameters": "drafter parameters", "training_tokens": "training tokens"}
FILE_NAMES = {"parameters": "pareto", "training_tokens": "training"}


def styles_of_entries(entries: Sequence[Entry]) -> Styles:
    """Return the style of each drafter by name; the control is grey in all plots."""
    drafters = [entry for entry in _in_order(entries) if entry.row.drafter != CONTROL]
    styles = drafter_styles({entry.plotted: entry.series for entry in drafters})
    return {entry.name: styles.get(entry.plotted, Style()) for entry in entries}


def panel_plots(panel: Panel, styles: Styles) -> list[Plot]:
    """Return the plots that a panel has the data for."""
    if not panel.fastest:
        return []
    plots = [depth(panel, styles)]
    if any(entry.alpha is not None for entry in chains(panel)):
        plots.append(acceptance(panel, styles))
    if any(entry.row.alpha_by_depth for entry in panel.fastest):
        plots.append(alpha_by_depth(panel, styles))
    plots.append(pareto(panel, "parameters", styles))
    if len({entry.training_tokens for entry in panel.fastest if entry.training_tokens}) > 1:
        plots.append(pareto(panel, "training_tokens", styles))
    return plots


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.series, entry.row.drafter_layers))


def _label(entry: Entry) -> str:
    if entry.row.drafter == CONTROL:
        return "prompt lookup, the control"
    name = entry.plotted
    return f"{shorten(name, 13)}, drafts nothing" if entry.idle else shorten(name)


def _point(axes: Axes, x: float, entry: Entry, style: Style, label: str, hollow: bool) -> None:
    look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markersize": 6}
    look["markerfacecolor"] = PAGE if hollow else style.colour
    draw_errorbar(axes, [x], [entry.ranked_speedup], linestyle="none", label=label, **look)


@rc_context(SETTINGS)
def depth(panel: Panel, styles: Styles) -> Plot:
    """Plot speedup over the number of drafter layers.

    A line joins the drafters of a series. A dashed line is the control's median speedup over the
    runs, in a band from its lowest to its highest. A drafter that drafts nothing has a hollow
    marker and is not joined, since its speed is that of plain decoding.
    """
    axes = make_axes(f"Depth against speedup: {panel.label}", "drafter layers", speedup=True)
    drawn = [entry for entry in _in_order(panel.fastest) if entry.row.drafter != CONTROL]
    controls = [e.ranked_speedup.value for e in panel.fastest if e.row.drafter == CONTROL]
    if controls:
        look: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "dashes": (3, 2)}
        axes.axhspan(min(controls), max(controls), color=MUTED, alpha=0.15, linewidth=0)
        axes.axhline(median(controls), label="prompt lookup, the control", **look)

    def x(entry: Entry) -> float:
        """Return the layers, shifted a little where several drafters have the same number."""
        same = [e.plotted for e in drawn if e.row.drafter_layers == entry.row.drafter_layers]
        places = list(dict.fromkeys(same))
        return entry.row.drafter_layers + shift(places.index(entry.plotted), len(places), 0.07)

    for name in dict.fromkeys(entry.series for entry in drawn if entry.series):
        line = [entry for entry in drawn if entry.series == name and not entry.idle]
        if line:
            speeds = [entry.ranked_speedup.value for entry in line]
            colour = styles[line[0].name].colour
            axes.plot([x(entry) for entry in line], speeds, color=colour, label=shorten(name, 60))
    for entry in drawn:
        label = "" if entry.series and not entry.idle else _label(entry)
        _point(axes, x(entry), entry, styles[entry.name], label, entry.idle)
    layers = sorted({entry.row.drafter_layers for entry in drawn})
    if layers:
        axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
        axes.set_xticks(layers)
    axes.grid(axis="x", visible=False)
    lengths = "fastest draft length" + describe_intervals([entry.ranked_speedup for entry in drawn])
    return make_plot(
        axes,
        f"Each drafter at its {lengths}. Hollow: drafts nothing. Dashed: the control, in a "
        f"band over the runs.",
        f"depth_{panel.slug}",
    )


@rc_context(SETTINGS)
def acceptance(panel: Panel, styles: Styles) -> Plot:
    """Plot alpha over the cost ratio for the panel's `chains`, with curves of equal speedup."""
    drawn = [entry for entry in _in_order(chains(panel)) if entry.alpha is not None]
    x = "cost ratio c: a draft step over a target step"
    axes = make_axes(f"Acceptance against cost: {panel.label}", x, "acceptance rate alpha")
    widest = 1.3 * max(entry.row.cost_ratio for entry in drawn)
    box = {"facecolor": PAGE, "edgecolor": "none", "pad": 0.8}
    text: dict[str, Any] = {"fontsize": 8.5, "color": MUTED, "va": "center", "ha": "center"}
    for level, c_A, alpha_A in iso_speedup_curves(drawn, widest):
        colour, width = (INK, 1.2) if level == 1 else (MUTED, 0.8)
        axes.plot(c_A, alpha_A, color=colour, linewidth=width, zorder=1)
        at, y = LABELS_AT * widest, float(np.interp(LABELS_AT * widest, c_A, alpha_A))
        axes.text(at, y, f"{level:g}x", zorder=1.5, bbox=box, **text)
    for entry in drawn:
        style, at_alpha = styles[entry.name], [entry.alpha or 0.0]
        look: dict[str, Any] = {"color": style.colour, "markersize": 7}
        name = shorten(entry.plotted)
        axes.plot([entry.row.cost_ratio], at_alpha, style.marker, label=name, **look)
    axes.set_xlim(0, widest)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, prune="lower"))  # its 0 would meet that of alpha
    return make_plot(
        axes,
        "Points: measured. Curves: equal speedup by the formula at the best gamma, with median V "
        "and overheads. Only serial drafters with a model that drafted something are shown.",
        f"acceptance_{panel.slug}",
    )


@rc_context(SETTINGS)
def alpha_by_depth(panel: Panel, styles: Styles) -> Plot:
    """Plot alpha over the depth, up to the last depth with enough tests."""
    title = f"Acceptance by depth: {panel.label}"
    axes = make_axes(title, "depth k in the draft", "alpha at depth k")
    deepest = 1
    for entry in _in_order(panel.fastest):
        row, style = entry.row, styles[entry.name]
        tested = zip(row.alpha_by_depth, row.tested_by_depth, strict=True)
        rates = [alpha for alpha, tests in tested if alpha is not None and tests >= MIN_TESTS]
        look: dict[str, Any] = {"color": style.colour, "marker": style.marker}
        axes.plot(range(1, len(rates) + 1), rates, label=_label(entry), **look)
        deepest = max(deepest, len(rates))
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, deepest + 1))
    axes.grid(axis="x", visible=False)
    caption = "Accepted over tested draft tokens at the fastest draft length, on all prompts."
    return make_plot(axes, caption, f"depths_{panel.slug}")


def iso_speedup_curves(
    entries: Sequence[Entry], widest: float
) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """Return (speedup, c_A, alpha_A) of the curves between c = 0 and `widest`, by speedup.

    A: points of a curve. V and the overheads are medians of the entries. On a curve the best gamma
    gives that speedup; above it and to its left the speedup is higher. Curves whose labels would
    overlap are left out.
    """
    costs = usual_costs(entries)
    alpha_A = np.linspace(0.0, 1.0, 201)
    curves: list[tuple[float, np.ndarray, np.ndarray]] = []
    labels: list[float] = []
    for level in LEVELS:
        c_A = np.array([iso_cost_ratio(level, alpha, costs) for alpha in alpha_A])
        label = float(np.interp(LABELS_AT * widest, c_A, alpha_A))
        out_of_reach = c_A[-1] < LABELS_AT * widest
        if not out_of_reach and all(abs(label - other) >= LABELS_APART for other in labels):
            curves.append((level, c_A, alpha_A))
            labels.append(label)
    return sorted(curves, key=lambda curve: curve[0])


@rc_context(SETTINGS)
def pareto(panel: Panel, cost: str, styles: Styles) -> Plot:
    """Plot speedup over a cost of COSTS; stairs join the Pareto front, other points are hollow."""
    title = f"Pareto, {COST_NAMES[cost]}: {panel.label}"
    axes = make_axes(title, f"{COST_NAMES[cost]} in millions", speedup=True)
    known = [(e, COSTS[cost](e)) for e in _in_order(panel.fastest)]
    points = [(entry, value / 1e6) for entry, value in known if value is not None]
    on_front = {id(one.entry) for one in panel.compared if one.on_front.get(cost)}
    front = sorted((x, e.ranked_speedup.value) for e, x in points if id(e) in on_front)
    axes.plot(*zip(*front, strict=True), color=INK, linewidth=0.8, drawstyle="steps-post")
    for entry, x in points:
        _point(axes, x, entry, styles[entry.name], _label(entry), id(entry) not in on_front)
    most = max([1e-6, *(x for _, x in points)])
    axes.set_xlim(-0.06 * most, 1.08 * most)
    return make_plot(
        axes,
        f"Filled: no drafter with as few {COST_NAMES[cost]} is faster. The control needs none.",
        f"{FILE_NAMES[cost]}_{panel.slug}",
    )
