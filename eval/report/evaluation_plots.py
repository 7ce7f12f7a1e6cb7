"""Plots of an evaluation's page: speedup by draft length and prompt, acceptance, and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.ticker import MaxNLocator

from decoding.rounds.stats import LOOPING_BELOW
from decoding.schedules.by_name import SCHEDULES
from eval.report.plots import (
    INK,
    MUTED,
    REST,
    SERIES,
    SETTINGS,
    Plot,
    Styles,
    describe_intervals,
    draw_errorbar,
    make_axes,
    make_plot,
    shift,
    shorten,
)
from eval.report.text import count_label
from eval.statistics.metrics import MIN_TESTS, Interval, add_by_depth
from eval.statistics.paired_samples import PARTS, PairedSample
from eval.statistics.schema import Row


def _speedup(row: Row) -> Interval:
    return Interval(row.speedup, row.speedup_low, row.speedup_high)


@rc_context(SETTINGS)
def speedup_by_gamma(rows: Sequence[Row], styles: Styles, label: str) -> Plot:
    """Plot measured and predicted speedup over the draft length."""
    axes = make_axes(f"Speedup by draft length: {label}", "draft length gamma", speedup=True)
    names, dashed = list(dict.fromkeys(row.drafter for row in rows)), ""
    for index, name in enumerate(names):
        mine = sorted((r for r in rows if r.drafter == name), key=lambda r: r.num_draft_tokens)
        gammas = [row.num_draft_tokens + shift(index, len(names), 0.06) for row in mine]
        predicted = [np.nan if r.unreliable else r.predicted_speedup or np.nan for r in mine]
        if any(np.isfinite(one) and np.isfinite(two) for one, two in pairwise(predicted)):
            dashed = "Dashed: predicted. "
        axes.plot(gammas, predicted, linewidth=1, dashes=(3, 2), color=styles[name].colour)
        speeds = [_speedup(row) for row in mine]
        colour, marker = styles[name].colour, styles[name].marker
        draw_errorbar(axes, gammas, speeds, color=colour, marker=marker, label=shorten(name))
    axes.set_xticks(sorted({row.num_draft_tokens for row in rows}))
    axes.grid(axis="x", visible=False)
    measured = count_label(rows[0].prompts, "prompt")
    measured += describe_intervals([_speedup(row) for row in rows])
    return make_plot(
        axes,
        f"Points: measured on {measured}. {dashed}Below 1x the drafter costs more than it gains.",
    )


@rc_context(SETTINGS)
def alpha_by_depth(rows: Sequence[Row], styles: Styles, label: str) -> Plot:
    """Plot alpha over the depth, from all draft lengths; leave out depths with too few tests."""
    axes = make_axes(f"Acceptance by depth: {label}", "depth k in the draft", "alpha at depth k")
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
    return make_plot(
        axes, "Accepted over tested draft tokens; all tokens before them were accepted."
    )


@rc_context(SETTINGS)
def throughput_by_depth(rows: Sequence[Row], styles: Styles, label: str) -> Plot:
    """Plot tokens/s over the number of drafter layers; a dashed line is decoding without one."""
    axes = make_axes(f"Depth against throughput: {label}", "drafter layers", "tokens/s")
    look: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "dashes": (3, 2)}
    axes.axhline(rows[0].baseline_tokens_per_second, label="no drafter", **look)
    for layers in dict.fromkeys(row.drafter_layers for row in rows):
        here = [row for row in rows if row.drafter_layers == layers]
        for place, row in enumerate(here):
            style, at = styles[row.drafter], layers + shift(place, len(here), 0.07)
            look = {"color": style.colour, "marker": style.marker, "markersize": 6}
            name = shorten(row.drafter)
            axes.plot([at], [row.tokens_per_second], linestyle="none", label=name, **look)
    axes.set_xticks(sorted({row.drafter_layers for row in rows}))
    axes.set_ylim(0, 1.08 * axes.dataLim.y1)
    axes.grid(axis="x", visible=False)
    return make_plot(axes, "All prompts, prefill excluded. 0 layers: a drafter without a model.")


@rc_context(SETTINGS)
def time_of_a_round(rows: Sequence[Row], label: str) -> Plot:
    """Plot the milliseconds of a mean round by part, and the tokens that the round emits."""
    names, parts = ["no drafter"], [_baseline_parts(rows[0])]
    names += [row.drafter for row in rows]
    parts += [row.parts_ms or _timed_parts(row) for row in rows]
    emitted = [1.0, *(row.tau or 1.0 for row in rows)]
    title = f"Where the time of a round goes: {label}"
    axes = make_axes(title, "ms of a round", height=0.9 + 0.36 * len(names))
    left = np.zeros(len(names))
    for name, colour in zip(PARTS, (SERIES[1], SERIES[0], SERIES[2], REST), strict=True):
        widths = np.array([max(0.0, part.get(name, 0.0)) for part in parts])
        if widths.any():
            axes.barh(range(len(names)), widths, left=left, height=0.58, color=colour, label=name)
        left += widths
    look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9}
    for index, (total, tokens) in enumerate(zip(left, emitted, strict=True)):
        text = f"{total:.2f} ms, {tokens:.2f} tokens"
        axes.annotate(text, (total, index), (4, 0), **look)
    axes.set_yticks(range(len(names)), [shorten(name, 18) for name in names])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, float(left.max()) * 1.62)
    axes.grid(axis="y", visible=False)
    caption = "Rest: committing tokens, reporting the round to the drafter, and counting."
    if not all(row.parts_ms for row in rows):
        caption += " Without verify: timed outside the rounds, as their parts overlap."
    return make_plot(axes, caption)


def _baseline_parts(row: Row) -> dict[str, float]:
    """Return the baseline's milliseconds of a round by part."""
    forward = row.t_target_ms[1]
    rest = row.baseline_round_ms - forward
    return row.baseline_parts_ms or {"forward": forward, "rest": rest}


def _timed_parts(row: Row) -> dict[str, float]:
    """Return the milliseconds of a round whose parts were timed outside it.

    Of overlapping lanes, only what exceeds the target's counts as proposing.
    """
    propose, forward = row.draft_ms_per_round, row.target_ms_per_round
    if row.schedule in SCHEDULES:
        propose = max(0.0, row.round_ms * (1 - row.overhead) - forward)
    rest = row.round_ms - propose - forward
    return {"propose": propose, "forward": forward, "rest": rest}


@rc_context(SETTINGS)
def speed_by_prompt(
    pairs: Mapping[str, Sequence[PairedSample]], styles: Styles, label: str
) -> Plot:
    """Plot tokens/s with the drafter over tokens/s without it, one point per prompt or batch."""
    axes = make_axes(f"Every prompt: {label}", "tokens/s without a drafter", "tokens/s with it")
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
    return make_plot(axes, "Above the line the drafter is faster. Hollow: the target's text loops.")
