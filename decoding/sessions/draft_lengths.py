"""Draft lengths by the number of running rows: with more rows a target has less spare compute.

A table is a list of [first, last, tokens]: the most tokens that a round drafts for each of `first`
to `last` rows. vLLM's `num_speculative_tokens_per_batch_size` has the same form.
"""

from collections.abc import Mapping, Sequence

from decoding.errors import UserError
from decoding.sampling.rule_names import split_rule
from decoding.values import is_int, quote

KEY = "num_draft_tokens_by_batch"
Range = Sequence[int]


def check_ranges(ranges: Sequence[Range], most: int, verify: str) -> None:
    """Raise UserError unless these ranges follow each other from 1 row on.

    most: the longest draft, `num_draft_tokens`. verify: the rule, under which texts must not depend
    on drafts, since they would depend on the other rows.
    """
    if ranges and split_rule(verify)[0] != "coupled":
        raise UserError(
            f"{KEY} needs verify=coupled, found {verify}: a text would depend on the rows beside "
            f"it. Set verify=coupled, or remove {KEY}."
        )
    begin = 1
    for place, found in enumerate(ranges):
        is_range = isinstance(found, Sequence) and len(found) == 3 and all(map(is_int, found))
        if not is_range or found[0] != begin or found[1] < begin or not 0 <= found[2] <= most:
            raise UserError(
                f"{KEY}[{place}] is {quote(found)}, expected [{begin}, last, tokens] with "
                f"last >= {begin} rows and 0 to {most} tokens (num_draft_tokens)."
            )
        begin = found[1] + 1


def length_at(ranges: Sequence[Range], rows: int, otherwise: int) -> int:
    """Return the draft length for this many rows; beyond the last range, that of the last range.

    otherwise: the length if there are no ranges.
    """
    if not ranges:
        return otherwise
    return next((tokens for _, last, tokens in ranges if rows <= last), ranges[-1][2])


def ranges_of(length_of: Mapping[int, int], most_rows: int) -> list[list[int]]:
    """Return the table of lengths that were found for some numbers of rows, 1 among them.

    A length holds from its number of rows up to the next one, the last one up to `most_rows`.
    """
    ranges: list[list[int]] = []
    for rows, tokens in sorted(length_of.items()):
        if ranges and ranges[-1][2] == tokens:
            continue
        if ranges:
            ranges[-1][1] = rows - 1
        ranges.append([rows, most_rows, tokens])
    return ranges
