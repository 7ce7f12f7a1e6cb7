"""Form of the tables that the terminal and the page show, and their legend."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

SETTING = "setting"  # column of the condition or run that rows belong to
# Columns of words, which are aligned left.
WORDS = {"drafter", SETTING, "output", "clock", "worst prompt", "slower categories", "category"}
WORDS |= {"best other", "best rival", "length set by", "differs", "effect", "values by run"}
WORDS |= {"engine", "acceptance", "by depth", "ours by depth", "draft depth", "class of token"}
WORDS |= {"run", "measured", "hardware", "versions", "code", "command"}


@dataclass(frozen=True)
class Table:
    """Table of strings, with a mark for each row: `baseline`, `bad` or empty."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    marks: list[str]
    spare: tuple[str, ...] = ()  # columns that narrow terminals leave out, the first one first
    details: str = ""  # of the title, which take a line of their own where both are too long

    def column(self, name: str) -> list[str]:
        """Return the cells of a column; empty ones if the table does not have it."""
        if name not in self.columns:
            return [""] * len(self.rows)
        return [cells[self.columns.index(name)] for cells in self.rows]


def make_table(
    title: str,
    rows: Sequence[Mapping[str, str]],
    marks: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> Table:
    """Make a table from mappings of column to text; omit a `setting` that all rows share."""
    columns = max((list(row) for row in rows), key=len, default=[])
    if len({row.get(SETTING) for row in rows}) == 1:
        columns = [name for name in columns if name != SETTING]
    cells = [[row.get(name, "") for name in columns] for row in rows]
    return Table(title, columns, cells, list(marks) or [""] * len(rows), tuple(spare))


def by_setting(table: Table) -> list[Table]:
    """Return a table for each setting, titled with it; the table without title if it has none."""
    if SETTING not in table.columns:
        return [replace(table, title="")]
    at = table.columns.index(SETTING)
    columns = table.columns[:at] + table.columns[at + 1 :]
    return [
        Table(
            setting[0].upper() + setting[1:],
            columns,
            [cells[:at] + cells[at + 1 :] for cells in table.rows if cells[at] == setting],
            [
                mark
                for cells, mark in zip(table.rows, table.marks, strict=True)
                if cells[at] == setting
            ],
            table.spare,
        )
        for setting in dict.fromkeys(cells[at] for cells in table.rows)
    ]


def used_words(legend: Mapping[str, str], tables: Sequence[Table]) -> dict[str, str]:
    """Return the entries of a legend whose words occur in the tables, or in such an entry above."""
    rows = (
        row
        for table in tables
        for row in ([table.title, table.details], table.columns, *table.rows)
    )
    texts = [text for row in rows for text in row]
    used = {}
    for word, meaning in legend.items():
        edge = r"\b" if word.isidentifier() else ""
        if any(re.search(f"{edge}{re.escape(word)}{edge}", text) for text in texts):
            used[word] = meaning
            texts.append(meaning)
    return used
