"""The comparison for a terminal: a table a condition, who is best, where each loses; plain text
where the output is no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from eval.report.compare.comparison import Panel
from eval.report.compare.evaluations import Evaluation
from eval.report.compare.words import (
    best_sentence,
    busy,
    cautions,
    cells,
    kept_apart,
    losses,
    terms,
)

PLAIN_WIDTH = 220  # characters where there is no terminal to ask
WIDE = 210  # terminals below this get the columns of NARROW
NARROW = ["drafter", "layers", "gamma", "alpha", "c", "speedup [95 %]", "over the best", "front"]


def print_comparison(
    panels: Sequence[Panel], evaluations: Sequence[Evaluation], console: Console | None = None
) -> None:
    """Print all of it."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for sentence in busy(evaluations):
        console.print(Text(sentence, style="bold red"), soft_wrap=not console.is_terminal)
    for panel in panels:
        console.print()
        console.print(_table(panel, console))
        for sentence in (*terms(panel), *losses(panel)):
            console.print(Text(sentence, style="dim"), soft_wrap=not console.is_terminal)
    console.print()
    for panel in panels:
        console.print(Text(best_sentence(panel), style="bold"), soft_wrap=not console.is_terminal)
    for sentence in [*kept_apart(panels), *cautions(panels, evaluations)]:
        console.print(Text(sentence, style="yellow"), soft_wrap=not console.is_terminal)


def _table(panel: Panel, console: Console) -> Table:
    title = f"{panel.setting.target} on benchmark {panel.workload.benchmark}: {panel.label}"
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    rows = [cells(standing) for standing in panel.standings]
    names = list(rows[0]) if console.width >= WIDE else NARROW
    for name in names:
        table.add_column(
            name,
            justify="left" if name in ("drafter", "output") else "right",
            no_wrap=name in ("speedup [95 %]", "over the best"),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(escape(row[name]) for name in names))  # brackets are words here, no markup
    return table
