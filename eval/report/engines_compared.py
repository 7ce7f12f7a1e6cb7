"""Tables of all engines side by side, for a comparison of several runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from eval.measure.records import AUTOREGRESSIVE
from eval.report.engines import drafter_label, engine_warnings, is_suspect, versions_note
from eval.report.tables import Table, make_table
from eval.report.text import NONE, number, with_interval
from eval.statistics.comparison.evaluations import Evaluation
from eval.statistics.engine_row import EngineRow

# Fields that a setting always shows, and those that it shows where the rows differ in them.
ALWAYS = ("dtype", "benchmark", "batch_size", "temperature")
IF_THEY_DIFFER = ("target", "hardware", "threads", "max_new_tokens", "top_k", "top_p")
SUSPECT = "*"


def compared_engine_tables(evaluations: Sequence[Evaluation]) -> list[Table]:
    """Return a table of drafters' gains with a column for each engine, then one of tokens/s.

    Runs without engines add no rows. Engines that did not run a drafter have a dash.
    """
    everything = [row for one in evaluations for row in one.engine_rows]
    if not everything:
        return []
    engines = list(dict.fromkeys(row.engine for row in everything))
    drafted: list[dict[str, str]] = []
    speeds: list[dict[str, str]] = []
    marks: list[str] = []
    for setting, rows in _settings(evaluations, everything).items():
        for name in dict.fromkeys(map(_drafter, rows)):
            found = {row.engine: row for row in rows if _drafter(row) == name}
            place = {"setting": setting, "drafter": name}
            speeds.append(place | _cells(found, engines, _speed))
            if AUTOREGRESSIVE not in {row.method for row in found.values()}:
                drafted.append(place | _cells(found, engines, _gain))
                marks.append("bad" if any(map(is_suspect, found.values())) else "")
    return [
        make_table("A drafter's gain in every engine", drafted, marks),
        make_table("Tokens/s in every engine, prefill included", speeds),
    ]


def compared_engine_warnings(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the warnings of all engines, each after the label of its run."""
    return [
        f"{one.label}: {warning}"
        for one in evaluations
        for warning in engine_warnings(one.engine_rows)
    ]


def compared_engine_notes(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the versions of all engines, once for all runs that have the same."""
    labels: dict[str, list[str]] = {}
    for one in evaluations:
        if one.engine_rows:
            note = versions_note(one.engine_rows, one.manifest["versions"])
            labels.setdefault(note, []).append(one.label)
    if len(labels) == 1:
        return list(labels)
    return [f"{', '.join(runs)}: {note}" for note, runs in labels.items()]


def _settings(
    evaluations: Sequence[Evaluation], everything: Sequence[EngineRow]
) -> dict[str, list[EngineRow]]:
    """Return the rows of each setting: of one run under one condition.

    A setting that several runs have is named after its run too.
    """
    differing = [
        name for name in IF_THEY_DIFFER if len({vars(row)[name] for row in everything}) > 1
    ]
    found: dict[tuple[str, str], list[EngineRow]] = {}
    for one in evaluations:
        for row in one.engine_rows:
            found.setdefault((_setting(row, differing), one.label), []).append(row)
    runs = Counter(setting for setting, _ in found)
    return {
        f"{setting}, {label}" if runs[setting] > 1 else setting: rows
        for (setting, label), rows in found.items()
    }


def _setting(row: EngineRow, more: Sequence[str]) -> str:
    """Return `float32, mt_bench, batch 8, temperature 1`."""
    parts = [row.dtype, row.benchmark, f"batch {row.batch_size}"]
    parts.append("greedy" if row.temperature == 0 else f"temperature {row.temperature:g}")
    return ", ".join([*parts, *(f"{name.replace('_', ' ')} {vars(row)[name]}" for name in more)])


def _drafter(row: EngineRow) -> str:
    length = f", gamma {row.num_draft_tokens}" if row.num_draft_tokens else ""
    return drafter_label(row) + length


def _cells(
    found: Mapping[str, EngineRow], engines: Sequence[str], cell: Callable[[EngineRow], str]
) -> dict[str, str]:
    return {name: cell(found[name]) if name in found else NONE for name in engines}


def _gain(row: EngineRow) -> str:
    """Return `1.25x [1.10, 1.41]`, in two lines so that five engines fit into a terminal."""
    gain = with_interval(row.speedup, row.speedup_low, row.speedup_high)
    return gain.replace(" [", "\n[") + (SUSPECT if is_suspect(row) else "")


def _speed(row: EngineRow) -> str:
    return number(row.tokens_per_second, 1)
