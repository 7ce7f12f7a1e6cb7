"""Child processes of a job: its ranks, the stages of an experiment, the members of a sweep.

Children run in separate sessions, so Ctrl-C on a terminal reaches them once, through the parent.
They save a checkpoint and end while the parent waits. When one rank dies, the others are stopped
and the error names the dead one.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from decoding import devices
from decoding.errors import UserError
from jobs import ranks
from jobs.config import ParallelConfig
from jobs.interrupts import INTERRUPTED, Interrupted
from jobs.run_lock import held_descriptors

_GRACE_SECONDS = 30.0


class Children:
    """Context of child processes, which receive this process's signals and end with the block."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.signalled = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Children":
        self._before = {
            number: signal.signal(number, self._forward_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Start a child process. environment: its variables; None: as in this process."""
        self.processes.append(
            subprocess.Popen(
                command, env=environment, start_new_session=True, pass_fds=held_descriptors()
            )
        )

    def wait(self) -> list[int | None]:
        """Wait until all children have ended or one has failed; after a signal, wait for all.

        Returns the exit status of each child, or None for a child that still runs.
        """
        while True:
            states = [process.poll() for process in self.processes]
            if all(state is not None for state in states):
                return states
            if any(state not in (None, 0) for state in states) and not self.signalled:
                return states
            time.sleep(0.05)

    def stop(self) -> None:
        """Terminate the running children, and kill them after a grace period."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.terminate()
        end = time.monotonic() + _GRACE_SECONDS
        for process in running:
            try:
                process.wait(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def run_child(command: list[str], what: str, environment: dict[str, str] | None = None) -> int:
    """Run one command to its end and return its exit status.

    what: name of the command in the message of an interruption. environment: variables of the
    command; None: as in this process. Raises Interrupted if a signal stopped the command.
    """
    with Children() as children:
        children.start(command, environment)
        status = children.wait()[0]
    if status == INTERRUPTED or children.signalled:
        raise Interrupted(f"{what} was stopped by a signal. Run the same command to continue")
    assert status is not None
    return status


def count_processes(config: ParallelConfig) -> int:
    """Return the number of ranks of the job, which a launcher may have started already.

    Raises UserError if the number contradicts parallel.kind or the launcher, and if it is unknown
    because the machine has no GPU.
    """
    if ranks.is_rank():
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if config.processes and here and config.processes != here:
            raise UserError(
                f"parallel.processes is {config.processes}, but this process was started as one of "
                f"{here} ranks on its machine. Leave it at 0"
            )
        ranks.check_kind(config.kind, ranks.world_size())
        return ranks.world_size()
    processes = config.processes or (1 if config.kind == "single" else devices.count_gpus())
    if processes == 0:
        raise UserError(
            f"parallel={config.kind} on a machine without a GPU needs parallel.processes=N"
        )
    ranks.check_kind(config.kind, processes)
    return processes


def launch(job: str, config_file: Path, processes: int) -> None:
    """Run `python -m <job> --config-file <config_file>` in `processes` ranks and wait.

    Raises UserError with the first rank that failed, and Interrupted if a signal stopped the ranks.
    """
    environment = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, "-m", job, "--config-file", str(config_file)]
    with Children() as children:
        for rank in map(str, range(processes)):
            children.start(command, {**environment, "RANK": rank, "LOCAL_RANK": rank})
        states = children.wait()
    failed = [rank for rank, state in enumerate(states) if state not in (None, 0)]
    if failed and (children.signalled or states[failed[0]] == INTERRUPTED):
        raise Interrupted(
            f"the {processes} ranks were stopped by a signal. Run the same command to continue"
        )
    if failed:
        # A signal that ends a rank makes the others fail too, as their connections break.
        first = min(failed, key=lambda rank: (states[rank] or 0) > 0)
        raise UserError(
            f"rank {first} of {processes} {_describe_exit(states[first] or 0)}; the other ranks "
            f"were stopped. Its last output is above. Run the same command to continue from the "
            f"last checkpoint"
        )


def _describe_exit(status: int) -> str:
    """Describe an exit status; for a process that signal N ended, `subprocess` reports -N."""
    if status >= 0:
        return f"ended with status {status}"
    hint = " (often because the memory was full)" if -status == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"


def free_port() -> int:
    """Return a TCP port of this machine that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
