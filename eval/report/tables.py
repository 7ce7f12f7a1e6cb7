"""Tables of an evaluation and of a comparison, for the terminal and for the page alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from decoding.costs.machine_limits import SLOW_YARDSTICK
from decoding.schedules.by_name import SCHEDULES, VIRTUAL
from eval.measure.lengths import RULES
from eval.measure.records import Record
from eval.report import text
from eval.report.text import NONE, number, percent, times, with_interval
from eval.statistics.budgets import NO_LIMITS
from eval.statistics.comparison.entries import Entry
from eval.statistics.comparison.evaluations import Evaluation
from eval.statistics.comparison.panels import ComparedEntry, Panel, distinguishing_fields
from eval.statistics.paired_comparison import paired_comparisons
from eval.statistics.schema import RoundBudget, Row, main_rows
from jobs.drafter_use import ALONE
from serving.engines.registry import ENGINES, OURS

PLAIN_WIDTH = 200  # characters of a line where there is no terminal
WIDE = 140  # narrower terminals show the key columns alone
# Shares by which a prediction and a replay may differ from the measurement without a mark.
PREDICTED_WITHIN, REPLAYED_WITHIN = 0.1, 0.05
PACE_WITHIN = 0.1  # share by which baselines of runs may differ without being listed
# Settings of eval.run that change how a speedup is measured, not what it may be compared with.
WAYS = (
    *("max_prompts", "samples", "repeats", "stop_at_eos", "stop_strings"),
    *("sweep", "sweep_prompts", "num_draft_tokens", "max_draft_tokens"),
)
# Columns of words, which are aligned left.
WORDS = {"drafter", "setting", "output", "clock", "worst prompt", "slower categories", "category"}
WORDS |= {"best other", "best rival", "length set by", "differs", "effect", "values by run"}
WORDS |= {"engine", "acceptance", "by depth", "ours by depth"}
WORDS |= {"run", "measured", "hardware", "versions", "code", "command"}
# Columns of speedups with intervals, which are not broken at spaces.
UNBROKEN = {"speedup [95 %]", "over the best", "gain [95 %]", OURS, *ENGINES}
# Columns that narrow terminals keep.
KEY = {"drafter", "speedup [95 %]", "gamma", "alpha", "tau", "c", "V"}
KEY_OF_COMPARISON = KEY - {"tau", "V"} | {"layers", "over the best", "front"}
# Columns of the two tables of a panel.
OUTCOME = (
    *("drafter", "layers", "parameters", "speedup [95 %]", "not looping", "over the best"),
    *("best other", "shared prompts", "front", "tokens/s", "alone", "output"),
)
ACCEPTANCE_AND_COSTS = (
    *("drafter", "gamma", "drafted", "alpha", "tau", "c", "V"),
    *("t_draft", "bytes/step", "trained on", "overhead", "predicted"),
)
BASELINE = {"drafter": "none (autoregressive)"}


@dataclass(frozen=True)
class Table:
    """Table of strings, with a mark for each row: `baseline`, `bad` or empty."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    marks: list[str]
    key: frozenset[str] = frozenset()  # columns for narrow terminals; empty: all


def make_table(
    title: str,
    rows: Sequence[Mapping[str, str]],
    marks: Sequence[str] = (),
    key: Sequence[str] | set[str] = (),
) -> Table:
    """Make a table from mappings of column to text; omit a `setting` that all rows share."""
    columns = max((list(row) for row in rows), key=len, default=[])
    if len({row.get("setting") for row in rows}) == 1:
        columns = [name for name in columns if name != "setting"]
    cells = [[row.get(name, "") for name in columns] for row in rows]
    return Table(title, columns, cells, list(marks) or [""] * len(rows), frozenset(key))


def by_condition(rows: Sequence[Row]) -> dict[str, list[Row]]:
    labels = dict.fromkeys(row.condition_label for row in rows)
    return {label: [row for row in rows if row.condition_label == label] for label in labels}


# ------------------------------------------------------------------------------------ an evaluation
def result_cells(row: Row) -> dict[str, str]:
    verifies = row.schedule != ALONE
    virtual = " virtual" if row.schedule in VIRTUAL else ""
    return {
        "drafter": text.drafter_label(row),
        "speedup [95 %]": with_interval(row.speedup, row.speedup_low, row.speedup_high),
        "not looping": f"{times(row.headline_speedup)} ({row.headline_prompts})",
        "tokens/s": number(row.tokens_per_second, 1) + virtual,
        "gamma": text.gamma_label(row),
        "drafted": number(row.drafted, 1) if row.num_draft_tokens else NONE,
        "alpha": number(row.alpha),
        "tau": number(row.tau),
        "c": number(row.cost_ratio, 3),
        "V": number(row.target_ms_per_round / row.t_target_ms[1]) if verifies else NONE,
        "overhead": percent(row.overhead),
        "predicted": text.predicted(row.predicted_speedup, row),
        "output": row.lossless,
    }


