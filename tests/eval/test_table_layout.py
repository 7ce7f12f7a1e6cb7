"""Layout of tables in terminals of any width, and the legend of what they show."""

import dataclasses
import io
import itertools
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from eval.report.evaluation_tables import predictions_table, result_tables
from eval.report.layout import FOLDED, fit
from eval.report.page import evaluation_page
from eval.report.tables import Table, by_setting, make_table, used_words
from eval.report.terminal import print_evaluation, print_tables
from eval.report.text import LEGEND
from eval.statistics.schema import Row, main_rows
from tests.support.simulated_records import PROVENANCE

NAMES = ("a name", "a much longer name, which has more characters than a column of words needs")
SPARE = ("the least important one", "output", "one of two values", "beta")


def table() -> Table:
    """Return a table with one column to fold, four spare ones and two others."""
    rows = [
        {
            "drafter": name,
            "speedup [95 %]": "1.41x [1.35, 1.48]",
            "alpha": "0.50",
            "beta": f"{number}",
            "output": "equal",
            "one of two values": "12345678",
            "the least important one": f"{number} and more",
        }
        for number, name in enumerate(NAMES)
    ]
    rows[0]["one of two values"] = "87654321"
    return make_table("Title", rows, (), SPARE)


def printed(width: int | None, tables: Sequence[Table]) -> list[str]:
    """Return the lines that a terminal of this width shows, or a pipe."""
    file = io.StringIO()
    terminal = {"force_terminal": True, "width": width, "color_system": None} if width else {}
    print_tables(tables, [], [], {}, Console(file=file, **terminal))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", range(62, 200, 6))
def test_a_table_fits_and_every_column_is_shown_or_named(width: int) -> None:
    layout = fit(table(), width)
    assert layout.width <= width
    in_title = {name for name in SPARE if f"; {name}: " in layout.title}
    parts = [*layout.columns, *layout.left_out, *in_title]
    assert sorted(parts) == sorted(table().columns)
    lines = printed(width, [table()])
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for name in (*layout.left_out, *in_title):
        assert name in " ".join(text.split())
    for name in NAMES:
        assert name.split()[-1] in text


def test_the_least_important_columns_go_first() -> None:
    """Check that a wider terminal shows no column less, and the widest all of them, unfolded."""
    layouts = [fit(table(), width) for width in range(62, 260)]
    for narrow, wide in itertools.pairwise(layouts):
        assert set(narrow.columns) <= set(wide.columns)
        order = [SPARE.index(name) for name in narrow.left_out]
        assert order == sorted(order)
    full = layouts[-1]
    assert full.columns == full.heads == table().columns and full.title == "Title"
    assert full.widths[0] == len(NAMES[1]) > FOLDED
    assert layouts[0].columns == ["drafter", "speedup [95 %]", "alpha"]
    assert "output: equal" in layouts[0].title


def test_a_long_title_takes_a_second_line_for_what_its_rows_share() -> None:
    named = dataclasses.replace(table(), title="Title " * 8 + "end", details="9 prompts, 1 thread")
    layout = fit(named, 80)
    assert layout.title.split("\n") == [named.title, "9 prompts, 1 thread; output: equal"]
    assert [line.rstrip() for line in printed(80, [named])[1:3]] == layout.title.split("\n")
    short = fit(dataclasses.replace(named, title="Title"), 80)
    assert short.title == "Title, 9 prompts, 1 thread; output: equal", "control"


def test_texts_are_folded_before_any_column_goes() -> None:
    natural = fit(table(), 1000)
    folded = fit(table(), natural.width - 60)
    assert folded.columns == natural.columns and folded.widths[0] < natural.widths[0]
    headings = [head for head in folded.heads if "\n" in head]
    assert headings and not any("[95\n" in head for head in folded.heads)


def test_rows_are_grouped_by_setting() -> None:
    cells = [
        {"drafter": name, "setting": setting, "alpha": alpha}
        for setting, alphas in (("greedy", ("0.1", "0.2")), ("temperature 1", ("0.3", "0.4")))
        for name, alpha in zip(("one", "two"), alphas, strict=True)
    ]
    lines = [" ".join(line.split()) for line in printed(100, [make_table("Title", cells)])]
    start = lines.index("greedy")
    assert lines[start + 1 :][:5] == [
        *("one 0.1", "two 0.2"),
        *("temperature 1", "one 0.3", "two 0.4"),
    ]
    assert lines.count("drafter alpha") == 1


@pytest.mark.parametrize("width", [80, 100, 120, 240, None])
def test_an_evaluation_is_readable_in_any_width(rows: list[Row], width: int | None) -> None:
    """Check acceptance beside costs everywhere, and more from 120 on."""
    long = [dataclasses.replace(row, drafter=f"{row.drafter}+lookup") for row in rows]
    tables = result_tables(main_rows(long))
    lines = printed(width, tables)
    assert max(map(len, lines)) <= (width or 120)
    head = next(line for line in lines if line.startswith("drafter"))
    needed = ["drafter", "speedup", "alpha", "tau", "c"]
    if width is None or width >= 120:
        needed += ["looping", "tokens/s", "V"]
    assert set(needed) <= set(head.split()), head
    assert all(f"{row.alpha:.2f}" in "\n".join(lines) for row in main_rows(long))


def test_the_legend_has_only_words_that_are_used(
    rows: list[Row], records: list[object], html: str
) -> None:
    """Check the prediction from traces of overlapped schedules; the control has such a schedule."""
    assert set(used_words(LEGEND, result_tables(rows))) >= {"speedup", "c", "V", "distinct-4"}
    assert "from trace" not in html
    console = Console(file=io.StringIO())
    print_evaluation(rows, console)
    assert "from trace" not in console.file.getvalue()
    overlapped = [dataclasses.replace(row, schedule="pearl_virtual") for row in rows]
    named = [(row.drafter, row) for row in overlapped]
    assert "from trace" in used_words(LEGEND, [predictions_table(named)])
    page = evaluation_page(overlapped, records, PROVENANCE)
    assert re.search("<dt>from trace</dt>", page) and "one from a trace more than 5 % off," in page


def test_a_table_is_divided_by_setting_with_its_marks():
    cells = [
        {"drafter": name, "setting": setting, "alpha": f"{name} {setting}"}
        for name in ("one", "two")
        for setting in ("greedy", "hot")
    ]
    whole = make_table("Title", cells, ["bad", "", "", "bad"])
    greedy, hot = by_setting(whole)
    assert (greedy.title, hot.title) == ("Greedy", "Hot")
    assert greedy.columns == hot.columns == ["drafter", "alpha"]
    assert greedy.rows == [["one", "one greedy"], ["two", "two greedy"]]
    assert (greedy.marks, hot.marks) == (["bad", ""], ["", "bad"])
    [alone] = by_setting(make_table("Title", cells[::2]))
    assert alone.title == "" and alone.rows == greedy.rows, "control: one setting has no column"
    assert by_setting(make_table("Title", [])) == [make_table("", [])]


@pytest.mark.parametrize("title", ["Where each drafter loses", "By category"])
def test_settings_head_tables_and_take_no_column(html, title):
    section = html.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
    assert "<h3>Greedy</h3>" in section and "<h3>Temperature 1" in section
    assert ">setting</th>" not in section and ">drafter</th>" in section
