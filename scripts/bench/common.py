"""What every benchmark here does: typed options `key=value`, sides taken in turn, medians, ratios,
one JSON file with the machine in it.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf

from decoding import devices
from decoding.costs.machine_limits import SLOW_YARDSTICK
from decoding.errors import UserError
from jobs.config import plain, typed
from jobs.files import write_text
from jobs.help import field_docs
from jobs.malloc import keep_memory
from jobs.run_folder import git_revision, hardware, versions

Options = TypeVar("Options")
RESULTS = Path(__file__).resolve().parent / "results"


def options(schema: type[Options]) -> Options:
    """The command line's `key=value` pairs as `schema`; malloc settings and threads are the same
    for all sides of a benchmark.

    `--help` prints what the script is and what it can be told, and ends it.
    """
    if {"--help", "-h"} & {*sys.argv[1:]}:
        print(usage(schema))
        sys.exit()
    keep_memory()
    given = OmegaConf.from_cli()
    assert isinstance(given, DictConfig)
    try:
        chosen = typed(OmegaConf.merge(OmegaConf.create(plain(schema())), given), schema)  # type: ignore[arg-type]
    except UserError as error:
        sys.exit(f"error: {error}")
    torch.set_num_threads(int(getattr(chosen, "threads")))  # noqa: B009
    return chosen


def usage(schema: type[Any]) -> str:
    """What the script of these options is, by its docstring, and every option with its default and
    the comment beside it.
    """
    docs = field_docs(schema)
    shown = {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in plain(schema()).items()
    }
    lines = [f"  {f'{key}={shown[key]}':<32}  {doc}" for key, doc in docs.items()]
    about = (sys.modules[schema.__module__].__doc__ or "").strip()
    return "\n".join([about, "", "Options, as KEY=VALUE, with their defaults:", *lines])


def take_turns(
    sides: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Each side's figure in every round, the sides in rotated order, so that a drift of the machine
    hits all of them.
    """
    names = list(sides)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            value = sides[name]()
            if number >= 0:
                figures[name].append(value)
        print(f"  round {number + 1}/{rounds}", file=sys.stderr, flush=True)
    return figures


def ratio(figures: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    """Median of the ratios round by round, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(figures[over], figures[under], strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def judged(shares: dict[str, float]) -> dict[str, Any]:
    """Shares of limits that were measured beside them; with a warning where one is above 1, which
    no limit allows.
    """
    warnings = [
        f"{name} is {share:.2f}: {SLOW_YARDSTICK}" for name, share in shares.items() if share > 1
    ]
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return {**shares, "warnings": warnings} if warnings else dict(shares)


def save(name: str, chosen: Any, figures: dict[str, Any], show: bool = True) -> None:
    """Write scripts/bench/results/<name>.json, and print the figures."""
    record = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "options": plain(chosen),
        "hardware": hardware(),
        "versions": versions(),
        "git_revision": git_revision(),
        "figures": figures,
    }
    RESULTS.mkdir(exist_ok=True)
    # no paths of one machine
    text = json.dumps(record, indent=1).replace(f"{RESULTS.parents[2]}/", "")
    data = os.environ.get("SHALLOW_DRAFT_DATA")
    write_text(
        RESULTS / f"{name}.json",
        (text.replace(data, "$SHALLOW_DRAFT_DATA") if data else text) + "\n",
    )
    if show:
        print(json.dumps(figures, indent=1))


def save_text(name: str, text: str) -> None:
    """Write scripts/bench/results/<name>.md, and print it."""
    RESULTS.mkdir(exist_ok=True)
    write_text(RESULTS / f"{name}.md", text + "\n")
    print(text)


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; numbers with three digits behind the point, nothing for None."""
    lines = [[*titles], ["---"] * len(titles), *[[_cell(value) for value in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def interval(value: float | None, low: float | None, high: float | None, unit: str = "") -> str:
    """`1.31x [1.20, 1.44]`; without an interval the value alone, and without a value nothing."""
    if value is None:
        return ""
    return f"{value:.3f}{unit}" + (
        f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    )


def peak_bytes(action: Callable[[], Any], device: str = "cpu") -> int:
    """Most bytes that tensors made inside take at once, beyond what was there before."""
    place = torch.device(device)
    devices.peak_bytes(place)  # the peak begins anew, at what is held now
    held = devices.peak_bytes(place)
    if held is not None:
        action()
        most = devices.peak_bytes(place)
        assert most is not None, "a card that counted before"
        return most - held
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        action()
    level = peak = 0
    for event in sorted(
        profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):  # type: ignore[union-attr]
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak
