"""Acceptance of a drafter in other engines, read from a finished run of `eval.run engine=[...]`.

Shapes: U units, which are prompts that were decoded together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from decoding.errors import UserError
from decoding.models.folder import hash_input
from eval.doctor.estimates import Counts
from eval.engines.agreement import counts_of
from eval.engines.measure import FILE
from eval.engines.records import EngineRecord, record_from
from eval.measure.origins import read_origins
from jobs.run_files import read_journal_lines
from jobs.run_folder import read_manifest
from serving.engines.registry import OURS

JOB = "eval.run"
HOW = "eval.run engine=[ours,ENGINE] with this target and this drafter"


@dataclass(frozen=True)
class EngineCounts:
    """Counts of one drafter in an engine and in our loop, of the same units and draft length."""

    engine: str
    theirs: Counts
    ours: Counts


def read_engine_run(folder: Path, drafter: Path, target_hash: str) -> list[EngineRecord]:
    """Return the records of a drafter in other engines and in our loop.

    Acceptance is compared on answers past their stop tokens, so other records are left out. Raises
    UserError for a folder that is no finished run, or is one of another target or drafter.
    """
    manifest, file = folder / "manifest.json", folder / FILE
    if not manifest.is_file() or not file.is_file():
        missing = FILE if manifest.is_file() else "manifest.json"
        raise UserError(f"engine_run={folder} has no {missing}, expected the run folder of {HOW}.")
    found = read_manifest(manifest)
    if found["job"] != JOB or not found.get("finished"):
        state = "not finished" if found["job"] == JOB else f"a run of {found['job']}"
        raise UserError(f"engine_run={folder} is {state}, expected a finished run of {HOW}.")
    inputs: dict[str, str] = found["inputs"]
    target = next(iter(inputs), "")
    if inputs.get(target) != target_hash:
        raise UserError(
            f"engine_run={folder} measured the target {target}, whose hash differs from that of "
            f"target.path. Expected a run of {HOW}."
        )
    drafter_hash, origins = hash_input(drafter), read_origins(folder) or {}
    names = {name for name, one in origins.items() if inputs.get(one.folder) == drafter_hash}
    if not names:
        raise UserError(
            f"engine_run={folder} measured {', '.join(origins) or 'no drafter'}, not the content "
            f"of {drafter}. Expected a run of {HOW}."
        )
    records = read_journal_lines(file, record_from).records
    return [one for one in records if one.drafter in names and one.ignore_eos]


def counts_by_engine(records: Sequence[EngineRecord], temperature: float) -> list[EngineCounts]:
    """Return the counts of each engine that reports them, at one temperature."""
    here = [one for one in records if one.temperature == temperature]
    found = []
    for trial in dict.fromkeys(one.trial for one in here if one.engine != OURS):
        theirs = [one for one in here if one.trial == trial]
        own = replace(trial, arm=replace(trial.arm, engine=OURS))
        places = {_place(one): one for one in here if one.trial == own}
        pairs = [(one, places[_place(one)]) for one in theirs if _place(one) in places]
        for tests in (_by_depth, _in_total):
            counts = [_counts([pair[side] for pair in pairs], tests) for side in (0, 1)]
            if counts[0] is not None and counts[1] is not None:
                found.append(EngineCounts(trial.arm.engine, counts[0], counts[1]))
                break
    return found


def _place(one: EngineRecord) -> tuple[int, int, int, int]:
    return one.batch_size, one.unit, one.turn, one.sample


def _by_depth(one: EngineRecord) -> tuple[int, int] | None:
    """Return accepted and tested tokens; None if the engine does not report them by depth."""
    found = counts_of([one.tested_by_depth], [one.accepted_by_depth], [one.rounds])
    return None if found is None else (sum(found.accepted), sum(found.tested))


def _in_total(one: EngineRecord) -> tuple[int, int] | None:
    """Return accepted and drafted tokens; None if the engine does not report them."""
    if one.accepted is None or one.drafted is None:
        return None
    return one.accepted, one.drafted


def _counts(
    records: Sequence[EngineRecord], tests: Callable[[EngineRecord], tuple[int, int] | None]
) -> Counts | None:
    """Return the counts of each unit; None if there are none, or one is not reported."""
    pairs = [tests(one) for one in records]
    known = [pair for pair in pairs if pair is not None]
    if not known or len(known) < len(pairs):
        return None
    accepted_U, tested_U = np.asarray(known, dtype=float).T
    return Counts(accepted_U, tested_U)
