"""Tables of a comparison: its panels, how the runs differ, and what they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import mean
from typing import Any

from eval.report import text
from eval.report.evaluation_tables import losses_table, result_cells
from eval.report.tables import Table, make_table
from eval.report.text import NONE, number, rates, with_interval
from eval.statistics.comparison.entries import Entry
from eval.statistics.comparison.evaluations import Evaluation
from eval.statistics.comparison.panels import ComparedEntry, Panel, distinguishing_fields

PACE_WITHIN = 0.1  # share by which baselines of runs may differ without being listed
# Settings of eval.run that change how a speedup is measured, not what it may be compared with.
WAYS = (
    *("max_prompts", "samples", "repeats", "stop_at_eos", "stop_strings", "shards"),
    *("sweep", "sweep_prompts", "num_draft_tokens", "max_draft_tokens"),
)
# Columns of the two tables of a panel.
OUTCOME = (
    *("drafter", "layers", "parameters", "speedup [95 %]", "not looping", "over the best"),
    *("best other", "shared prompts", "front", "tokens/s", "alone", "output"),
)
ACCEPTANCE_AND_COSTS = (
    *("drafter", "gamma", "drafted", "alpha", "by depth", "tau", "c", "V"),
    *("t_draft", "bytes/step", "trained on", "overhead", "predicted"),
)
# Columns of both that narrow terminals leave out.
SPARE = (
    *("shared prompts", "alone", "parameters", "best other", "tokens/s", "not looping", "output"),
    *("predicted", "overhead", "trained on", "drafted", "bytes/step", "t_draft", "by depth"),
    *("V", "tau"),
)
SPARE_OF_MEANS = ("seeds", "by depth", "V", "tau")


def entry_name(entry: Entry) -> str:
    """Return the entry's name, its rule if it is not the run's, and why it is not ranked."""
    rule = text.drafter_rule(entry.row)
    name = f"{entry.name}, {rule}" if rule and rule not in entry.name.lower() else entry.name
    remark = entry.not_ranked or ("drafts nothing" if entry.idle else "")
    return f"{name} [{remark}]" if remark else name


def entry_cells(compared: ComparedEntry) -> dict[str, str]:
    entry, row, ratio = compared.entry, compared.entry.row, compared.ratio
    return {
        **result_cells(row),
        "drafter": entry_name(entry),
        "layers": str(row.drafter_layers or NONE),
        "over the best": with_interval(*dataclasses.astuple(ratio)) if ratio else NONE,
        "best other": compared.rival.name if compared.rival else NONE,
        "shared prompts": str(compared.shared or NONE),
        "by depth": rates(row.alpha_by_depth),
        "t_draft": number(row.t_draft_ms, 3),
        "parameters": text.amount(row.drafter_parameters) if row.drafter_parameters else "no model",
        "bytes/step": text.amount(entry.bytes_per_step, "B"),
        "trained on": text.amount(entry.training_tokens),
        "alone": number(row.baseline_tokens_per_second, 1),
        "front": "".join(cost[0].upper() for cost, on_it in compared.on_front.items() if on_it),
    }


def panel_tables(panel: Panel, title: str = "") -> list[Table]:
    """Return a panel's two tables: its outcome, and its acceptance and costs."""
    rows = [entry_cells(compared) for compared in panel.compared]
    return [
        make_table(title, [{n: row[n] for n in names} for row in rows], (), SPARE)
        for names in (OUTCOME, ACCEPTANCE_AND_COSTS)
    ]


def seeds_table(panel: Panel, title: str = "") -> Table:
    """Return a table of each drafter's means over its seeds, the fastest first.

    It has no rows if no run repeats another one.
    """
    repeated: dict[str, list[Entry]] = {}
    for entry in panel.fastest:
        if entry.seeds:
            repeated.setdefault(entry.row.drafter, []).append(entry)
    means = {
        name: mean(entry.ranked_speedup.value for entry in entries)
        for name, entries in repeated.items()
    }
    order = sorted(means, key=lambda name: -means[name])
    seeds = sorted({entry.row.seed for entries in repeated.values() for entry in entries})
    words = f"means over the seeds {', '.join(map(str, seeds))}"
    title = f"{title}, {words}" if title else words.capitalize()
    return make_table(title, [_mean_cells(repeated[name]) for name in order], (), SPARE_OF_MEANS)


