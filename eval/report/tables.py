"""Form of the tables that the terminal and the page show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.engines.registry import ENGINES, OURS

# Columns of words, which are aligned left.
WORDS = {"drafter", "setting", "output", "clock", "worst prompt", "slower categories", "category"}
WORDS |= {"best other", "best rival", "length set by", "differs", "effect", "values by run"}
WORDS |= {"engine", "acceptance", "by depth", "ours by depth"}
WORDS |= {"run", "measured", "hardware", "versions", "code", "command"}
# Columns of speedups with intervals, which are not broken at spaces.
UNBROKEN = {"speedup [95 %]", "over the best", "gain [95 %]", OURS, *ENGINES}


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
