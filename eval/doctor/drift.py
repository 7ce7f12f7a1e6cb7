"""The drift monitor: whether a drafter accepts less on logged answers than when it was trained.

The logged answers are read by target and drafter in one forward each, as held-out answers are in
training, so nothing is decoded. The acceptance of each answer gives the mean and its error over
answers; the reference is the drafter's card, or older logs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from decoding.costs.prediction import expected_tokens
from decoding.errors import UserError
from decoding.models.folder import CARD
from distill.acceptance import HeldOutAcceptance
from eval.doctor.config import DoctorConfig, drafter_name
from eval.doctor.estimates import Counts, Estimate, is_sure, rate, student_quantile
from eval.doctor.logs import read_answers
from eval.doctor.subject import Subject
from eval.logged.records import RECORDS
from jobs.files import write_text
from jobs.paths import resolve, resolve_model
from jobs.run_files import read_object
from jobs.run_folder import RunFolder
from training.config import HeldOutConfig
from training.data.packing import Sample
from training.features.states import TargetStates
from training.heads.evaluation import GreedyChain, HeldOutRows

HEALTHY, UNSURE, RETARGET = "healthy", "unsure", "re-target"
PARTS = 4  # of the log, in its order
NO_LIMIT = 2**30  # tokens: where logged answers were cut is not known


@dataclass(frozen=True)
class Measured:
    """Acceptance of logged answers."""

    acceptance: Estimate
    parts: list[Estimate]  # the log in PARTS parts, in its order
    answers: int
    tokens: int


@dataclass(frozen=True)
class Drift:
    """Result of the monitor."""

    verdict: str
    now: Measured
    reference: Estimate
    source: str  # of the reference, in words
    fall: Estimate  # of the acceptance
    more: int  # further answers after which an unsure fall is certain, if it stays as large


def run_drift(config: DoctorConfig) -> Path:
    """Examine logs; return the run folder with drift.json. A dry run writes nothing."""
    if config.dry_run:
        print(
            f"would read up to {config.max_chats} answers of {config.drift} with "
            f"{drafter_name(config)} and {config.target.path}, and write drift.json into "
            f"{config.output_dir}"
        )
        return Path(config.output_dir)
    folder = RunFolder(config)
    file = folder.path / "drift.json"
    if folder.finished(file):
        print(f"{folder.path} is finished; nothing is examined again. Delete it to do so.")
        found = read_object(file, "Delete the folder to examine again.", drift_of)
    else:
        subject = Subject(config)
        inputs = _inputs(subject)
        folder.write_manifest(inputs, {}, finished=False)
        found = find_drift(subject)
        write_text(file, json.dumps(asdict(found), indent=1))
        metrics = {"acceptance": found.now.acceptance.value, "verdict": found.verdict}
        folder.write_manifest(inputs, metrics, finished=True)
    print(describe(found, config))
    return folder.path


def find_drift(subject: Subject) -> Drift:
    """Compare the acceptance on the logs with the reference.

    Raises UserError for logs of another target, too few logs, and a missing reference.
    """
    config = subject.config
    if config.drift_against:
        before = measure_logs(_before(subject), config.drift_against)
        reference, source = before.acceptance, f"{before.answers} answers of {config.drift_against}"
        now = measure_logs(subject, config.drift)
    else:
        value, prompts = recorded(subject)
        now = measure_logs(subject, config.drift)
        # the card has no error: that of as many answers, with the spread of the logged ones
        error = now.acceptance.error * math.sqrt(now.answers / prompts)
        reference = Estimate(value, error, prompts - 1)
        source = f"{CARD}, some {prompts} held-out answers"
    error = math.hypot(now.acceptance.error, reference.error)
    freedom = min(now.acceptance.freedom, reference.freedom)
    fall = Estimate(reference.value - now.acceptance.value, error, freedom)
    verdict = HEALTHY
    if is_sure(fall, config.least_drift):
        verdict = RETARGET
    elif fall.value >= config.least_drift:
        verdict = UNSURE
    return Drift(verdict, now, reference, source, fall, _more(now, reference, fall))


def _inputs(subject: Subject) -> list[Path]:
    config = subject.config
    found = [resolve(path) for path in (config.drift, config.drift_against) if path]
    logs = [path / RECORDS if path.is_dir() else path for path in found]
    older = config.drift_against_target
    targets = [subject.target_folder, *([resolve_model(older)] if older else [])]
    return [*targets, subject.folder, *logs]


def _before(subject: Subject) -> Subject:
    """Return the same drafter on the target that wrote the older logs."""
    config = subject.config
    if not config.drift_against_target:
        return subject
    target = replace(config.target, path=config.drift_against_target)
    return Subject(replace(config, target=target))


def recorded(subject: Subject) -> tuple[float, int]:
    """Return the acceptance on the card, and the number of held-out answers behind it.

    Raises UserError without one, or for logs of another temperature.
    """
    config, card = subject.config, subject.card
    otherwise = "give logs of a healthy time as drift_against=LOGS.jsonl"
    if not card:
        raise UserError(
            f"{subject.folder} has no {CARD}, expected the held-out acceptance of its training "
            f"there, with which logs are compared. Copy the card of its run, or {otherwise}."
        )
    figures = card.get("acceptance") or {}
    temperature = figures.get("temperature")
    value = figures.get(_figure(subject))
    if not isinstance(value, float) or temperature is None:
        raise UserError(
            f"{subject.folder / CARD} records no held-out acceptance, with which logs are "
            f"compared. Use the folder that a training wrote, or {otherwise}."
        )
    if temperature != config.temperature:
        raise UserError(
            f"{subject.folder / CARD} records an acceptance at temperature {temperature:g}, and "
            f"temperature={config.temperature:g} is that of the logs. Set temperature= to that at "
            f"which they were sampled; if it differs from the card's, {otherwise}."
        )
    held_out = subject.training.get("held_out") or {}
    return value, max(2, int(held_out.get("max_prompts", HeldOutConfig.max_prompts)))


def measure_logs(subject: Subject, path: str) -> Measured:
    """Return the acceptance of logged answers, evenly chosen from all over the log.

    Raises UserError for a malformed log, too few answers, and those of another target.
    """
    samples = read_answers(subject, path)
    accepted_P, tested_P = (np.asarray(column, dtype=float) for column in _counts(subject, samples))
    parts = [
        rate(Counts(accepted_P[part], tested_P[part]))
        for part in np.array_split(np.arange(len(samples)), min(PARTS, len(samples) // 2))
    ]
    tokens = sum(int(one.mask.sum()) for one in samples)
    return Measured(rate(Counts(accepted_P, tested_P)), parts, len(samples), tokens)


def _figure(subject: Subject) -> str:
    """Return the name on the card of the acceptance that the logs have in the same way."""
    greedy = subject.kind is None and not subject.config.temperature
    return "greedy_acceptance" if greedy else "acceptance"


def _counts(subject: Subject, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return accepted and tested draft tokens of every answer, as its training counts them."""
    config, kind = subject.config, subject.kind
    if kind is None:
        greedy = _figure(subject) == "greedy_acceptance"
        totals = [
            HeldOutAcceptance(
                subject.draft_model, subject.model, [one], len(one.ids), config.temperature
            ).totals()
            for one in samples
        ]
        accepted = [one.greedy if greedy else one.accepted for one in totals]
        return accepted, [one.tokens for one in totals]
    head = subject.draft_model
    states = TargetStates(subject.model, taps=kind.taps(subject.shape), final=False)
    length = max(len(one.ids) for one in samples)
    tokens = int(subject.card.get("loss", {}).get("predict_n_tokens", 0) or config.num_draft_tokens)
    device = next(subject.model.parameters()).device
    chain = GreedyChain(kind, head, HeldOutRows(states, samples, length, device), tokens, NO_LIMIT)
    _, _, accepted_A, tested_A = zip(*chain.counts(), strict=True)
    return [*map(float, accepted_A)], [*map(float, tested_A)]


