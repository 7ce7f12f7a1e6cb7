"""Execution of a model's code against tests, in a process of its own with limits."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from decoding.errors import UserError

SECONDS = 10  # of a program, by the clock and of a processor
MEGABYTES = 1024  # of its address space
SANDBOX = Path(__file__).with_name("sandbox.py")

PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed out"


def check_platform() -> None:
    """Raise UserError on a system without limits for processes."""
    if os.name != "posix":
        raise UserError(
            f"benchmark.execute=true needs the resource limits of POSIX, and this system is "
            f"{sys.platform}. Set benchmark.execute=false; prompts are measured all the same."
        )


def run_program(source: str, seconds: int = SECONDS, megabytes: int = MEGABYTES) -> str:
    """Run a program under the limits of eval.tasks.sandbox; return passed, failed or timed out.

    A program passes if it ends without an error: one that exits before its tests end fails.
    seconds: limit by the clock, and of processor time. megabytes: limit of its address space.
    """
    token = secrets.token_hex(16)
    given = {"source": source, "token": token, "seconds": seconds, "megabytes": megabytes}
    with tempfile.TemporaryDirectory(prefix="answer-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(SANDBOX)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            written, _ = process.communicate(json.dumps(given).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return TIMED_OUT
    if process.returncode == -signal.SIGXCPU or process.returncode == -signal.SIGKILL:
        return TIMED_OUT
    return PASSED if written.decode(errors="replace") == token else FAILED
