"""The job `eval.doctor`: examine, print one page, and write doctor.json and doctor.html."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from decoding.devices import device_of
from decoding.errors import UserError
from decoding.values import RULES, check_settings
from eval.doctor.config import DoctorConfig, drafter_name
from eval.doctor.diagnosis import PROBES, Diagnosis, Part, diagnose
from eval.doctor.drift import run_drift
from eval.doctor.estimates import Estimate
from eval.doctor.findings import Finding
from eval.doctor.report import doctor_page, print_diagnosis
from eval.doctor.subject import LEAST_PROMPTS, Subject
from jobs.files import write_text
from jobs.paths import resolve
from jobs.run_files import read_object
from jobs.run_folder import RunFolder


def run(config: DoctorConfig) -> Path:
    """Examine a drafter; return the run folder with doctor.json and doctor.html.

    A dry run prints the plan and writes nothing. Raises UserError for invalid input, and for a
    drafter that cannot be decoded at all.
    """
    check(config)
    if config.drift:
        return run_drift(config)
    if config.dry_run:
        print(
            f"would decode {config.max_prompts or 'all'} prompts of {config.benchmark.path} with "
            f"{drafter_name(config)} on {config.target.path}, once and once more for each "
            f"condition that differs from its training, run {len(PROBES)} probes, and write "
            f"doctor.json and doctor.html into {config.output_dir}"
        )
        return Path(config.output_dir)
    folder = RunFolder(config)
    figures, page = folder.path / "doctor.json", folder.path / "doctor.html"
    if folder.finished(figures, page):
        print(f"{folder.path} is finished; nothing is examined again. Delete it to do so.")
        found = read_object(figures, "Delete the folder to examine again.", diagnosis_of)
    else:
        subject = Subject(config)
        inputs = [subject.target_folder, subject.folder, resolve(config.benchmark.path)]
        folder.write_manifest(inputs, {}, finished=False)
        found = diagnose(subject)
        write_text(figures, json.dumps(record_of(found), indent=1))
        write_text(page, doctor_page(found, config, folder.command()))
        metrics = {"acceptance": found.acceptance.value, "cause": first_cause(found)}
        folder.write_manifest(inputs, metrics, finished=True)
    print_diagnosis(found, config)
    print(f"\npage: {page}")
    return folder.path


def check(config: DoctorConfig) -> None:
    """Raise UserError for settings that cannot be examined, before any model is loaded."""
    device_of(config.target.device)
    check_settings(config, ("temperature", "max_new_tokens"))
    for key, valid, expected in (
        ("num_draft_tokens", config.num_draft_tokens >= 1, "1 or more"),
        (
            "max_prompts",
            config.max_prompts == 0 or config.max_prompts >= LEAST_PROMPTS,
            f"{LEAST_PROMPTS} or more, or 0 for all",
        ),
        ("max_chats", config.max_chats >= LEAST_PROMPTS, f"{LEAST_PROMPTS} or more"),
        ("least_drift", 0 < config.least_drift < 1, "more than 0 and less than 1"),
        ("drift_against", not config.drift_against or bool(config.drift), "empty without drift"),
        (
            "drift_against_target",
            not config.drift_against_target or bool(config.drift_against),
            "empty without drift_against",
        ),
        (
            "max_new_tokens",
            config.max_new_tokens >= 2 and RULES["max_new_tokens"].fits(config.max_new_tokens),
            "2 or more: one token leaves nothing to draft",
        ),
    ):
        if not valid:
            raise UserError(f"{key} is {vars(config)[key]}, expected {expected}.")


def first_cause(found: Diagnosis) -> str:
    """Return the short name of the first cause; empty if there is none."""
    causes = found.causes
    return causes[0].cause if causes else ""


def record_of(found: Diagnosis) -> dict[str, Any]:
    """Return the content of doctor.json."""
    return {"first_cause": first_cause(found), **dataclasses.asdict(found)}


def diagnosis_of(record: dict[str, Any]) -> Diagnosis:
    """Return the diagnosis in doctor.json."""
    parts = [Part(**{**one, "rate": Estimate(**one["rate"])}) for one in record["parts"]]
    findings = [
        Finding(**{**one, "loss": Estimate(**one["loss"]) if one["loss"] else None})
        for one in record["findings"]
    ]
    given = {key: value for key, value in record.items() if key != "first_cause"}
    acceptance = Estimate(**record["acceptance"])
    return Diagnosis(**{**given, "acceptance": acceptance, "parts": parts, "findings": findings})
