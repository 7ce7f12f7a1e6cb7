"""The target's own outputs in a finished or unfinished run folder of eval.run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from eval.config import BenchmarkConfig
from eval.logged.entries import Entry, Log
from eval.measure.records import AUTOREGRESSIVE, Record, record_from
from jobs.run_files import read_journal_lines
from jobs.run_lock import CONFIG
from jobs.saved_config import read_config

RECORDS = "records.jsonl"
JOB = "eval.run"
_AGAIN = "Evaluate again, with another output_dir="


def read_run(folder: Path) -> Log:
    """Return the autoregressive outputs at the run's lowest temperature, and its prompts' settings.

    Raises UserError for a folder that is not of eval.run, damaged records, with the line, and
    records without autoregressive decoding.
    """
    records, config = records_of(folder), read_config(folder / CONFIG, _AGAIN)
    if config["job"] != JOB:
        raise UserError(f"{folder} is a run of {config['job']}, expected one of {JOB}, or a file.")
    settings = _benchmark(config["benchmark"])
    # the prompts of a sweep may be in a file of their own
    parts = ("main",) if settings.sweep_path else ("main", "sweep")
    baseline = [
        record for record in records if record.drafter == AUTOREGRESSIVE and record.part in parts
    ]
    if not baseline:
        raise UserError(
            f"{folder / RECORDS} has no autoregressive outputs, expected those of the target. "
            f"{_AGAIN}."
        )
    coldest = min(record.temperature for record in baseline)
    limit, entries, seen = int(config["max_new_tokens"]), list[Entry](), set[tuple[Any, ...]]()
    for number, record in enumerate(baseline, 1):
        name = (record.prompt_id, record.turn, record.sample)
        if record.temperature == coldest and name not in seen:
            seen.add(name)
            entries.append(_entry(record, f"{folder / RECORDS}, output {number}", limit))
    return Log("records of eval.run", entries, {}, settings)


def records_of(folder: Path) -> list[Record]:
    """Return the records of a run folder of eval.run.

    Raises UserError for a folder without records, and for damaged ones, with the line.
    """
    path = folder / RECORDS
    if not path.is_file():
        raise UserError(
            f"{folder} holds no {RECORDS}, expected a run folder of {JOB}, or the path of a file."
        )
    lines = read_journal_lines(path, record_from)
    if lines.wrong:
        raise UserError(f"{path}, {lines.wrong[0]}. {_AGAIN}.")
    if not lines.records:
        raise UserError(f"{path} is empty, expected records of {JOB}. {_AGAIN}.")
    return lines.records


def _entry(record: Record, place: str, limit: int) -> Entry:
    return Entry(
        place,
        list(record.tokens),
        id=record.prompt_id,
        turn=record.turn,
        sample=record.sample,
        category=record.category,
        prompt_tokens=record.prompt_tokens,
        limit=limit,
        temperature=record.temperature,
    )


def _benchmark(saved: dict[str, Any]) -> BenchmarkConfig:
    """Return the prompt settings of a run; those of later versions keep their defaults."""
    known = {field.name for field in dataclasses.fields(BenchmarkConfig)}
    return BenchmarkConfig(**{key: value for key, value in saved.items() if key in known})
