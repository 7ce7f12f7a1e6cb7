"""Probe of another engine: whether it accepts as many of the drafter's tokens as our loop."""

from __future__ import annotations

from eval.doctor.engine_run import HOW, counts_by_engine
from eval.doctor.estimates import difference, is_sure
from eval.doctor.findings import FAULT, Finding, fine, unknown
from eval.doctor.subject import Subject


def check_engine(subject: Subject) -> Finding:
    """Compare the acceptance in other engines with ours, and name the engine that loses most."""
    if not subject.config.engine_run:
        return unknown("engine", f"needs a run of {HOW} (engine_run=)")
    temperature = subject.config.temperature
    found = counts_by_engine(subject.engine_records, temperature)
    if not found:
        return unknown(
            "engine",
            f"needs an engine in {subject.config.engine_run} that reports its acceptance at "
            f"temperature {temperature:g}",
        )
    losses = [difference(one.ours, one.theirs) for one in found]
    loss, worst = max(zip(losses, found, strict=True), key=lambda pair: pair[0].value)
    words = (
        f"{worst.theirs.rate:.3f} accepted in {worst.engine}",
        f"{worst.ours.rate:.3f} in our loop, by the same rule and draft length",
    )
    if not is_sure(loss):
        return fine("engine", *words, loss)
    return Finding(
        "engine",
        FAULT,
        *words,
        "The engine reads the folder in another way: export it in another layout "
        "(scripts/export_head.py, docs/engines.md), or try another version of the engine",
        loss,
        "decoded in both",
    )
