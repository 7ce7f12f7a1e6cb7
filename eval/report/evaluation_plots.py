"""Plots of an evaluation's page: speedup by draft length and prompt, acceptance, and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from eval.statistics.paired_samples import PairedSample
from eval.statistics.schema import Row


def _speedup(row: Row) -> Interval:
    return Interval(row.speedup, row.speedup_low, row.speedup_high)


@rc_context(SETTINGS)
def speedup_by_gamma(rows: Sequence[Row], styles: Styles, label: str) -> Plot:
    """Plot measured and predicted speedup over the draft length."""
    axes = make_axes(f"Speedup by draft length: {label}", "draft length gamma", speedup=True)
    names = list(dict.fromkeys(row.drafter for row in rows))
    for index, name in enumerate(names):
        mine = sorted((r for r in rows if r.drafter == name), key=lambda r: r.num_draft_tokens)
        gammas = [row.num_draft_tokens + shift(index, len(names), 0.06) for row in mine]
        predicted = [np.nan if r.unreliable else r.predicted_speedup or np.nan for r in mine]
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
        f"Points: measured on {measured}. Dashed: predicted. Below 1x the drafter costs more "
        f"than it gains.",
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
    axes = make_axes(title, "ms per emitted token", height=0.9 + 0.36 * len(names))
    left = np.zeros(len(names))
    looks = (("drafting", SERIES[1]), ("target", SERIES[0]), ("the rest", REST))
    for (name, colour), widths in zip(looks, np.array(costs).clip(min=0).T, strict=True):
        axes.barh(range(len(names)), widths, left=left, height=0.58, color=colour, label=name)
        left += widths
    for index, total in enumerate(left):
        axes.annotate(
            f"{total:.2f}", (total, index), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(names)), [shorten(name, 18) for name in names])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, float(left.max()) * 1.14)
    axes.grid(axis="y", visible=False)
    return make_plot(axes, "Time of a round over the tokens it emits. Parts are timed separately.")


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
