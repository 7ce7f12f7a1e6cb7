"""Colours, markers and settings shared by all plots."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Style:
    """How a drafter is drawn in all plots of a page."""

    colour: str = MUTED
    marker: str = "x"


def drafter_styles(series: Mapping[str, str]) -> dict[str, Style]:
    """Return a style for each drafter; drafters of a series share its colour.

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
