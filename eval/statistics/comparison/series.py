"""Series of drafters in a comparison, which differ in depth alone and are joined in plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from eval.statistics.comparison.entries import Entry

EQUAL_WITHIN = 0.03  # values that differ by less count as equal
COMPUTED = ("bytes_per_step", "training_tokens")  # fields of an entry; others come from the card


def with_series(
    entries: Sequence[Entry], labels: Mapping[str, str], group_by: Sequence[str]
) -> list[Entry]:
    """Assign each entry to a series: by its label if it has one, else by its `group_by` values.

    A label's key is a drafter, a run or a run folder. A drafter without a model belongs to no
    series unless a label names it. Raises UserError for a label or a field that matches no entry.
    """
    _check_labels(entries, labels)
    grouped = {}
    for field in group_by:
        found = [_value(entry, field) for entry in entries]
        if not any(found):  # 0 is the value of drafters without a model
            raise UserError(_unknown_field(field, entries))
        grouped[field] = merge_close_values(found)
    made = []
    for index, entry in enumerate(entries):
        values = {field: found[index] for field, found in grouped.items()}
        in_series = entry.row.drafter_parameters and None not in values.values()
        series = ", ".join(map(_describe, values, values.values())) if in_series else ""
        made.append(replace(entry, series=_label(entry, labels) or series))
    return made


def _check_labels(entries: Sequence[Entry], labels: Mapping[str, str]) -> None:
    for key in labels:
        if not any(_matches(entry, key) for entry in entries):
            known = dict.fromkeys(x for e in entries for x in (e.name, e.run, e.folder))
            raise UserError(
                f"labels: '{key}' is not a drafter, run or run folder of this comparison. Expected "
                f"one of: {', '.join(known)}."
            )


def _label(entry: Entry, labels: Mapping[str, str]) -> str:
    if entry.name in labels or not entry.row.drafter_parameters:
        return labels.get(entry.name, "")
    return next((label for key, label in labels.items() if _matches(entry, key)), "")


def _matches(entry: Entry, key: str) -> bool:
    path = Path(key).expanduser().resolve()
    return key in (entry.name, entry.run) or path == Path(entry.folder).resolve()


def _value(entry: Entry, field: str) -> Any:
    """Return the entry's value of a field, None if it has none."""
    if field in COMPUTED:
        return vars(entry)[field]
    value: Any = entry.card
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def merge_close_values(values: Sequence[Any]) -> list[Any]:
    """Return the values, with each number replaced by the smallest one of its group.

    The numbers of a group exceed its smallest one by at most the share EQUAL_WITHIN.
    """
    first: dict[Any, Any] = {}
    least: float | None = None
    for value in sorted({value for value in values if isinstance(value, int | float)}):
        if least is None or value > least * (1 + EQUAL_WITHIN):
            least = value
        first[value] = least
    return [first[value] if isinstance(value, int | float) else value for value in values]


def _describe(field: str, value: Any) -> str:
    name = field.rpartition(".")[2].replace("_", " ")
    if isinstance(value, int | float) and value >= 1e5:
        return f"{name} {value / 1e6:.1f} M" if value >= 1e6 else f"{name} {value / 1e3:.0f} k"
    return f"{name} {value}"


def _unknown_field(field: str, entries: Sequence[Entry]) -> str:
    known = {name: None for name in COMPUTED if any(vars(entry)[name] for entry in entries)}
    for entry in entries:
        for key, value in entry.card.items():
            if isinstance(value, dict) and key != "versions":
                known.update(dict.fromkeys(f"{key}.{name}" for name in value))
    message = f"group_by: no drafter of this comparison has '{field}'"
    if known:
        return f"{message}; expected one of {', '.join(known)}."
    return (
        f"{message}; their folders had no drafter_card.json and no shape. Leave group_by out, or "
        f"name the series with labels=."
    )
