"""What the plots of evaluations and comparisons share: style, axes, inline SVG and PNG files.

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
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.statistics.metrics import Interval

# Colours as PNG files show them. In pages, templates/report.css sets the variable of each name, for
# light and dark windows.
COLOURS = {
    **{"page": "#ffffff", "ink": "#1c1d1f", "muted": "#5f6165", "rule": "#e2e1dc"},
    **{"series-1": "#2860a8", "series-2": "#b96413", "series-3": "#2d8a68"},
    **{"series-4": "#9a4f96", "series-5": "#8a7a1f", "series-6": "#57606a", "rest": "#94938d"},
}
PAGE, INK, MUTED, RULE, *SERIES, REST = COLOURS.values()
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
WIDEST_SHIFT = 0.7  # distance of the outer ones of several points at the same number
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
        """SVG element with the page's fonts and colours, and ids that are unique on the page."""
        drawn = io.StringIO()
        with rc_context(SETTINGS):
            self.figure.savefig(drawn, format="svg", metadata={"Date": None})
        element = re.sub(r"<metadata>.*?</metadata>", "", drawn.getvalue(), flags=re.S)
        element = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>f{next(_serial)}-", element)
        for name, colour in COLOURS.items():
            element = element.replace(f": {colour}", f": var(--{name})")
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


def shift(index: int, count: int, step: float) -> float:
    """Return the shift of one of `count` points at the same number, which keeps them apart.

    step: distance of neighbours, smaller where there are so many points that they would reach those
    of the next number.
    """
    return min(step, WIDEST_SHIFT / max(1, count - 1)) * (index - (count - 1) / 2)


def make_axes(
    title: str, x: str, y: str = "", *, speedup: bool = False, height: float = 2.9
) -> Axes:
    axes = Figure(figsize=(5.2, height), layout="constrained").subplots()
    axes.set_title(textwrap.fill(title, 60), loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(x)
    axes.set_ylabel("speedup" if speedup else y)
    if speedup:
        axes.axhline(1, color=MUTED, linewidth=1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    return axes


def make_plot(axes: Axes, caption: str, name: str = "") -> Plot:
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


def draw_errorbar(axes: Axes, x: Sequence[float], speeds: Sequence[Interval], **look: Any) -> None:
    """Draw speedups with error bars; a speedup without an interval gets bars of length 0."""
    below = [one.value - (one.value if one.low is None else one.low) for one in speeds]
    above = [(one.value if one.high is None else one.high) - one.value for one in speeds]
    lengths = np.array([below, above]).clip(min=0)
    axes.errorbar(x, [one.value for one in speeds], lengths, elinewidth=1, **look)


def describe_intervals(speeds: Sequence[Interval]) -> str:
    """Return the part of a caption that names the intervals, or "" if none is drawn."""
    drawn = any(one.low is not None and one.high is not None for one in speeds)
    return ", with 95 % intervals" if drawn else ""
