"""Layout of a table in a terminal: the columns that fit, and their widths in characters."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from eval.report.tables import SETTING, WORDS, Table

GAP = 2  # characters between columns
FOLDED = 32  # characters to which texts are folded before a column is left out
NARROWEST = 10  # characters to which texts are folded otherwise
HARD_SPACE = "\N{NO-BREAK SPACE}"
GLUED = ("[95 %]", "/ measured")  # parts of headings that stay in one line


@dataclass(frozen=True)
class Layout:
    """Columns of a table that fit into a width."""

    title: str  # of one line or two
    columns: list[str]
    heads: list[str]  # of the columns, with line breaks
    widths: list[int]  # of the columns, in characters
    left_out: list[str]  # columns

    @property
    def width(self) -> int:
        return sum(self.widths) + GAP * (len(self.widths) - 1)


def fit(table: Table, width: int) -> Layout:
    """Return the layout of a table in `width` characters.

    Where the table is wider, headings take several lines. If that is not enough, texts are folded,
    and the columns in `table.spare` go, the first one first: words that all rows share into
    the title, before other columns are left out. Settings are no column, as rows are grouped by
    them.
    """
    columns = [name for name in table.columns if name != SETTING]
    cells = {name: table.column(name) for name in columns}
    widest = {name: max(map(_width, cells[name]), default=0) for name in columns}
    heads = {name: name for name in columns}
    full = _widths(heads, widest)
    if _total(full) > width:
        heads = {name: _broken(name, widest[name]) for name in columns}
        full = _widths(heads, widest)
    folds = {name for name in columns if name in WORDS or full[name] > FOLDED}
    least = {name: min(full[name], FOLDED) if name in folds else full[name] for name in columns}

    spare = [name for name in table.spare if name in columns]
    shared = {name: _shared_text(cells[name]) if name in WORDS else None for name in spare}
    in_title, left_out = list[str](), list[str]()
    for name in sorted(shared, key=lambda name: shared[name] is None):
        if _total(least) <= width:
            break
        del least[name]
        if shared[name] is None:
            left_out.append(name)
        else:
            in_title.append(f"{name}: {shared[name]}")
    kept = list(least)
    widths = _fold({name: full[name] for name in kept}, folds, width)
    title = _title(table, in_title, width)
    return Layout(title, kept, [heads[name] for name in kept], widths, left_out)


def _title(table: Table, shared: Sequence[str], width: int) -> str:
    """Return a table's title and details with what all rows share, in two lines if one is too long.

    The first line is then the title alone. It may be wider than `width`, and so may the other one.
    """
    more = "; ".join(filter(None, (table.details, *shared)))
    line = f"{table.title}{', ' if table.details else '; '}{more}" if more else table.title
    return line if cell_len(line) <= width or not more else f"{table.title}\n{more}"


def _width(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _widths(heads: Mapping[str, str], widest: Mapping[str, int]) -> dict[str, int]:
    return {name: max(widest[name], _width(head)) for name, head in heads.items()}


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _broken(head: str, width: int) -> str:
    """Return a heading in lines of at most `width` characters, or of its longest word."""
    for part in GLUED:
        head = head.replace(part, part.replace(" ", HARD_SPACE))
    longest = max(map(len, head.split(" ")))
    lines = textwrap.wrap(head, max(width, longest), break_long_words=False)
    return "\n".join(lines).replace(HARD_SPACE, " ")


def _shared_text(cells: Sequence[str]) -> str | None:
    """Return the text of all cells that have one, if there are several such cells; else None."""
    texts = [cell for cell in cells if cell]
    return texts[0] if len(texts) > 1 and len(set(texts)) == 1 else None


def _fold(full: Mapping[str, int], folds: set[str], width: int) -> list[int]:
    """Return the widths of columns where those in `folds` share what the others leave."""
    widths = dict(full)
    texts = sorted((name for name in full if name in folds), key=lambda name: full[name])
    room = width - _total(full) + sum(full[name] for name in texts)
    for number, name in enumerate(texts):
        share = max(NARROWEST, room // (len(texts) - number))
        widths[name] = min(full[name], share)
        room -= widths[name]
    return list(widths.values())