def _more(now: Measured, reference: Estimate, fall: Estimate) -> int:
    """Return how many more answers would make a fall of this size certain; -1: no number does."""
    # the variance of the logs' acceptance
    most = (fall.value / student_quantile(fall.freedom)) ** 2 - reference.error**2
    if fall.value <= 0 or most <= 0:
        return -1
    return max(0, math.ceil(now.answers * (now.acceptance.error**2 / most - 1)))


def describe(found: Drift, config: DoctorConfig) -> str:
    """Return the monitor's result in a few lines."""
    gamma, now = config.num_draft_tokens, found.now
    tokens = [expected_tokens([one.value], gamma) for one in (found.reference, now.acceptance)]
    decides = "Give older logs as drift_against=, as the card's own error is too large"
    if found.more > 0:
        count = now.answers + found.more
        decides = f"Some {found.more:,} more answers would decide it (max_chats={count})"
    advice = {
        HEALTHY: f"healthy: no fall of {config.least_drift:g} or more. Examine later logs again",
        UNSURE: f"unsure: the fall is large enough, but not beyond its error. {decides}",
        RETARGET: "re-target now: let the target answer its prompts and continue the drafter's "
        "training on them (+experiment=retarget from_drafter=...)",
    }
    parts = ", ".join(f"{one.value:.3f}" for one in now.parts)
    return "\n".join(
        [
            f"acceptance {now.acceptance} on {now.answers} logged answers ({now.tokens:,} tokens)",
            f"  in the order of the log: {parts}",
            f"reference  {found.reference} ({found.source})",
            f"fall       {found.fall}; a round of {gamma} drafted tokens emits {tokens[1]:.2f} "
            f"instead of {tokens[0]:.2f} tokens",
            advice[found.verdict],
        ]
    )


def drift_of(record: dict[str, Any]) -> Drift:
    """Return the result in drift.json."""
    now = record["now"]
    measured = Measured(
        Estimate(**now["acceptance"]),
        [Estimate(**one) for one in now["parts"]],
        now["answers"],
        now["tokens"],
    )
    made = {key: Estimate(**record[key]) for key in ("reference", "fall")}
    return Drift(**{**record, **made, "now": measured})
