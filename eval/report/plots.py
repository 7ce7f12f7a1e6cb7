"""The report's plots: matplotlib to inline SVG whose colours are the page's own, so that light and
dark both read well.

matplotlib draws with stand-in colours; `svg` swaps them for CSS variables. Figures are drawn for a
column 380 px wide, the narrowest screen that matters, and grow from there.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from decoding.rounds.stats import LOOPING_BELOW
from decoding.schedules.by_name import SCHEDULES
from eval.statistics.metrics import MIN_TESTS, add_by_depth
from eval.statistics.schema import Row
from eval.statistics.units import Unit

INK, MUTED, RULE = "#010101", "#020202", "#030303"
SERIES = ["#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05", "#0a0a06"]
PART_COLOURS = {"drafting": SERIES[1], "target": SERIES[0], "the rest": MUTED}
MARKERS = ["o", "s", "^", "D", "v", "P"]
# Stand-in -> variable of report.css.
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule"} | {
    colour: f"--series-{number}" for number, colour in enumerate(SERIES, start=1)
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 10,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}
_serial = itertools.count()


def svg(figure: Figure, label: str) -> str:
    """The figure as an SVG element that takes its colours and fonts from the page; label is read
    out to the blind.
    """
    buffer = io.StringIO()
    figure.savefig(
        buffer,
        format="svg",
        transparent=True,
        bbox_inches="tight",
        pad_inches=0.03,
        metadata={"Date": None},
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    # Ids are unique in a page, not only in a figure.
    prefix = f"f{next(_serial)}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'href="#', f'href="#{prefix}', text)
    text = text.replace("url(#", f"url(#{prefix}")
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    assert box is not None, "matplotlib writes a viewBox"
    return f'<svg {box.group(0)} role="img" aria-label="{label}">{rest}'


def colours(names: Sequence[str]) -> dict[str, str]:
    """Drafter -> stand-in colour, the same in every plot of a page."""
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(names)}


def _marker(index: int) -> str:
    """Another one for drafters that share a colour."""
    return MARKERS[(index + index // len(SERIES)) % len(MARKERS)]


def _axes(height: float = 3.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, height))
    return figure, figure.subplots()


def speedup_by_gamma(rows: Sequence[Row], palette: dict[str, str]) -> str:
    """Measured (points with intervals) and predicted (dashed) speedup over the draft length, under
    one condition.
    """
    with rc_context(STYLE):
        figure, axes = _axes()
        axes.axhline(1, color=MUTED, linewidth=1)
        names = list(dict.fromkeys(row.drafter for row in rows))
        for index, name in enumerate(names):
            mine = sorted(
                (row for row in rows if row.drafter == name), key=lambda row: row.num_draft_tokens
            )
            gammas = np.array([row.num_draft_tokens for row in mine], dtype=float) + 0.06 * (
                index - (len(names) - 1) / 2
            )
            speeds = np.array([row.speedup for row in mine])
            low = np.array(
                [row.speedup if row.speedup_low is None else row.speedup_low for row in mine]
            )
            high = np.array(
                [row.speedup if row.speedup_high is None else row.speedup_high for row in mine]
            )
            predicted = [
                np.nan if row.predicted_speedup is None else row.predicted_speedup for row in mine
            ]
            axes.plot(gammas, predicted, color=palette[name], linewidth=1, dashes=(3, 2))
            spread = np.array([speeds - low, high - speeds]).clip(min=0)
            axes.errorbar(
                gammas, speeds, spread, color=palette[name], marker=_marker(index), elinewidth=1
            )
        axes.set_xlabel("draft length gamma")
        axes.set_xticks(sorted({row.num_draft_tokens for row in rows}))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axes.grid(axis="x", visible=False)
        return svg(figure, "Speedup by draft length, measured and predicted")


def alpha_over_depth(rows: Sequence[Row], palette: dict[str, str]) -> str:
    """alpha_k over the depth k, from all draft lengths of a drafter; depths with too few tests are
    left out.
    """
    with rc_context(STYLE):
        figure, axes = _axes()
        deepest = 1
        for index, name in enumerate(dict.fromkeys(row.drafter for row in rows)):
            mine = [row for row in rows if row.drafter == name]
            tested = add_by_depth([row.tested_by_depth for row in mine])
            accepted = add_by_depth([row.accepted_by_depth for row in mine])
            depths = [depth for depth, tests in enumerate(tested, start=1) if tests >= MIN_TESTS]
            axes.plot(
                depths,
                [accepted[k - 1] / tested[k - 1] for k in depths],
                color=palette[name],
                marker=_marker(index),
            )
            deepest = max([deepest, *depths])
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("depth k in the draft")
        axes.set_xticks(range(1, deepest + 1))
        axes.grid(axis="x", visible=False)
        return svg(figure, "Acceptance rate by depth")


def time_per_token(rows: Sequence[Row]) -> str:
    """Milliseconds an emitted token costs: drafting, checking by the target, the rest; the baseline
    on top.
    """
    bars = [
        (
            "no drafter",
            0.0,
            rows[0].t_target_ms[1],
            rows[0].baseline_round_ms - rows[0].t_target_ms[1],
        )
    ]
    for row in rows:
        tokens = row.tau or 1.0
        drafting, target = row.draft_ms_per_round, row.target_ms_per_round
        if row.schedule in SCHEDULES:  # at the same time: what drafting adds to the target's lane
            drafting = max(0.0, row.round_ms * (1 - row.overhead) - target)
        rest = row.round_ms - drafting - target
        bars.append((row.drafter, drafting / tokens, target / tokens, rest / tokens))
    with rc_context(STYLE):
        figure, axes = _axes(0.75 + 0.36 * len(bars))
        left = np.zeros(len(bars))
        for part, colour in enumerate(PART_COLOURS.values(), start=1):
            widths = np.array([max(float(bar[part]), 0.0) for bar in bars])  # type: ignore[arg-type]
            axes.barh(range(len(bars)), widths, left=left, height=0.58, color=colour)
            left += widths
        for index, total in enumerate(left):
            axes.text(total, index, f" {total:.2f}", va="center", fontsize=9.5, color=INK)
        axes.set_yticks(range(len(bars)), [short(bar[0]) for bar in bars])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, float(left.max()) * 1.14)
        axes.set_xlabel("ms per emitted token")
        axes.grid(axis="y", visible=False)
        return svg(figure, "Where the time of a token goes")


def short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def prompt_scatter(units_by_name: dict[str, list[Unit]], palette: dict[str, str]) -> str:
    """tokens/s of every prompt with the drafter over tokens/s without; prompts whose text loops are
    hollow.
    """
    with rc_context(STYLE):
        figure, axes = _axes(3.4)
        everything = []
        for index, (name, units) in enumerate(units_by_name.items()):
            before = np.array([unit.base_tokens / unit.base_seconds for unit in units])
            after = np.array([unit.tokens / unit.seconds for unit in units])
            looping = np.array([np.mean(unit.distinct_4) < LOOPING_BELOW for unit in units])
            style: dict[str, Any] = {
                "marker": _marker(index),
                "s": 16,
                "linewidths": 0.9,
                "edgecolors": palette[name],
            }
            axes.scatter(before[~looping], after[~looping], color=palette[name], **style)
            axes.scatter(before[looping], after[looping], facecolors="none", **style)
            everything += [*before, *after]
        low, high = min(everything) * 0.95, max(everything) * 1.03
        across = [
            point
            for units in units_by_name.values()
            for point in (u.base_tokens / u.base_seconds for u in units)
        ]
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1)
        axes.set_ylim(low, high)
        margin = 0.08 * (max(across) - min(across)) + 1e-9
        axes.set_xlim(min(across) - margin, max(across) + margin)
        axes.set_xlabel("tokens/s without a drafter")
        axes.set_ylabel("tokens/s with it")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        return svg(figure, "Tokens per second of every prompt, with and without a drafter")
