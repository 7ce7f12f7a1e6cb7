"""Reports on the terminal: warnings, tables, notes and the legend."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from eval.report import text
from eval.report.comparison_tables import (
    comparison_notes,
    comparison_warnings,
    differences_table,
    panel_losses,
    panel_tables,
    seeds_table,
)
from eval.report.evaluation_tables import (
    answers_table,
    budgets_table,
    by_condition,
    limits_note,
    losses_table,
    predictions_table,
    result_tables,
)
from eval.report.layout import GAP, Layout, fit
from eval.report.tables import SETTING, WORDS, Table, used_words
from eval.report.text import NONE
from eval.statistics.comparison.evaluations import Evaluation
from eval.statistics.comparison.panels import Panel
from eval.statistics.schema import Row, main_rows

PLAIN_WIDTH = 120  # characters of a line where there is no terminal
STYLES = {"": "", "baseline": "dim", "bad": "yellow"}  # of rows by their marks


def print_evaluation(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the tables of a run: results, losses, predictions and budgets, then the legend."""
    shown, first = main_rows(rows), rows[0]
    named = [(text.drafter_name(row), row) for row in shown]
    threads = text.count_label(first.threads, "thread")
    results = []
    for label, table in zip(by_condition(shown), result_tables(shown), strict=True):
        title = f"{first.target} on benchmark {first.benchmark}: {label}"
        details = f"{text.prompts_label(shown[0])}, {first.dtype}, {threads}"
        results.append(dataclasses.replace(table, title=title, details=details))
    tables = [*results, answers_table(named), losses_table(named), predictions_table(named)]
    tables.append(budgets_table(shown))
    notes = [*text.doubts(named), *text.calibrated_elsewhere(named)]
    notes += [*text.stopped_by_round(named), *text.shared_vocabularies(named)]
    notes.append(limits_note(shown[0]))
    print_tables(tables, text.warnings(shown), notes, text.LEGEND, console)


def print_comparison(
    panels: Sequence[Panel],
    evaluations: Sequence[Evaluation],
    console: Console | None = None,
    of_engines: Sequence[Table] = (),
    engine_warnings: Sequence[str] = (),
    engine_notes: Sequence[str] = (),
) -> None:
    """Print a table of results and one of losses for each panel, then how the runs differ.

    of_engines: tables of engines, which come last. engine_warnings, engine_notes: what is printed
    of these before and after the tables.
    """
    tables = []
    for panel in panels:
        title = f"{panel.setting.target} on benchmark {panel.workload.benchmark}: {panel.label}"
        tables += [seeds_table(panel, title), *panel_tables(panel, title), panel_losses(panel)]
    tables += [differences_table(panels, evaluations), *of_engines]
    notes = [*comparison_notes(evaluations), *engine_notes]
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

    legend: of which only words in the tables are printed. console: None for a new one on standard
    output.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for warning in warnings:
        _print_line(console, warning, "bold red")
    for table in tables:
        if table.rows:
            console.print()
            _print_table(console, table)
    console.print()
    for note in notes:
        _print_line(console, note, "bold")
    meanings = RichTable.grid(padding=(0, GAP, 0, 0))
    meanings.add_column(justify="right", no_wrap=True, style="bold")
    meanings.add_column(style="dim")
    for word, meaning in used_words(legend, tables).items():
        meanings.add_row(Text(word), Text(meaning))
    console.print(meanings)


def _print_line(console: Console, line: str, style: str) -> None:
    console.print(Text(line, style), soft_wrap=not console.is_terminal)


def _print_table(console: Console, table: Table) -> None:
    """Print a table's title, its headings, and its rows by setting."""
    layout, plain = fit(table, console.width), not console.is_terminal
    console.print(Text(layout.title, "bold"))
    headings = _rich_table(layout)
    headings.show_header = True
    console.print(headings)
    console.print(("-" if plain else "─") * min(layout.width, console.width))
    columns = [table.column(name) for name in layout.columns]
    rows = zip(table.column(SETTING), table.marks, zip(*columns, strict=True), strict=True)
    for setting, group in itertools.groupby(rows, key=lambda row: row[0]):
        if setting:
            console.print(Text(setting, "italic"))
        body = _rich_table(layout)
        for _, mark, cells in group:
            texts = (cell.replace(NONE, "-") if plain else cell for cell in cells)
            body.add_row(*map(Text, texts), style=STYLES[mark])
        console.print(body)
    if layout.left_out:
        names = ", ".join(layout.left_out)
        console.print(Text(f"left out to fit the terminal, but in the run's files: {names}", "dim"))


def _rich_table(layout: Layout) -> RichTable:
    """Return a table without rows in the columns of a layout."""
    table = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_header=False)
    for name, head, width in zip(layout.columns, layout.heads, layout.widths, strict=True):
        justify: Literal["left", "right"] = "left" if name in WORDS else "right"
        table.add_column(Text(head), justify=justify, width=width, overflow="fold")
    return table
