"""Threads spin briefly while they wait, unless the environment or a loaded PyTorch decides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoding import SPINS

ROOT = Path(__file__).resolve().parents[2]
PRINT = f"import os; print(os.environ.get({SPINS!r}))"
JOBS = ("distill", "eval", "heads", "recurrent_drafting")


def spins_after(code: str, folder: Path, **given: str) -> str:
    """Return what a new process finds in SPINS after this code."""
    usual = {k: v for k, v in os.environ.items() if k not in (SPINS, "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{PRINT}"],
        env={**usual, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), **given},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "given", "spins"),
    [
        ("import decoding", {}, "2000"),
        ("import decoding, torch", {}, "2000"),
        ("import decoding", {SPINS: "7"}, "7"),
        ("import decoding", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("import torch, decoding", {}, "None"),
        *((f"import {package}", {}, "2000") for package in JOBS),
    ],
    ids=["library", "torch later", "chosen", "policy", "torch before", *JOBS],
)
def test_threads_spin_briefly(code: str, given: dict[str, str], spins: str, tmp_path: Path) -> None:
    """Check what the environment holds; an empty module stands for PyTorch."""
    (tmp_path / "torch.py").touch()
    assert spins_after(code, tmp_path, **given) == spins


def test_nothing_loads_pytorch_before(tmp_path: Path) -> None:
    """Check that PyTorch, loaded by the library, finds the choice; control: loaded before it."""
    (tmp_path / "torch.py").write_text(f"{PRINT}\nraise SystemExit\n")
    assert spins_after("from decoding import load", tmp_path) == "2000"
    assert spins_after("import torch; from decoding import load", tmp_path) == "None"
