"""A signal ends a job with one message and one status, both during imports and at work."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distill.config import QualityConfig
from jobs.interrupts import INTERRUPTED, Terminated, raise_on_signals
from jobs.job import job_main
from jobs.stages import ON_FILE

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_importing_job(package: Path) -> subprocess.Popen[str]:
    """Start `python -m PACKAGE.job` and return the process while it is importing."""
    package.mkdir()
    (package / "__init__.py").write_text(
        "from jobs.interrupts import end_imports_quietly\nend_imports_quietly()\n"
    )
    (package / "job.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(package.parent), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", f"{package.name}.job"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    return process


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_the_imports_prints_one_line(number: signal.Signals, tmp_path: Path):
    process = start_importing_job(tmp_path / "package")
    process.send_signal(number)
    _, words = process.communicate(timeout=20)
    assert words == f"interrupted by {number.name} before the job started\n"
    assert process.returncode == INTERRUPTED == 130


@pytest.mark.parametrize("package", ["distill", "eval", "heads", "recurrent_drafting"])
def test_packages_of_jobs_handle_signals_before_other_imports(package: str):
    """Check that a package of jobs handles signals before it imports any third-party package.

    Otherwise a signal would interrupt these imports with a traceback.
    """
    names = [
        name
        for file in (
            ROOT / package / "__init__.py",
            ROOT / "jobs" / "interrupts.py",
            ROOT / "jobs" / "__init__.py",
            ROOT / "decoding" / "__init__.py",
        )
        for node in ast.parse(file.read_text()).body
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [one.name for one in getattr(node, "names", [])]
        )
    ]
    known = {"jobs.interrupts", "decoding"}  # of which all files are read above
    assert {name.partition(".")[0] for name in set(names) - known} <= sys.stdlib_module_names
    assert (ROOT / package / "__init__.py").read_text().endswith("\nend_imports_quietly()\n")


def test_a_plain_import_changes_no_handler():
    """Check that a plain import changes no signal handler, such as a notebook's for Ctrl-C."""
    assert {signal.getsignal(number) for number in SIGNALS} == {
        signal.default_int_handler,
        signal.SIG_DFL,
    }


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_a_job_gives_a_message_and_its_status(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def work(config: QualityConfig) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    (tmp_path / "given.yaml").write_text(f"job: distill.quality\noutput_dir: {tmp_path / 'run'}\n")
    monkeypatch.setattr(sys, "argv", ["distill.quality", ON_FILE, str(tmp_path / "given.yaml")])
    with pytest.raises(SystemExit) as stop:
        job_main("distill.quality", QualityConfig, work)
    assert stop.value.code == INTERRUPTED
    by = " (SIGTERM)" if number == signal.SIGTERM else ""
    words = f"interrupted: finished work is kept. Run the same command to continue{by}\n"
    assert capsys.readouterr().err == words
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_ends_a_rank_at_once():
    """Check that SIGTERM has its default action if by_sigterm=False, and raises otherwise.

    A rank may wait in native code, where no Python handler runs.
    """
    with raise_on_signals(by_sigterm=False):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with raise_on_signals(), pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)
