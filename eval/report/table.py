"""The table at the end of a run, for a terminal; plain text where the output is no terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from eval.report.words import (
    DEFINITIONS,
    baseline_budget_cells,
    baseline_cells,
    budget_cells,
    cells,
    condition_label,
    disturbance,
    limits_line,
    main_rows,
    prompts,
    threads,
    verdict_line,
    warnings,
)
from eval.statistics.schema import Row

PLAIN_WIDTH = 160  # characters where there is no terminal to ask
WIDE = 140  # terminals below this get the columns of NARROW
# acceptance never without cost
NARROW = ["drafter", "speedup [95 %]", "gamma", "alpha", "tau", "c", "V"]


def print_table(rows: list[Row], console: Console | None = None) -> None:
    """Print what to be wary of, one table a condition, both budgets of the rows, the words, and a
    verdict for every row.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    shown = main_rows(rows)
    for warning in warnings(shown):
        console.print(Text(warning, style="bold red"), soft_wrap=not console.is_terminal)
    for label in dict.fromkeys(condition_label(row) for row in shown):
        console.print()
        console.print(
            _table([row for row in shown if condition_label(row) == label], label, console)
        )
    console.print()
    console.print(
        Text(f"{limits_line(shown[0])}.", style="bold"), soft_wrap=not console.is_terminal
    )
    console.print(_budgets(shown, console))
    console.print()
    for word, meaning in DEFINITIONS.items():
        if word != "distinct-4":
            console.print(
                Text.assemble((f"{word:>11}  ", "bold"), (meaning, "dim")),
                soft_wrap=not console.is_terminal,
            )
    console.print()
    for row in shown:
        which, measured, predicted = verdict_line(row)
        clear = "green" if (row.speedup_low or 0) > 1 and not disturbance(shown) else "yellow"
        text = Text.assemble((f"{which}: ", "bold"), (measured, clear), (f" {predicted}", "dim"))
        console.print(text, soft_wrap=not console.is_terminal)


def _budgets(shown: list[Row], console: Console) -> Table:
    """One compact table for all conditions."""
    box_style = box.SIMPLE_HEAD if console.is_terminal else box.ASCII
    table = Table(box=box_style, pad_edge=False)
    for name in budget_cells(shown[0]):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for label in dict.fromkeys(condition_label(row) for row in shown):
        here = [row for row in shown if condition_label(row) == label]
        table.add_section()
        table.add_row(Text(label, style="dim"))
        for texts in (baseline_budget_cells(here[0]), *map(budget_cells, here)):
            table.add_row(*map(escape, texts.values()))
    return table


def _table(rows: list[Row], label: str, console: Console) -> Table:
    first = rows[0]
    title = (
        f"{first.target} on benchmark {first.benchmark}: {label}, {prompts(first)}, "
        f"{first.dtype}, {threads(first)}"
    )
    box_style = box.SIMPLE_HEAD if console.is_terminal else box.ASCII
    table = Table(
        title=title, box=box_style, title_justify="left", title_style="bold", pad_edge=False
    )
    names = list(cells(first)) if console.width >= WIDE else NARROW
    for name in names:
        left = name in ("drafter", "output")
        table.add_column(
            name, justify="left" if left else "right", no_wrap=name == "speedup [95 %]"
        )
    baseline = baseline_cells(first)
    table.add_row(*(baseline.get(name, "") for name in names))
    for row in rows:
        texts = cells(row)
        # brackets are words here, no markup
        table.add_row(*(escape(texts[name]) for name in names))
    return table
