"""Workers of one job on this machine: fresh processes on the saved configuration, watched until all are done.

A worker that dies ends the job: the others are stopped and the error names the rank.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from decoding.errors import UserError

WORKER = "SHALLOW_DRAFT_WORKER"
_GRACE_SECONDS = 30.0


def is_worker() -> bool:
    """True inside a process that `launch` or `torchrun` started."""
    return WORKER in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def launch(job: str, config_file: Path, processes: int) -> None:
    """Run `python -m <job> --config-file <config_file>` in `processes` ranks and wait.

    Raises UserError naming the first rank that failed. SIGINT and SIGTERM are handed on to every rank.
    """
    port = _free_port()
    threads = max(1, (os.cpu_count() or 1) // processes)
    workers = []
    for rank in range(processes):
        places = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_PORT": port,
        }
        environment = {
            **os.environ,
            **{key: str(value) for key, value in places.items()},
            "MASTER_ADDR": "127.0.0.1",
            WORKER: "1",
        }
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        command = [sys.executable, "-m", job, "--config-file", str(config_file)]
        workers.append(subprocess.Popen(command, env=environment))

    def hand_on(number: int, frame: FrameType | None) -> None:
        for worker in workers:
            worker.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _wait(workers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(workers: list[subprocess.Popen[bytes]]) -> None:
    while True:
        states = [worker.poll() for worker in workers]
        failed = [rank for rank, state in enumerate(states) if state not in (None, 0)]
        if failed:
            _stop(workers)
            raise UserError(
                f"rank {failed[0]} of {len(workers)} ended with status {states[failed[0]]}; the other ranks were stopped. "
                "Its last words stand above; run the same command to resume from the last checkpoint"
            )
        if all(state == 0 for state in states):
            return
        time.sleep(0.2)


def _stop(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    end = time.monotonic() + _GRACE_SECONDS
    for worker in workers:
        try:
            worker.wait(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
