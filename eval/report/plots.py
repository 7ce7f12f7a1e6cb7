"""Plots of an evaluation and of a comparison, as inline SVG for pages and as PNG files.

Figures are drawn for a column 380 px wide, the narrowest screen that matters, and scale up.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from decoding.costs.prediction import iso_cost_ratio
from decoding.rounds.stats import LOOPING_BELOW
from decoding.schedules.by_name import SCHEDULES
from eval.report.text import count_label
from eval.statistics.comparison.entries import Entry
from eval.statistics.comparison.panels import COSTS, Panel, chains, usual_costs
from eval.statistics.metrics import MIN_TESTS, Interval, add_by_depth
from eval.statistics.paired_samples import PairedSample
from eval.statistics.schema import Row
from jobs.drafters import CONTROL

INK, MUTED, RULE = "#1c1d1f", "#6a6c70", "#e2e1dc"
SERIES = ["#2860a8", "#d0782a", "#2d8a68", "#9a4f96", "#8a7a1f", "#57606a"]
MARKERS = ["o", "s", "^", "D", "v", "P"]
SETTINGS: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 10, "text.color": INK},
    **{"axes.edgecolor": RULE, "axes.labelcolor": MUTED, "axes.linewidth": 0.8},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    **{"axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.5},
    **{"xtick.color": MUTED, "xtick.major.size": 0, "ytick.color": MUTED, "ytick.major.size": 0},
    **{"lines.linewidth": 1.6, "lines.markersize": 4.5},
}
DOTS_PER_INCH = 200
# Speedups that get an iso-speedup curve, in order of importance, and the place of their labels.
LEVELS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 1.5, 2.5, 5.0, 1.25, 1.75, 3.5)
LABELS_AT = 0.045  # share of the plot's width
LABELS_APART = 0.07  # in alpha; curves whose labels would be closer are left out
COST_NAMES = {"parameters": "drafter parameters", "training_tokens": "training tokens"}
FILE_NAMES = {"parameters": "pareto", "training_tokens": "training"}
_serial = itertools.count()


@dataclass(frozen=True)
class Style:
    """Colour and marker of a drafter in all plots of a page."""

    colour: str = MUTED
    marker: str = "x"


Styles = Mapping[str, Style]


def drafter_styles(series: Mapping[str, str]) -> dict[str, Style]:
    """Return a style for each drafter; the drafters of a series share its colour.

    series: drafter -> its series, empty if it belongs to none.
    """
    groups: dict[str, list[str]] = {}
    for name, group in series.items():
        groups.setdefault(group or name, []).append(name)
    styles = {}
    for number, (group, names) in enumerate(groups.items()):
        # Drafters without a series that share a colour get different markers.
        first = number + number // len(SERIES) if names == [group] else 0
        for place, name in enumerate(names, first):
            styles[name] = Style(SERIES[number % len(SERIES)], MARKERS[place % len(MARKERS)])
    return styles


@dataclass(frozen=True)
class Plot:
    """A figure with its alternative text, the caption under it and the stem of its file name."""

    figure: Figure
    title: str
    caption: str
    name: str = ""

    @property
    def svg(self) -> Markup:
        """SVG element that uses the page's fonts and has ids that are unique on the page."""
        drawn = io.StringIO()
        with rc_context(SETTINGS):
            self.figure.savefig(drawn, format="svg", metadata={"Date": None})
        element = re.sub(r"<metadata>.*?</metadata>", "", drawn.getvalue(), flags=re.S)
        element = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>f{next(_serial)}-", element)
        box = re.search(r'viewBox="[^"]+"', element)
        assert box is not None, "matplotlib writes a viewBox"
        inside = element[element.index(">", box.start()) + 1 :]
        return Markup(f'<svg {box[0]} role="img" aria-label="{escape(self.title)}">{inside}')

    @property
    def png(self) -> bytes:
        """Content of a PNG file."""
        drawn = io.BytesIO()
        metadata = {"Software": None}
        self.figure.savefig(drawn, format="png", dpi=DOTS_PER_INCH, metadata=metadata)
        return drawn.getvalue()


