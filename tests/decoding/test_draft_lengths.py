"""Tables of draft lengths by the number of rows."""

from typing import Any

import pytest

from decoding.errors import UserError
from decoding.sessions.draft_lengths import check_ranges, length_at, ranges_of


def test_a_table_holds_each_length_up_to_the_next_number_of_rows() -> None:
    table = ranges_of({1: 4, 2: 4, 4: 2, 8: 0}, 16)
    assert table == [[1, 3, 4], [4, 7, 2], [8, 16, 0]]
    check_ranges(table, 4, "coupled")
    found = [length_at(table, rows, 9) for rows in (1, 3, 4, 7, 8, 16, 17)]
    assert found == [4, 4, 2, 2, 0, 0, 0]
    assert length_at([], 5, 9) == 9


WRONG: list[tuple[list[Any], str]] = [
    ([[2, 3, 1]], r"\[0\] is \[2, 3, 1\], expected \[1, last, tokens\]"),
    ([[1, 2, 1], [4, 5, 0]], r"\[1\] is \[4, 5, 0\], expected \[3, last, tokens\]"),
    ([[1, 0, 1]], "expected"),
    ([[1, 8, 5]], "0 to 4 tokens"),
    ([[1, 8]], "expected"),
    (["all"], "is 'all'"),
    ([7], "is 7"),
    ([[1, 2.0, 1]], "expected"),
]


@pytest.mark.parametrize(("table", "words"), WRONG)
def test_a_wrong_table_is_named(table: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_ranges(table, 4, "coupled")


def test_rules_whose_texts_depend_on_drafts_take_no_table() -> None:
    check_ranges([], 4, "token")
    with pytest.raises(UserError, match="needs verify=coupled, found token"):
        check_ranges([[1, 8, 4]], 4, "token")