def result_tables(rows: Sequence[Row]) -> list[Table]:
    """Return one table for each condition: the baseline, then the drafters."""
    tables = []
    for label, group in by_condition(rows).items():
        pace = number(group[0].baseline_tokens_per_second, 1)
        baseline = {**BASELINE, "speedup [95 %]": "1.00x", "tokens/s": pace, "tau": "1.00"}
        marks = ["baseline", *[""] * len(group)]
        cells = [baseline, *map(result_cells, group)]
        tables.append(make_table(label[0].upper() + label[1:], cells, marks, KEY))
    return tables


def _place(name: str, row: Row) -> dict[str, str]:
    return {"drafter": name, "setting": row.condition_label, "gamma": text.gamma_label(row)}


def losses_table(named: Sequence[tuple[str, Row]]) -> Table:
    """Return a table of the prompts and categories on which each drafter loses to the baseline."""
    cells = [
        {
            **_place(name, row),
            "slower prompts": f"{row.slower_prompts} of {row.prompts}",
            "worst prompt": row.worst_prompt,
            "speedup there": times(row.worst_speedup),
            "slower categories": ", ".join(c.category for c in row.categories if c.loses) or "none",
            "speedup with prefill": times(row.speedup_with_prefill),
        }
        for name, row in named
    ]
    key = {"drafter", "setting", "slower prompts", "worst prompt", "speedup there"}
    return make_table("Where each drafter loses", cells, (), key)


def off_by(predicted: float | None, row: Row, within: float) -> bool:
    """Return whether a prediction differs from the row's speedup by more than `within` of it."""
    return predicted is not None and abs(predicted / row.speedup - 1) > within


def predictions_table(named: Sequence[tuple[str, Row]]) -> Table:
    """Return a table of predicted and replayed speedups next to the measured ones."""
    overlapped = any(row.schedule in SCHEDULES for _, row in named)
    cells, marks = [], []
    for name, row in named:
        best = str(row.best_gamma) if row.helps else "none"
        reliable = None if row.unreliable else row.predicted_speedup
        there = text.predicted(row.best_gamma_speedup, row)
        cells.append(
            {
                **_place(name, row),
                "length set by": RULES[row.length_rule],
                "speedup": times(row.speedup),
                "predicted": text.predicted(row.predicted_speedup, row),
                "predicted / measured": _ratio(reliable, row),
                "best gamma": best if row.num_draft_tokens and not row.unreliable else NONE,
                "predicted there": there if row.num_draft_tokens else NONE,
            }
        )
        if overlapped:
            clock = "virtual" if row.schedule in VIRTUAL else "two workers"
            cells[-1] |= {
                "clock": clock if row.schedule in SCHEDULES else NONE,
                "lanes hidden": percent(row.overlap),
                "replay": times(row.replayed_speedup),
                "replay / measured": _ratio(row.replayed_speedup, row),
            }
        predicted_off = off_by(reliable, row, PREDICTED_WITHIN) or bool(row.unreliable)
        replay_off = off_by(row.replayed_speedup, row, REPLAYED_WITHIN)
        marks.append("bad" if predicted_off or replay_off else "")
    key = {"drafter", "setting", "gamma", "speedup", "predicted", "replay"}
    return make_table("Predicted and measured speedup", cells, marks, key)


def _ratio(predicted: float | None, row: Row) -> str:
    return number(None if predicted is None else predicted / row.speedup)


def budgets_table(rows: Sequence[Row]) -> Table:
    """Return a table of the mean round's bytes and operations, and their shares of the limits."""
    cells, marks = [], []
    for label, group in by_condition(rows).items():
        cells.append({**BASELINE, "setting": label, **budget_cells(group[0].baseline_budget)})
        for row in group:
            budget = budget_cells(row.budget, row.schedule in VIRTUAL)
            cells.append({"drafter": text.drafter_label(row), "setting": label, **budget})
        marks += ["baseline", *[""] * len(group)]
    return make_table("What a round must read and compute", cells, marks)


def budget_cells(budget: RoundBudget | None, virtual: bool = False) -> dict[str, str]:
    if budget is None:
        return dict.fromkeys(("MB read", "of bandwidth", "MFLOP", "of arithmetic"), "not known")

    def share(value: float | None) -> str:
        if value is None:
            return "virtual clock" if virtual else "not measured"
        return percent(value, 1) + (f" ({SLOW_YARDSTICK})" if value > 1 else "")

    return {
        "MB read": f"{budget.megabytes:.1f}",
        "of bandwidth": share(budget.bandwidth_share),
        "MFLOP": f"{budget.megaflop:.1f}",
        "of arithmetic": share(budget.operations_share),
    }


def limits_note(row: Row) -> str:
    """Return the caption of the budgets table, with the machine's limits that it compares to."""
    reading, computing = row.reading_gigabytes_per_second, row.product_gigaflop_per_second
    limits = f"the machine's limits were not measured ({NO_LIMITS})."
    if reading is not None and computing is not None:
        limits = (
            f"shares of plain reading ({reading:.1f} GB/s) and of a plain product "
            f"({computing:.0f} GFLOP/s), both measured before the run."
        )
    return f"Least weights, keys and values that a mean round of both models needs; {limits}"