def shorten(name: str, most: int = 29) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _axes(title: str, x: str, y: str = "", *, speedup: bool = False, height: float = 2.9) -> Axes:
    axes = Figure(figsize=(5.2, height), layout="constrained").subplots()
    axes.set_title(textwrap.fill(title, 60), loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(x)
    axes.set_ylabel("speedup" if speedup else y)
    if speedup:
        axes.axhline(1, color=MUTED, linewidth=1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    return axes


def _plot(axes: Axes, caption: str, name: str = "") -> Plot:
    """Put the legend under the axes, each name once, and return the plot."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if handles:
        columns = 2 if max(map(len, handles)) <= 29 and len(handles) > 1 else 1
        figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(handles) / columns))
        look: dict[str, Any] = {"ncols": columns, "frameon": False, "fontsize": 8.5}
        figure.legend(list(handles.values()), list(handles), loc="outside lower left", **look)
    return Plot(figure, axes.get_title("left").replace("\n", " "), caption, name)


def _errorbar(axes: Axes, x: Sequence[float], speeds: Sequence[Interval], **look: Any) -> None:
    """Draw speedups with error bars; a speedup without an interval gets bars of length 0."""
    below = [one.value - (one.value if one.low is None else one.low) for one in speeds]
    above = [(one.value if one.high is None else one.high) - one.value for one in speeds]
    lengths = np.array([below, above]).clip(min=0)
    axes.errorbar(x, [one.value for one in speeds], lengths, elinewidth=1, **look)


def _with_intervals(speeds: Sequence[Interval]) -> str:
    """Return the part of a caption that names the intervals, or "" if none is drawn."""
    drawn = any(one.low is not None and one.high is not None for one in speeds)
    return ", with 95 % intervals" if drawn else ""


def _speedup(row: Row) -> Interval:
    return Interval(row.speedup, row.speedup_low, row.speedup_high)


# ------------------------------------------------------------------------------------ an evaluation
@rc_context(SETTINGS)
def speedup_by_gamma(rows: Sequence[Row], styles: Styles, label: str) -> Plot:
    """Plot measured and predicted speedup over the draft length."""
    axes = _axes(f"Speedup by draft length: {label}", "draft length gamma", speedup=True)
    names = list(dict.fromkeys(row.drafter for row in rows))
    for index, name in enumerate(names):
        mine = sorted((r for r in rows if r.drafter == name), key=lambda r: r.num_draft_tokens)
        shift = 0.06 * (index - (len(names) - 1) / 2)  # keeps intervals apart
        gammas = [row.num_draft_tokens + shift for row in mine]
        predicted = [np.nan if r.unreliable else r.predicted_speedup or np.nan for r in mine]
        axes.plot(gammas, predicted, linewidth=1, dashes=(3, 2), color=styles[name].colour)
        speeds = [_speedup(row) for row in mine]
        colour, marker = styles[name].colour, styles[name].marker
        _errorbar(axes, gammas, speeds, color=colour, marker=marker, label=shorten(name))
    axes.set_xticks(sorted({row.num_draft_tokens for row in rows}))
    axes.grid(axis="x", visible=False)
    measured = count_label(rows[0].prompts, "prompt")
    measured += _with_intervals([_speedup(row) for row in rows])
    return _plot(
        axes,
        f"Points: measured on {measured}. Dashed: predicted. Below 1x the drafter costs more "
        f"than it gains.",
    )


@rc_context(SETTINGS)
def alpha_by_depth(rows: Sequence[Row], styles: Styles, label: str) -> Plot:
    """Plot alpha over the depth, from all draft lengths; leave out depths with too few tests."""
    axes = _axes(f"Acceptance by depth: {label}", "depth k in the draft", "alpha at depth k")
    deepest = 1
    for name in dict.fromkeys(row.drafter for row in rows):
        mine = [row for row in rows if row.drafter == name]
        tested = add_by_depth([row.tested_by_depth for row in mine])
        accepted = add_by_depth([row.accepted_by_depth for row in mine])
        depths = [depth for depth, tests in enumerate(tested, start=1) if tests >= MIN_TESTS]
        rates = [accepted[k - 1] / tested[k - 1] for k in depths]
        look = styles[name]
        axes.plot(depths, rates, color=look.colour, marker=look.marker, label=shorten(name))
        deepest = max([deepest, *depths])
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, deepest + 1))
    axes.grid(axis="x", visible=False)
    return _plot(axes, "Accepted over tested draft tokens; all tokens before them were accepted.")


@rc_context(SETTINGS)
def time_per_token(rows: Sequence[Row], label: str) -> Plot:
    """Plot the milliseconds that an emitted token costs, by part of the round."""
    t_target, baseline_ms = rows[0].t_target_ms[1], rows[0].baseline_round_ms
    names, costs = ["no drafter"], [[0.0, t_target, baseline_ms - t_target]]
    for row in rows:
        drafting, target = row.draft_ms_per_round, row.target_ms_per_round
        if row.schedule in SCHEDULES:  # lanes overlap: only what exceeds the target's lane counts
            drafting = max(0.0, row.round_ms * (1 - row.overhead) - target)
        parts = (drafting, target, row.round_ms - drafting - target)
        names.append(row.drafter)
        costs.append([part / (row.tau or 1.0) for part in parts])
    title = f"Where the time of a token goes: {label}"
    axes = _axes(title, "ms per emitted token", height=0.9 + 0.36 * len(names))
    left = np.zeros(len(names))
    looks = (("drafting", SERIES[1]), ("target", SERIES[0]), ("the rest", "#c9c8c2"))
    for (name, colour), widths in zip(looks, np.array(costs).clip(min=0).T, strict=True):
        axes.barh(range(len(names)), widths, left=left, height=0.58, color=colour, label=name)
        left += widths
    for index, total in enumerate(left):
        axes.text(total, index, f" {total:.2f}", va="center", fontsize=9.5)
    axes.set_yticks(range(len(names)), [shorten(name, 18) for name in names])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, float(left.max()) * 1.14)
    axes.grid(axis="y", visible=False)
    return _plot(axes, "Time of a round over the tokens it emits. Parts are timed separately.")


@rc_context(SETTINGS)
def speed_by_prompt(
    pairs: Mapping[str, Sequence[PairedSample]], styles: Styles, label: str
) -> Plot:
    """Plot tokens/s with the drafter over tokens/s without it, one point per prompt or batch."""
    axes = _axes(f"Every prompt: {label}", "tokens/s without a drafter", "tokens/s with it")
    ends: list[float] = []
    for name, samples in pairs.items():
        before = np.array([one.base_tokens / one.base_seconds for one in samples])
        after = np.array([one.tokens / one.seconds for one in samples])
        loops = np.array([np.mean(one.distinct_4) < LOOPING_BELOW for one in samples])
        colour, marker = styles[name].colour, styles[name].marker
        look: dict[str, Any] = {"marker": marker, "s": 16, "edgecolors": colour}
        axes.scatter(before[~loops], after[~loops], color=colour, label=shorten(name), **look)
        axes.scatter(before[loops], after[loops], facecolors="none", **look)
        ends += [before.min(), before.max()]
    axes.axline((ends[0], ends[0]), slope=1, color=MUTED, linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return _plot(axes, "Above the line the drafter is faster. Hollow: the target's text loops.")


# ------------------------------------------------------------------------------------- a comparison
def styles_of_entries(entries: Sequence[Entry]) -> Styles:
    """Return the style of each drafter by name; the control is grey in all plots."""
    drafters = [entry for entry in _in_order(entries) if entry.row.drafter != CONTROL]
    styles = drafter_styles({entry.name: entry.series for entry in drafters})
    return {entry.name: styles.get(entry.name, Style()) for entry in entries}


def panel_plots(panel: Panel, styles: Styles) -> list[Plot]:
    """Return the plots that a panel has the data for."""
    if not panel.fastest:
        return []
    plots = [depth(panel, styles)]
    if any(entry.alpha is not None for entry in chains(panel)):
        plots.append(acceptance(panel, styles))
    plots.append(pareto(panel, "parameters", styles))
    if len({entry.training_tokens for entry in panel.fastest if entry.training_tokens}) > 1:
        plots.append(pareto(panel, "training_tokens", styles))
    return plots


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.series, entry.row.drafter_layers))


def _label(entry: Entry) -> str:
    if entry.row.drafter == CONTROL:
        return "prompt lookup, the control"
    return f"{shorten(entry.name, 13)}, drafts nothing" if entry.idle else shorten(entry.name)


def _point(axes: Axes, x: float, entry: Entry, style: Style, label: str, hollow: bool) -> None:
    look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markersize": 6}
    look["markerfacecolor"] = "white" if hollow else style.colour
    _errorbar(axes, [x], [entry.ranked_speedup], linestyle="none", label=label, **look)


@rc_context(SETTINGS)
def depth(panel: Panel, styles: Styles) -> Plot:
    """Plot speedup over the number of drafter layers.

    A line joins the drafters of a series. A dashed line is the control's median speedup over the
    runs, in a band from its lowest to its highest. A drafter that drafts nothing has a hollow
    marker and is not joined, since its speed is that of plain decoding.
    """
    axes = _axes(f"Depth against speedup: {panel.label}", "drafter layers", speedup=True)
    drawn = [entry for entry in _in_order(panel.fastest) if entry.row.drafter != CONTROL]
    controls = [e.ranked_speedup.value for e in panel.fastest if e.row.drafter == CONTROL]
    if controls:
        look: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "dashes": (3, 2)}
        axes.axhspan(min(controls), max(controls), color=MUTED, alpha=0.15, linewidth=0)
        axes.axhline(median(controls), label="prompt lookup, the control", **look)

    def x(entry: Entry) -> float:
        """Return the layers, shifted a little where several drafters have the same number."""
        same = [e.name for e in drawn if e.row.drafter_layers == entry.row.drafter_layers]
        return entry.row.drafter_layers + 0.07 * (same.index(entry.name) - (len(same) - 1) / 2)

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
    lengths = "fastest draft length" + _with_intervals([entry.ranked_speedup for entry in drawn])
    return _plot(
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
    axes = _axes(f"Acceptance against cost: {panel.label}", x, "acceptance rate alpha")
    widest = 1.3 * max(entry.row.cost_ratio for entry in drawn)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    text: dict[str, Any] = {"fontsize": 8.5, "color": MUTED, "va": "center", "ha": "center"}
    for level, c_A, alpha_A in iso_speedup_curves(drawn, widest):
        colour, width = (INK, 1.2) if level == 1 else (MUTED, 0.8)
        axes.plot(c_A, alpha_A, color=colour, linewidth=width, zorder=1)
        at, y = LABELS_AT * widest, float(np.interp(LABELS_AT * widest, c_A, alpha_A))
        axes.text(at, y, f"{level:g}x", zorder=1.5, bbox=box, **text)
    for entry in drawn:
        style, at_alpha = styles[entry.name], [entry.alpha or 0.0]
        look: dict[str, Any] = {"color": style.colour, "markersize": 7}
        axes.plot([entry.row.cost_ratio], at_alpha, style.marker, label=shorten(entry.name), **look)
    axes.set_xlim(0, widest)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, prune="lower"))  # its 0 would meet that of alpha
    return _plot(
        axes,
        "Points: measured. Curves: equal speedup by the formula at the best gamma, with median V "
        "and overheads. Only serial drafters with a model that drafted something are shown.",
        f"acceptance_{panel.slug}",
    )


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
    axes = _axes(title, f"{COST_NAMES[cost]} in millions", speedup=True)
    known = [(e, COSTS[cost](e)) for e in _in_order(panel.fastest)]
    points = [(entry, value / 1e6) for entry, value in known if value is not None]
    on_front = {id(one.entry) for one in panel.compared if one.on_front.get(cost)}
    front = sorted((x, e.ranked_speedup.value) for e, x in points if id(e) in on_front)
    axes.plot(*zip(*front, strict=True), color=INK, linewidth=0.8, drawstyle="steps-post")
    for entry, x in points:
        _point(axes, x, entry, styles[entry.name], _label(entry), id(entry) not in on_front)
    most = max([1e-6, *(x for _, x in points)])
    axes.set_xlim(-0.06 * most, 1.08 * most)
    return _plot(
        axes,
        f"Filled: no drafter with as few {COST_NAMES[cost]} is faster. The control needs none.",
        f"{FILE_NAMES[cost]}_{panel.slug}",
    )
