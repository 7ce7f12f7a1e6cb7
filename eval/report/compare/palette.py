"""How the comparison's plots look: the report's colours by theme, a look for every drafter, axes
and key, and the figure as a PNG.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.report.compare.entries import Entry
from eval.report.plots import INK, MARKERS, MUTED, SERIES, STYLE, VARIABLES
from jobs.drafters import CONTROL

DOTS_PER_INCH = 200


@dataclass(frozen=True)
class Paint:
    """The colours of a theme."""

    page: str
    colours: dict[str, str]  # stand-in of eval.report.plots -> colour

    def __getitem__(self, stand_in: str) -> str:
        return self.colours[stand_in]


@dataclass(frozen=True)
class Look:
    """How a drafter is drawn in all plots."""

    colour: str  # stand-in: one a series
    marker: str  # one a drafter


def paints() -> dict[str, Paint]:
    """Theme (light, dark) -> its colours, as report.css has them."""
    css = Path(__file__).parent.with_name("report.css").read_text(encoding="utf-8")
    found = {}
    for theme, text in zip(
        ("light", "dark"), css.split("@media (prefers-color-scheme: dark)"), strict=True
    ):
        values = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})\b", text))
        found[theme] = Paint(
            values["--page"], {stand_in: values[name] for stand_in, name in VARIABLES.items()}
        )
    return found


def looks(entries: Sequence[Entry]) -> dict[str, Look]:
    """Drafter -> its look: the drafters of a series share the colour, and those in one place of
    their series the marker.
    """
    groups: dict[str, list[str]] = {}
    for entry in in_order(entries):
        if entry.row.drafter != CONTROL:
            names = groups.setdefault(entry.series or entry.name, [])
            names += [entry.name] * (entry.name not in names)
    found = {entry.name: Look(MUTED, "x") for entry in entries}
    for number, (group, names) in enumerate(groups.items()):
        first = number + number // len(SERIES) if names == [group] else 0
        for place, name in enumerate(names):
            found[name] = Look(
                SERIES[number % len(SERIES)], MARKERS[(first + place) % len(MARKERS)]
            )
    return found


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """By series, then by depth: as keys name them."""
    return sorted(entries, key=lambda entry: (entry.series, entry.row.drafter_layers))


def png(figure: Figure, paint: Paint) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer,
        format="png",
        dpi=DOTS_PER_INCH,
        facecolor=paint.page,
        metadata={"Software": None},
    )
    return buffer.getvalue()


def styled(paint: Paint) -> Any:
    return rc_context(
        {
            key: paint.colours.get(value, value) if isinstance(value, str) else value
            for key, value in STYLE.items()
        }
    )


def axes_of(title: str, paint: Paint) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, 3.3), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(paint.page)
    axes.set_title(textwrap.fill(title, 60), loc="left", fontsize=9.5, color=paint[INK])
    return figure, axes


def speedup_axis(axes: Axes) -> None:
    axes.set_ylabel("speedup")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")


def key(figure: Figure, axes: Axes) -> None:
    """The names under the axes, each once, in two columns where they are short; the figure grows by
    them.
    """
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    columns = 2 if max(len(name) for name in handles) <= 29 and len(handles) > 1 else 1
    figure.set_figheight(3.1 + 0.19 * math.ceil(len(handles) / columns))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
    )
