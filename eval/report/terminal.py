"""Reports on the terminal: warnings, tables, notes and the legend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from eval.report import text
from eval.report.comparison_tables import (
    comparison_notes,
    comparison_warnings,
    differences_table,
    panel_losses,
    panel_tables,
)
from eval.report.evaluation_tables import (
    budgets_table,
    by_condition,
    limits_note,
    losses_table,
    predictions_table,
    result_tables,
)
from eval.report.tables import UNBROKEN, WORDS, Table
from eval.statistics.comparison.evaluations import Evaluation
from eval.statistics.comparison.panels import Panel
from eval.statistics.schema import Row, main_rows

PLAIN_WIDTH = 200  # characters of a line where there is no terminal
WIDE = 140  # narrower terminals show the key columns alone


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
