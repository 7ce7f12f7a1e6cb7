"""Findings of the doctor, and their order."""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.doctor.estimates import Estimate

FAULT, FINE, UNKNOWN = "fault", "fine", "unknown"


@dataclass(frozen=True)
class Finding:
    """The result of one probe."""

    cause: str  # its short name, such as `taps`
    state: str  # FAULT, FINE, or UNKNOWN: it could not be checked
    found: str  # with a figure
    expected: str  # with a figure; for UNKNOWN, what is missing
    remedy: str = ""
    loss: Estimate | None = None  # of acceptance; None: known only after another training
    measured: str = ""  # how the loss was measured

    @property
    def is_fault(self) -> bool:
        return self.state == FAULT


def fine(cause: str, found: str, expected: str, loss: Estimate | None = None) -> Finding:
    """Return the finding of a probe that found no fault."""
    return Finding(cause, FINE, found, expected, loss=loss)


def unknown(cause: str, missing: str) -> Finding:
    """Return the finding of a probe that could not run. missing: what it needs."""
    return Finding(cause, UNKNOWN, "not checked", missing)


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Return the faults, the costliest first and those without a measured loss last."""
    faults = [one for one in findings if one.is_fault]
    return sorted(faults, key=lambda one: -one.loss.value if one.loss else 0.0)
