"""The doctor's page, on the terminal and as doctor.html."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from eval.doctor.config import DoctorConfig, drafter_name
from eval.doctor.diagnosis import Diagnosis, Part
from eval.doctor.estimates import LEAST_LOSS
from eval.doctor.findings import FINE, UNKNOWN, Finding
from eval.report.page import PAGES
from eval.report.tables import Table, make_table
from eval.report.terminal import PLAIN_WIDTH

GROUPS = {"depth": "by depth", "category": "by category", "token": "by class of token"}
NAMES = {"depth": "draft depth", "category": "category", "token": "class of token"}
NO_FAULT = "no fault found"


def headline(found: Diagnosis) -> str:
    """Return the first cause, or that there is none, in one line."""
    causes = found.causes
    if not causes:
        return f"{NO_FAULT}: acceptance {found.acceptance}"
    first = causes[0]
    return f"first cause: {first.cause}, {loss_in_words(first)}"


def loss_in_words(one: Finding) -> str:
    """Return what a fault costs."""
    if one.loss is None:
        return "whose loss shows only after another training"
    return f"which loses {one.loss} of acceptance ({one.measured})"


def parts_tables(found: Diagnosis) -> list[Table]:
    """Return a table of the acceptance of each group."""
    tables = []
    for group, title in GROUPS.items():
        parts = [one for one in found.parts if one.group == group]
        tables.append(make_table(f"acceptance {title}", [_row(group, one) for one in parts]))
    return [table for table in tables if table.rows]


def _row(group: str, one: Part) -> dict[str, str]:
    return {NAMES[group]: one.name, "share of tests": f"{one.share:.0%}", "accepted": str(one.rate)}


def subject_line(found: Diagnosis, config: DoctorConfig) -> str:
    """Return what was examined, in one line."""
    how = f"temperature {config.temperature:g}" if config.temperature else "greedy"
    return (
        f"{drafter_name(config)} on {config.target.path}: acceptance {found.acceptance}, "
        f"tau {found.tau:.2f}, {how}, {config.num_draft_tokens} drafted tokens, "
        f"{found.prompts} prompts, {found.tests:,} tests"
    )


def print_diagnosis(found: Diagnosis, config: DoctorConfig, console: Console | None = None) -> None:
    """Print the causes, the acceptance in parts, and what was checked, in one compact page."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    causes = found.causes
    console.print(Text(subject_line(found, config)))
    for warning in found.warnings:
        console.print(Text(f"warning: {warning}", "bold yellow"))
    console.print(Text(headline(found), "bold red" if causes else "bold green"))
    for number, one in enumerate(causes, 1):
        console.print(Text(f"{number}. {one.cause}", "bold"))
        for line in _lines(one):
            console.print(Text(f"   {line}"))
    for line in _columns(parts_tables(found), console.width):
        console.print(Text(line))
    checked = [one for one in found.findings if not one.is_fault]
    for state, title in ((FINE, "checked, no fault"), (UNKNOWN, "not checked")):
        some = [one for one in checked if one.state == state]
        if some:
            console.print(Text(title, "bold"))
        for one in some:
            words = one.expected
            if state == FINE:
                words = f"{one.found} (expected {one.expected}){_doubt(one)}"
            console.print(Text(f"   {one.cause:<12} {words}", "dim"))
    console.print(Text(found.bound))


def _doubt(one: Finding) -> str:
    """Return a note on a loss that more prompts may confirm; empty if there is none."""
    if one.loss is None or one.loss.value < LEAST_LOSS:
        return ""
    return f"; a loss of {one.loss}, not beyond doubt: raise max_prompts"


def _lines(one: Finding) -> Iterator[str]:
    yield f"found     {one.found}"
    yield f"expected  {one.expected}"
    yield f"costs     {f'{one.loss} of acceptance, {one.measured}' if one.loss else 'unknown'}"
    yield f"remedy    {one.remedy}"


def _columns(tables: list[Table], width: int) -> list[str]:
    """Return the lines of tables beside each other, as many as fit, the others below."""
    blocks = [_block(table) for table in tables]
    lines: list[str] = []
    while blocks:
        row, used = [blocks.pop(0)], 0
        used = len(row[0][0])
        while blocks and used + 4 + len(blocks[0][0]) <= width:
            used += 4 + len(blocks[0][0])
            row.append(blocks.pop(0))
        height = max(map(len, row))
        filled = [block + [" " * len(block[0])] * (height - len(block)) for block in row]
        lines += ["    ".join(parts).rstrip() for parts in zip(*filled, strict=True)]
    return lines


def _block(table: Table) -> list[str]:
    """Return the lines of one table, of equal length."""
    rows = [[table.title.removeprefix("acceptance "), *table.columns[1:]], *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(size) if column else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _title(found: Diagnosis) -> str:
    causes = found.causes
    return f"Doctor: first cause {causes[0].cause}" if causes else f"Doctor: {NO_FAULT}"


def doctor_page(found: Diagnosis, config: DoctorConfig, command: str) -> str:
    """Return the content of doctor.html."""
    values: dict[str, Any] = {
        "title": _title(found),
        "warnings": found.warnings,
        "cards": [],
        "subject": subject_line(found, config),
        "causes": [(one, [line.split(maxsplit=1) for line in _lines(one)]) for one in found.causes],
        "tables": parts_tables(found),
        "checked": [(one, _doubt(one)) for one in found.findings if not one.is_fault],
        "bound": found.bound,
        "command": command,
    }
    return (
        PAGES.get_template("doctor.html.j2").render(values).replace(" +- ", " \N{PLUS-MINUS SIGN} ")
    )
