"""Tables of the engines in a run, for the terminal and for the page alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rich.console import Console

from eval.engines.agreement import DIFFERS
from eval.engines.rows import BIASED
from eval.measure.records import AUTOREGRESSIVE
from eval.report import text
from eval.report.tables import Table, make_table
from eval.report.terminal import print_tables
from eval.report.text import NONE, number, rates, with_interval
from eval.statistics import lossless
from eval.statistics.engine_row import EngineRow
from serving.engines.heads import describe_misreading
from serving.engines.registry import OURS

# Columns that narrow terminals leave out.
SPARE = ("first token ms", "tau", "gamma", "over ours [95 %]")
SPARE_OF_ACCEPTANCE = ("ours by depth", "by depth")
PACKAGES = ("torch", "transformers")  # whose versions are named beside ours


def condition_label(row: EngineRow) -> str:
    """Return the condition that the rows of one table share, such as `Greedy, batch 8`."""
    batch = f", batch {row.batch_size}" if row.batch_size > 1 else ""
    return ("Greedy" if row.temperature == 0 else f"Temperature {row.temperature:g}") + batch


def drafter_label(row: EngineRow) -> str:
    """Return `mine`, `prompt lookup` or `none (autoregressive)`."""
    if row.method == AUTOREGRESSIVE:
        return "none (autoregressive)"
    return "prompt lookup" if row.method == "ngram" else row.drafter


def engine_tables(rows: Sequence[EngineRow]) -> list[Table]:
    """Return two tables for each condition: speed and output, then acceptance."""
    tables = []
    for label in dict.fromkeys(map(condition_label, rows)):
        group = [row for row in rows if condition_label(row) == label]
        marks = ["baseline" if row.method == AUTOREGRESSIVE else _mark(row) for row in group]
        tables.append(make_table(label, list(map(_speed, group)), marks, SPARE))
        drafting = [row for row in group if row.method != AUTOREGRESSIVE]
        cells = list(map(_acceptance, drafting))
        title = f"{label}, acceptance in the engine and in ours"
        tables.append(make_table(title, cells, list(map(_mark, drafting)), SPARE_OF_ACCEPTANCE))
    return tables


def is_suspect(row: EngineRow) -> bool:
    """Return whether the output is not the target's, or the acceptance differs from ours."""
    return row.agreement == DIFFERS or row.lossless in (lossless.DIFFERS, BIASED)


def _mark(row: EngineRow) -> str:
    return "bad" if is_suspect(row) else ""


def _speed(row: EngineRow) -> dict[str, str]:
    gain, over_ours = (row.speedup, row.speedup_low, row.speedup_high), NONE
    if (row.engine, row.method) != (OURS, AUTOREGRESSIVE):
        over_ours = with_interval(row.over_ours, row.over_ours_low, row.over_ours_high)
    return {
        "engine": row.engine,
        "drafter": drafter_label(row),
        "tokens/s": number(row.tokens_per_second, 1),
        "gain [95 %]": NONE if row.method == AUTOREGRESSIVE else with_interval(*gain),
        "over ours [95 %]": over_ours,
        "gamma": str(row.num_draft_tokens or NONE),
        "tau": number(row.tau),
        "first token ms": number(row.first_token_ms, 1),
        "output": row.lossless,
    }


def _acceptance(row: EngineRow) -> dict[str, str]:
    detail = f" ({row.agreement_detail})" if row.agreement_detail else ""
    return {
        "engine": row.engine,
        "drafter": drafter_label(row),
        "gamma": str(row.num_draft_tokens),
        "alpha": number(row.alpha),
        "by depth": rates(row.checked_alpha_by_depth or row.alpha_by_depth),
        "ours by depth": rates(row.ours_alpha_by_depth),
        "acceptance": row.agreement_detail if row.agreement == DIFFERS else row.agreement + detail,
    }


def engine_warnings(rows: Sequence[EngineRow]) -> list[str]:
    """Return the warnings of outputs that differ, biased sampling and acceptance that differs.

    Heads that an engine is known to compute otherwise are named even if their acceptance agrees.
    """
    found = []
    for row in rows:
        place = f"{row.engine}, {drafter_label(row)}, {condition_label(row)}"
        if row.lossless in (lossless.DIFFERS, BIASED):
            found.append(f"NOT LOSSLESS: {place}: {row.lossless_detail}")
        known = describe_misreading(row.backend, row.device, row.method, row.drafter_layers)
        if row.agreement == DIFFERS:
            reason = known or "The engine may read the drafter's folder wrongly."
            found.append(
                f"ACCEPTANCE DIFFERS: {place}: it {row.agreement_detail} in ours. {reason}"
            )
        elif known:
            found.append(f"MAY ACCEPT LESS: {place}: {known}")
    return found


def versions_note(rows: Sequence[EngineRow], versions: Mapping[str, str]) -> str:
    """Return `Versions: ours 0.2.0 (native fused, torch 2.13.0, transformers 5.23.0), vllm 0.32.0`.

    versions: package -> version, of the manifest.
    """
    backends = {row.engine: row.backend for row in rows}
    name = " ".join(filter(None, (OURS, versions.get("shallow-draft"))))
    setting = [backends.pop(OURS, "").removeprefix(OURS).strip()]
    setting += [f"{package} {versions[package]}" for package in PACKAGES if package in versions]
    ours = f"{name} ({', '.join(filter(None, setting))})"
    return f"Versions: {', '.join([ours, *backends.values()])}"


def print_engines(
    rows: Sequence[EngineRow],
    notes: Sequence[str],
    versions: Mapping[str, str],
    console: Console | None = None,
) -> None:
    """Print the tables of engines, their versions, what they do not run, and the legend.

    versions: see `versions_note`.
    """
    first = rows[0]
    about = f"Engines, {first.target} on benchmark {first.benchmark}"
    details = f"{text.count_label(first.prompts, 'prompt')}, {first.dtype}, "
    details += text.count_label(first.threads, "thread")
    tables = [
        dataclasses.replace(
            table, title=f"{about}: {table.title[0].lower()}{table.title[1:]}", details=details
        )
        for table in engine_tables(rows)
    ]
    shown = [versions_note(rows, versions)]
    shown += [f"not run by other engines: {note}" for note in notes]
    print_tables(tables, engine_warnings(rows), shown, text.ENGINES_LEGEND, console)