def pairs_table(rows: Sequence[Row], records: Sequence[Record]) -> Table:
    """Return a table of each drafter's tokens/s over its best rival's, paired by prompt."""
    cells = [
        {
            "drafter": text.drafter_name(pair.row),
            "best rival": text.drafter_name(pair.rival),
            "setting": label,
            "tokens/s over it [95 %]": with_interval(*dataclasses.astuple(pair.ratio)),
        }
        for label, group in by_condition(rows).items()
        for pair in paired_comparisons(group, records)
    ]
    return make_table("", cells)


def categories_table(rows: Sequence[Row]) -> Table:
    """Return a table by prompt category; a category whose interval lies below 1 is marked."""
    parts = [(row, c) for row in rows if len(row.categories) > 1 for c in row.categories]
    cells = [
        {
            "drafter": text.drafter_name(row),
            "setting": row.condition_label,
            "category": part.category,
            "prompts": str(part.prompts),
            "alpha": number(part.alpha),
            "tau": number(part.tau),
            "speedup [95 %]": with_interval(part.speedup, part.speedup_low, part.speedup_high),
        }
        for row, part in parts
    ]
    return make_table("", cells, ["bad" if part.loses else "" for _, part in parts])


# ------------------------------------------------------------------------------------- a comparison
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
        make_table(title, [{n: row[n] for n in names} for row in rows], (), KEY_OF_COMPARISON)
        for names in (OUTCOME, ACCEPTANCE_AND_COSTS)
    ]


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


# ----------------------------------------------------------------------------------- the terminal
def print_evaluation(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the tables of a run: results, losses, predictions and budgets, then the legend."""
    shown, first = main_rows(rows), rows[0]
    named = [(text.drafter_name(row), row) for row in shown]
    threads = text.count_label(first.threads, "thread")
    results = []
    for label, table in zip(by_condition(shown), result_tables(shown), strict=True):
        title = f"{first.target} on benchmark {first.benchmark}: {label}"
        title += f", {text.prompts_label(shown[0])}, {first.dtype}, {threads}"
        results.append(dataclasses.replace(table, title=title))
    tables = [*results, losses_table(named), predictions_table(named), budgets_table(shown)]
    notes = [*text.doubts(named), *text.calibrated_elsewhere(named), limits_note(shown[0])]
    print_tables(tables, text.warnings(shown), notes, text.LEGEND, console)


def print_comparison(
    panels: Sequence[Panel],
    evaluations: Sequence[Evaluation],
    console: Console | None = None,
    of_engines: Sequence[Table] = (),
    engine_warnings: Sequence[str] = (),
) -> None:
    """Print a table of results and one of losses for each panel, then how the runs differ.

    of_engines: tables of engines, which come last. engine_warnings: warnings of these.
    """
    tables = []
    for panel in panels:
        title = f"{panel.setting.target} on benchmark {panel.workload.benchmark}: {panel.label}"
        tables += [*panel_tables(panel, title), panel_losses(panel)]
    tables += [differences_table(panels, evaluations), *of_engines]
    notes = comparison_notes(evaluations)
    warnings = [*comparison_warnings(evaluations), *engine_warnings]
    legend = text.COMPARISON_LEGEND | (text.ENGINES_COMPARED_LEGEND if of_engines else {})
    print_tables(tables, warnings, notes, legend, console)


def comparison_notes(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the notes of all evaluations, each after the label of its run."""
    notes = [note for one in evaluations for note in one.notes]
    for one in evaluations:
        named = [(text.drafter_name(row), row) for row in one.rows]
        notes += [f"{one.label}: {note}" for note in text.calibrated_elsewhere(named)]
    return notes


def comparison_warnings(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the warnings of all evaluations, each after the label of its run."""
    return [f"{one.label}: {warning}" for one in evaluations for warning in text.warnings(one.rows)]


def print_tables(
    tables: Sequence[Table],
    warnings: Sequence[str],
    notes: Sequence[str],
    legend: Mapping[str, str],
    console: Console | None,
) -> None:
    """Print warnings, tables that have rows, notes and legend, in plain ASCII without a terminal.

    console: None for a new one on standard output.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH

    def show(*parts: tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=not console.is_terminal)

    for warning in warnings:
        show((warning, "bold red"))
    for table in tables:
        if table.rows:
            console.print()
            console.print(_rich_table(table, console))
    for note in notes:
        show((note, "bold"))
    console.print()
    for word, meaning in legend.items():
        show((f"{word:>14}  ", "bold"), (meaning, "dim"))


def _rich_table(table: Table, console: Console) -> RichTable:
    shown = RichTable(
        title=table.title,
        box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    everything = console.width >= WIDE or not table.key
    kept = [i for i, name in enumerate(table.columns) if everything or name in table.key]
    for name in (table.columns[index] for index in kept):
        words, fixed = name in WORDS, name in UNBROKEN
        shown.add_column(name, justify="left" if words else "right", no_wrap=fixed, overflow="fold")
    styles = {"": "", "baseline": "dim", "bad": "yellow"}
    for cells, mark in zip(table.rows, table.marks, strict=True):
        # brackets are text here, not markup
        shown.add_row(*(escape(cells[index]) for index in kept), style=styles[mark])
    return shown
