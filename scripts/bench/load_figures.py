"""Figures of servers under load: percentiles, latencies over plain decoding's, and plots."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context

from eval.report.plots import (
    SETTINGS,
    Plot,
    Style,
    drafter_styles,
    draw_errorbar,
    make_axes,
    make_plot,
    shift,
)
from eval.statistics.metrics import Interval, crossed_bootstrap, interval_fields
from scripts.bench.load_requests import Answered

OVER = "latency_over_plain"
PERCENTILES = {50: 1, 90: 10, 99: 100}  # -> the least number of requests that shows it
_RATES = "requests a second"
LONGEST_LABEL = 29
Passes = Sequence[Sequence[Answered]]  # the answers to the same requests, in each pass


def percentiles(values: Sequence[float], requests: int) -> dict[str, float]:
    """Return percentiles by the nearest rank; a percentile that needs more requests is left out."""
    ranked = sorted(values)
    return {
        f"p{p}": ranked[-(-p * len(ranked) // 100) - 1]
        for p, least in PERCENTILES.items()
        if requests >= least
    }


def left_out(requests: int, passes: int) -> list[str]:
    """Return sentences on what so few requests a rate, or so few passes, do not show."""
    lacking = [
        f"p{p} is left out: a rate has {requests} requests, and p{p} needs at least {least}."
        for p, least in PERCENTILES.items()
        if requests < least
    ]
    drift = "`pays` is left out: the intervals of one pass lack the drift of the machine's speed."
    return lacking if passes > 1 else [*lacking, drift]


def summary(found: Passes, times: Sequence[float], plain: Passes) -> dict[str, Any]:
    """Return the figures of a server at one rate, over all passes.

    in_system: mean number of requests that wait or run, by Little's law. latency_over_plain: ratio
    of the mean latencies, with its interval over requests and passes.
    """
    everything = [one for answers in found for one in answers]
    seconds = sum(
        max(at + one.whole for at, one in zip(times, answers, strict=True)) - times[0]
        for answers in found
    )
    over = crossed_bootstrap(_latencies(found), _latencies(plain))
    pairs = zip(everything, (one for answers in plain for one in answers), strict=True)
    values = {
        "first_token_s": [one.first_token for one in everything],
        "per_output_token_s": [one.per_output_token for one in everything],
        "latency_s": [one.whole for one in everything],
    }
    return {
        "answers": len(everything),
        "tokens_per_second": sum(one.tokens for one in everything) / seconds,
        "in_system": sum(one.whole for one in everything) / seconds,
        **{name: percentiles(of, len(times)) for name, of in values.items()},
        **interval_fields(OVER, over),
        "equal_texts": sum(ours.text == theirs.text for ours, theirs in pairs),
    }


def _latencies(found: Passes) -> list[list[float]]:
    return [[one.whole for one in answers] for answers in found]


def where_it_pays(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return up to which rate a server's latencies are below the plain one's.

    up_to: the highest rate with an interval below 1. stops_at: the first rate with an interval
    above 1, beyond which no other counts; None if there is none. not_decided: the rates up to there
    whose intervals hold 1.
    """
    found: dict[str, Any] = {"up_to": None, "stops_at": None, "not_decided": []}
    for row in rows:
        low, high = row[f"{OVER}_low"], row[f"{OVER}_high"]
        if row["server"] != name:
            continue
        if low is not None and low > 1:
            return found | {"stops_at": row["rate"]}
        if high is not None and high < 1:
            found["up_to"] = row["rate"]
        else:
            found["not_decided"].append(row["rate"])
    return found


# ------------------------------------------------------------------------------------------- plots
def plots(rows: Sequence[Mapping[str, Any]], plain: str) -> list[Plot]:
    """Return latency by rate, and latency over plain decoding's with its intervals."""
    names = list(dict.fromkeys(row["server"] for row in rows))
    styles = {plain: Style(), **drafter_styles({name: "" for name in names if name != plain})}
    return [_latency_plot(rows, styles), _ratio_plot(rows, styles, plain)]


def _label(name: str) -> str:
    """Return the end of a long name, as the ends of paths differ."""
    return name if len(name) <= LONGEST_LABEL else f"…{name[1 - LONGEST_LABEL :]}"


def _latency_plot(rows: Sequence[Mapping[str, Any]], styles: Mapping[str, Style]) -> Plot:
    with rc_context(SETTINGS):
        axes = make_axes("Latency: median, and 90th percentile (dashed)", _RATES, "seconds")
        for name, style in styles.items():
            own = [row for row in rows if row["server"] == name]
            rates = [row["rate"] for row in own]
            medians, high = ([row["latency_s"].get(key) for row in own] for key in ("p50", "p90"))
            look: dict[str, Any] = {"color": style.colour, "label": _label(name)}
            axes.plot(rates, medians, marker=style.marker, **look)
            if None not in high:
                axes.plot(rates, high, linestyle="--", linewidth=0.8, color=style.colour)
        axes.set_ylim(bottom=0)
        return _with_rates(axes, rows, "latency")


def _ratio_plot(rows: Sequence[Mapping[str, Any]], styles: Mapping[str, Style], plain: str) -> Plot:
    with rc_context(SETTINGS):
        axes = make_axes(f"Mean latency over {plain}'s, with 95 % intervals", _RATES, "ratio")
        axes.axhline(1, color=styles[plain].colour, linewidth=1)
        names = [name for name in styles if name != plain]
        for place, name in enumerate(names):
            own = [row for row in rows if row["server"] == name]
            # factors, as the axis of rates is logarithmic
            apart = 1.03 ** shift(place, len(names), 1.0)
            draw_errorbar(
                axes,
                [row["rate"] * apart for row in own],
                [Interval(row[OVER], row[f"{OVER}_low"], row[f"{OVER}_high"]) for row in own],
                color=styles[name].colour,
                marker=styles[name].marker,
                label=_label(name),
            )
        return _with_rates(axes, rows, "over_plain")


def _with_rates(axes: Any, rows: Sequence[Mapping[str, Any]], name: str) -> Plot:
    rates = sorted({row["rate"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xticks([], minor=True)
    return make_plot(axes, "", name)