def _mean_cells(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the cells of a drafter's means over its seeds."""
    rows = [entry.row for entry in entries]
    depths = zip_longest(*(row.alpha_by_depth for row in rows))
    verifying = [row.target_ms_per_round / row.t_target_ms[1] for row in rows]
    return {
        "drafter": text.drafter_label(rows[0]),
        "seeds": str(len(rows)),
        "speedup [range]": _mean_and_range(row.speedup for row in rows),
        "not looping [range]": _mean_and_range(row.headline_speedup for row in rows),
        "alpha": number(_mean(row.alpha for row in rows)),
        "by depth": rates([_mean(depth) for depth in depths]),
        "tau": number(_mean(row.tau for row in rows)),
        "c": number(_mean(row.cost_ratio for row in rows), 3),
        "V": number(mean(verifying)),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None if there is none."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _mean_and_range(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return with_interval(mean(known), min(known), max(known)) if known else NONE


def panel_losses(panel: Panel) -> Table:
    return losses_table([(entry_name(entry), entry.row) for entry in panel.entries])


def differences_table(panels: Sequence[Panel], evaluations: Sequence[Evaluation]) -> Table:
    """Return a table of what differs between the runs, and its effect on the comparison."""
    rows = []

    def add(what: str, effect: str, values: Mapping[str, Any]) -> None:
        runs: dict[str, list[str]] = {}
        for run, value in values.items():
            runs.setdefault(str(value), []).append(run)
        if len(runs) > 1:
            by_run = "; ".join(f"{value} ({', '.join(names)})" for value, names in runs.items())
            rows.append({"differs": what, "effect": effect, "values by run": by_run})

    settings = list(dict.fromkeys(panel.setting for panel in panels))
    for field in distinguishing_fields(settings, "target", "target_hash"):
        values = {e.run: vars(panel.setting)[field] for panel in panels for e in panel.entries}
        add(field.replace("_", " "), "speeds are not compared", values)
    for panel in panels:
        counted = {entry.run: frozenset(entry.counted()) for entry in panel.entries}
        if len(set(counted.values())) > 1:
            sizes = {run: f"{len(ids)} of {run}" for run, ids in counted.items()}
            add(f"prompts, {panel.label}", "only shared prompts are compared", sizes)
        paces = {e.run: e.row.baseline_tokens_per_second for e in panel.entries}
        if max(paces.values()) > (1 + PACE_WITHIN) * min(paces.values()):
            rounded = {run: f"{pace:.1f}" for run, pace in paces.items()}
            add(f"baseline tokens/s, {panel.label}", "only ratios to it are compared", rounded)
    for way in WAYS:
        add(way, "measured in another way", {one.label: one.config.get(way) for one in evaluations})
    return make_table("How the runs differ", rows)


def runs_table(evaluations: Sequence[Evaluation]) -> Table:
    """Return a table of each run's date, hardware, versions, revision and command."""
    rows = []
    for one in evaluations:
        made, versions = one.manifest, one.manifest["versions"]
        rows.append(
            {
                "run": one.label,
                "measured": made["started"].replace("T", " "),
                "hardware": one.rows[0].hardware,
                "versions": f"torch {versions['torch']}, transformers {versions['transformers']}",
                "code": made["git_revision"][:12],
                "command": made["command"],
            }
        )
    return make_table("", rows)


def comparison_notes(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the notes of all evaluations, each after the label of its run."""
    notes = [note for one in evaluations for note in one.notes]
    for one in evaluations:
        named = [(text.drafter_name(row), row) for row in one.rows]
        notes += [f"{one.label}: {note}" for note in text.calibrated_elsewhere(named)]
        notes += [f"{one.label}: {note}" for note in text.stopped_by_round(named)]
        notes += [f"{one.label}: {note}" for note in text.shared_vocabularies(named)]
    return notes


def comparison_warnings(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the warnings of all evaluations, each after the label of its run."""
    return [f"{one.label}: {warning}" for one in evaluations for warning in text.warnings(one.rows)]
