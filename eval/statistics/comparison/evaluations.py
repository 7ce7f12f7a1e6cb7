"""Finished runs of eval.run as eval.compare reads them."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from eval.measure.origins import FILE as ORIGINS
from eval.measure.origins import Origin, read_origins
from eval.measure.records import Record, read_records
from eval.statistics.engine_row import EngineRow
from eval.statistics.paired_samples import PairedSample
from eval.statistics.rows import samples_of
from eval.statistics.schema import Row, main_rows, read_all_rows, read_rows
from jobs.run_folder import changed_artefacts, read_manifest
from jobs.saved_config import read_config

JOB = "eval.run"
AGAIN = "Evaluate again, with another output_dir="
FILES = ("config.yaml", "manifest.json", "results.jsonl", "records.jsonl")


@dataclass(frozen=True)
class Evaluation:
    """Rows, generations and drafter origins of a finished run of eval.run."""

    folder: Path
    label: str  # short name, unique in the comparison
    config: dict[str, Any]
    manifest: dict[str, Any]
    rows: list[Row]  # of the main part
    records: list[Record]
    origins: dict[str, Origin]  # by drafter; absent: it has no folder
    notes: list[str]  # sentences on facts that are not known
    engine_rows: list[EngineRow] = field(default_factory=list)

    @property
    def hashes(self) -> tuple[str, str]:
        """Hashes of the target and of the prompts, the first two inputs in the manifest."""
        target, prompts = list(self.manifest["inputs"].values())[:2]
        return target, prompts

    @property
    def execution(self) -> str:
        """Execution of the target, which the rows name with the backend unless it is eager."""
        return [*self.rows[0].backend.split(), "eager"][1]

    def units(self, row: Row) -> list[PairedSample]:
        """Return the paired samples behind a row.

        Raises UserError if the records lack its generations or their baseline.
        """
        try:
            return samples_of(row, self.records)
        except KeyError as error:
            raise UserError(
                f"{self.folder}: records.jsonl does not hold the generations behind results.jsonl "
                f"({error.args[0]}). Evaluate again, with another output_dir=."
            ) from error


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Return the run folders of paths and globs, each once, in order.

    Raises UserError if there is no pattern, or if one matches no folder.
    """
    if not patterns:
        raise UserError(
            "runs is empty. Name finished run folders of eval.run, such as runs=[runs/a,runs/b], "
            'or a glob, runs=["runs/sweep/*/eval.run"]'
        )
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        matches = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
        folders = [match for match in map(Path, matches) if match.is_dir()]
        if not folders:
            raise UserError(
                f"runs: {pattern!r} matches no folder (working folder: {Path.cwd()}). Expected a "
                f"finished run folder of eval.run, or a glob of such folders."
            )
        for folder in folders:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return a short label for each folder: its path without the parts shared at either end.

    A single folder is labelled by its name.
    """
    parts = [folder.resolve().parts for folder in folders]
    if len(parts) == 1:
        return [parts[0][-1]]
    while min(len(part) for part in parts) > 1 and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while min(len(part) for part in parts) > 1 and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    return ["/".join(part) for part in parts]


def _describe_damage(manifest: dict[str, Any]) -> str:
    """Return the first fault in the fields that a comparison reads; empty if there is none."""
    if len(manifest["inputs"]) < 2:
        return "inputs names no target and prompts"
    for key in ("command", "started", "git_revision"):
        if not isinstance(manifest.get(key), str):
            return f"{key} is {manifest.get(key)!r:.40}, expected a string"
    versions = manifest.get("versions")
    if not isinstance(versions, dict) or not {"torch", "transformers"} <= versions.keys():
        return "versions does not name torch and transformers"
    return ""


def read_evaluation(folder: Path, label: str) -> Evaluation:
    """Read a finished run folder of eval.run. label: its short name in the comparison.

    Raises UserError if the folder is not a run of eval.run, is not finished, is damaged, or holds
    files that have changed since the run.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    manifest = {} if "manifest.json" in missing else read_manifest(folder / "manifest.json")
    if manifest and manifest["job"] != JOB:
        raise UserError(
            f"runs: {folder} is a run of {manifest.get('job')}, expected a run of {JOB}."
        )
    if manifest and not manifest.get("finished"):
        raise UserError(
            f"runs: {folder} is not finished. Resume it with: {manifest.get('command')}"
        )
    if missing:
        raise UserError(
            f"runs: {folder} is not a finished run of {JOB}: it has no {', '.join(missing)}. Name "
            f"the folder that eval.run printed, or a glob of such folders."
        )
    if damage := _describe_damage(manifest):
        raise UserError(f"{folder / 'manifest.json'} is damaged: {damage}. {AGAIN}")
    config = read_config(folder / "config.yaml", AGAIN)
    rows = main_rows(read_rows(folder / "results.jsonl"))
    records = read_records(folder / "records.jsonl")
    origins = read_origins(folder)
    if wrong := changed_artefacts(folder, manifest, (*FILES, ORIGINS)):
        raise UserError(f"runs: {wrong[0]}. Make it again with: {manifest.get('command')}")
    notes = [
        f"{label}: {name}: {origin.note}" for name, origin in (origins or {}).items() if origin.note
    ]
    if origins is None:
        notes.append(
            f"{label} has no {ORIGINS}: bytes/step and training tokens of its drafters are "
            f"unknown. Evaluate again to record them"
        )
    _, of_engines = read_all_rows(folder / "results.jsonl")
    return Evaluation(
        folder, label, config, manifest, rows, records, origins or {}, notes, of_engines
    )
