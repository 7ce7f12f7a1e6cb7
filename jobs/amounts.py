"""Text forms of sizes, durations and operation counts, for dry runs and stages."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# key of a manifest's metrics: floating-point operations that a dry run counted
PLANNED = "planned_flop"
# variable that names a file in which the dry runs of an experiment's stages add up their seconds
_SECONDS = "SHALLOW_DRAFT_PLANNED_SECONDS"
# units of operation counts, the largest first
FLOP = {"EFLOP": 1e18, "PFLOP": 1e15, "TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6}


def size(count: float) -> str:
    """Format bytes in powers of ten: `1.4 GB`, `96 MB`, `0.3 MB`."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.0f} MB" if count >= 1e7 else f"{count / 1e6:,.1f} MB"


def hours(seconds: float) -> str:
    """Format seconds as hours: `101.42 hours`, `0.02 hours (87 s)`."""
    found = seconds / 3600
    if found >= 0.1:
        return f"{found:,.2f} hours"
    return f"{found:.2g} hours ({seconds:,.{0 if seconds >= 10 else 1}f} s)"


def operations(count: float) -> str:
    """Format floating-point operations: `36.5 EFLOP`, `5.6 TFLOP`, `23.6 GFLOP`."""
    name = next((name for name, unit in FLOP.items() if count >= unit), "MFLOP")
    return f"{count / FLOP[name]:,.1f} {name}"


@contextmanager
def collect_planned_seconds() -> Iterator[Path]:
    """Yield a file for the seconds that child processes plan, until the block ends."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "seconds"
        path.touch()
        os.environ[_SECONDS] = str(path)
        try:
            yield path
        finally:
            del os.environ[_SECONDS]


def add_planned_seconds(seconds: float) -> None:
    """Report the seconds that a dry run predicts to the experiment that started it, if any.

    For jobs whose dry run writes no manifest.
    """
    if path := os.environ.get(_SECONDS):
        with open(path, "a") as file:
            file.write(f"{seconds}\n")
