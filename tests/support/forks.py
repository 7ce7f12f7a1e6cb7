"""Processes that a server forks after its imports of torch, transformers and the jobs.

A new interpreter spends some seven CPU seconds on these imports, and the jobs of tests about one on
their work. A forked process has the command line, variables and output of a new one, but what
Python and OpenMP read from the environment at their start is the server's.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from jobs.launch import Children, free_port

ROOT = Path(__file__).resolve().parents[2]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.support.preloaded"])


class Fork:
    """`python -m module arguments` in a forked process, with the methods of `subprocess.Popen`.

    environment: all its variables; None: those of this process. fork_children: whether the ranks
    and stages that it starts are forked, too; else they are new interpreters.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        fork_children: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork_")  # deleted with this object
        self._output = Path(self._folder.name)
        given = (module, arguments, dict(environment or os.environ))
        self._process: Any = _FORKS.Process(
            target=_run_first, args=(*given, str(self._output), fork_children)
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, -N after signal N; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = 300) -> int:
        """Wait for the end and return the exit status. Raises TimeoutExpired after `timeout` s."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self._process.exitcode

    def printed(self) -> str:
        """Return what the process has written to stdout so far."""
        file = self._output / "stdout"
        return file.read_text() if file.exists() else ""

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end and return what the process wrote to stdout and to stderr."""
        self.wait(timeout)
        out, err = ((self._output / name).read_text() for name in ("stdout", "stderr"))
        return out, err

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


class _Child(Fork):
    """A child of a forked job, forked from it and in a session of its own; it shares its output."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str]) -> None:
        fork = multiprocessing.get_context("fork").Process
        self._process = fork(target=_run_child, args=(module, arguments, dict(environment)))
        self._process.start()
        self.pid = self._process.pid


def run_forked(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` to its end, and return its exit status and output.

    The ranks and stages that it starts are forked, too.
    """
    process = Fork(module, *arguments, environment=environment, fork_children=True)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess([module, *arguments], process.returncode, out, err)


def succeed(module: str, *arguments: str) -> str:
    """Run `python -m module arguments`, assert that it succeeds, and return its output."""
    done = run_forked(module, *arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def start_ranks(module: str, *arguments: str, ranks: int = 2) -> list[Fork]:
    """Start `python -m module arguments` in ranks, with the variables that torchrun sets."""
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [
        Fork(module, *arguments, environment={**os.environ, **common, **place}) for place in places
    ]


def run_ranks(module: str, *arguments: str, ranks: int = 2, timeout: float = 300) -> str:
    """Run `python -m module arguments` in ranks that must all succeed; return their output."""
    started, printed = start_ranks(module, *arguments, ranks=ranks), ""
    try:
        for rank, process in enumerate(started):
            out, err = process.communicate(timeout)
            assert process.returncode == 0, f"rank {rank}: {out[-2000:]}{err[-3000:]}"
            printed += out
    finally:
        for process in started:
            process.kill()
    return printed


def _run_first(
    module: str,
    arguments: Sequence[str],
    environment: dict[str, str],
    output: str,
    fork_children: bool,
) -> None:
    """Run a module as `python -m` does; its output goes to two files of the folder `output`."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(output, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    if fork_children:
        Children.start = _start  # type: ignore[method-assign]
    _run(module, arguments, environment)


def _run_child(module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.setsid()
    GlobalHydra.instance().clear()  # the parent is within its own command
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _run(module, arguments, environment)


def _run(module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = [module, *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the server imported the module
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@contextmanager
def forked_children() -> Iterator[None]:
    """Fork the ranks and stages of jobs that run in this process, as those of forked jobs are."""
    real, Children.start = Children.start, _start_by_server  # type: ignore[method-assign]
    try:
        yield
    finally:
        Children.start = real  # type: ignore[method-assign]


def _start_by_server(
    children: Children, command: list[str], environment: dict[str, str] | None = None
) -> None:
    _, _, module, *arguments = command  # python -m module arguments
    child: Any = Fork(module, *arguments, environment=environment)
    children.processes.append(child)


def _start(
    children: Children, command: list[str], environment: dict[str, str] | None = None
) -> None:
    """Start a child as `Children.start` does, but by a fork."""
    _, _, module, *arguments = command  # python -m module arguments
    child: Any = _Child(module, *arguments, environment=environment or os.environ)
    children.processes.append(child)
