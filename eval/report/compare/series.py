"""Which points of a comparison are joined: drafters of one series, meant to differ in
depth alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from eval.report.compare.entries import Entry

EQUAL_WITHIN = 0.03  # numbers that differ by less are one: bytes a step, tokens seen


def with_series(
    entries: Sequence[Entry], labels: Mapping[str, str], group_by: Sequence[str]
) -> list[Entry]:
    """The entries with their series: the label given for the drafter, its run or its folder, else
    their values of `group_by`.

    A drafter without a model is in no series, unless a label names it. Raises UserError for a label
    that names nothing, and for a field that no drafter has.
    """
    _check_labels(entries, labels)
    values = {field: [_value(entry, field) for entry in entries] for field in group_by}
    for field, found in values.items():
        if not any(found):  # a drafter without a model costs 0 of some
            known = _fields(entries)
            raise UserError(
                f"group_by: '{field}' is known of none of these drafters; "
                + (
                    f"expected one of {', '.join(known)}"
                    if known
                    else "their folders had no drafter_card.json and no shape. Leave group_by out, "
                    "or name series by labels="
                )
            )
    grouped = {field: rounded(found) for field, found in values.items()}
    made = []
    for index, entry in enumerate(entries):
        mine = {field: found[index] for field, found in grouped.items()}
        series = (
            ""
            if None in mine.values() or not entry.row.drafter_parameters
            else ", ".join(map(_said, mine, mine.values()))
        )
        made.append(replace(entry, series=_label(entry, labels) or series))
    return made


def _check_labels(entries: Sequence[Entry], labels: Mapping[str, str]) -> None:
    for key in labels:
        if not any(_named(entry, key) for entry in entries):
            known = list(
                dict.fromkeys(
                    name for entry in entries for name in (entry.name, entry.run, entry.folder)
                )
            )
            raise UserError(
                f"labels: '{key}' is no drafter, run or run folder of this comparison; there are: "
                f"{', '.join(known)}"
            )


def _label(entry: Entry, labels: Mapping[str, str]) -> str:
    if entry.name in labels:
        return labels[entry.name]
    return next(
        (
            label
            for key, label in labels.items()
            if entry.row.drafter_parameters and _named(entry, key)
        ),
        "",
    )


def _named(entry: Entry, key: str) -> bool:
    return (
        key in (entry.name, entry.run)
        or Path(key).expanduser().resolve() == Path(entry.folder).resolve()
    )


def _value(entry: Entry, field: str) -> Any:
    """The entry's value of a field; None where it has none."""
    if field in ("bytes_per_step", "training_tokens"):
        return vars(entry)[field]
    value: Any = entry.card
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def rounded(values: Sequence[Any]) -> list[Any]:
    """The values, with numbers within EQUAL_WITHIN of a smaller one replaced by the smallest of
    them.
    """
    first: dict[Any, Any] = {}
    least: float | None = None
    for value in sorted({value for value in values if isinstance(value, int | float)}):
        if least is None or value > least * (1 + EQUAL_WITHIN):
            least = value
        first[value] = least
    return [first[value] if isinstance(value, int | float) else value for value in values]


def _said(field: str, value: Any) -> str:
    name = field.rpartition(".")[2].replace("_", " ")
    if isinstance(value, int | float) and value >= 1e5:
        return f"{name} {value / 1e6:.1f} M" if value >= 1e6 else f"{name} {value / 1e3:.0f} k"
    return f"{name} {value}"


def _fields(entries: Sequence[Entry]) -> list[str]:
    """What is known of at least one drafter: what the comparison works out, and dotted fields of
    cards.
    """
    found = [
        name
        for name in ("bytes_per_step", "training_tokens")
        if any(vars(entry)[name] for entry in entries)
    ]
    for entry in entries:
        for key, value in entry.card.items():
            if isinstance(value, dict) and key != "versions":
                found += [f"{key}.{name}" for name in value]
    return list(dict.fromkeys(found))
