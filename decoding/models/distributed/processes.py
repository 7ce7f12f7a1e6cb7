"""The processes of a parallel target, which rank 0 starts, calls, binds and ends.

A rank's failure or an interrupt within a step leaves the ranks out of step; all are then ended, and
the error names the rank that failed. The ranks also end with this object and with this process.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from decoding.models.distributed.links import Link, socket_mesh
from decoding.models.distributed.shards import RankSetup, Shard, connect

ROOT = Path(__file__).resolve().parents[3]
# -m would import the module a second time
RANK = "from decoding.models.distributed.rank_process import main; main()"
_GRACE_SECONDS = 5.0


class Ranks:
    """All ranks of a target but the first, which is this process."""

    def __init__(self, name: str, setup: RankSetup, devices: Sequence[str]) -> None:
        """Start the processes on their devices; `connect` waits for them.

        name: the target's name. setup: rank 0's setup.
        """
        self.name, self.size, self._kind = name, setup.shard.size, setup.shard.kind
        self.processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._links: list[Link] = []  # at most one; a list, so that `_end` gets a link added later
        self._fault = ""  # reason why the ranks cannot be used any more
        self._threads = self._usual_threads = setup.threads
        meeting = "" if setup.link == "sockets" else tempfile.mkdtemp()
        self._end = weakref.finalize(self, _end, self._pipes, self.processes, self._links, meeting)
        uses_sockets = setup.link == "sockets"
        self._mesh = socket_mesh(self.size) if uses_sockets else [{} for _ in range(self.size)]
        self.setup = replace(setup, meeting_file=str(Path(meeting, "ranks")))
        for rank in range(1, self.size):
            shard = Shard(self._kind, rank, self.size)
            self._start(replace(self.setup, shard=shard, device=devices[rank]), self._mesh[rank])

    def _start(self, setup: RankSetup, sockets: dict[int, socket.socket]) -> None:
        ours, theirs = Pipe()
        numbers = {rank: one.fileno() for rank, one in sockets.items()}
        environment = {**os.environ, "OMP_NUM_THREADS": str(setup.threads)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", RANK, str(theirs.fileno())]
        handed = [theirs.fileno(), *numbers.values()]
        # a new session, so that Ctrl-C reaches this process only
        self.processes.append(
            subprocess.Popen(command, pass_fds=handed, env=environment, start_new_session=True)
        )
        theirs.close()
        for one in sockets.values():
            one.close()
        self._pipes.append(ours)
        ours.send(replace(setup, sockets=numbers))

    def connect(self) -> Link:
        """Wait until every rank has its weights; return the link to them.

        Raises UserError if a rank could not load.
        """
        self.wait()
        sockets = {rank: one.detach() for rank, one in self._mesh[0].items()}
        self._links.append(connect(replace(self.setup, sockets=sockets)))
        # on a GPU a collective would wait forever for a rank that has ended
        if self.setup.link != "sockets":
            for process in self.processes:
                arguments = (process, self._links)
                threading.Thread(target=_close_after, args=arguments, daemon=True).start()
        return self._links[0]

    def call(self, name: str, *arguments: Any) -> None:
        """Make every other rank call a method (see `rank_process.serve`), without waiting."""
        for pipe in self._pipes:
            pipe.send((name, arguments))

    def wait(self) -> None:
        """Wait until every other rank has answered; raise UserError if one reports an error."""
        for pipe in self._pipes:
            kind, value = pipe.recv()
            if kind == "error":
                raise UserError(value)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Return a context for one step of all ranks, with this rank's share of the threads.

        An exception within it ends the ranks. Raises UserError if a rank has ended.
        """
        if self._fault:
            raise UserError(self._fault)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        except BaseException as error:
            ended = _first_ended(self.processes) if isinstance(error, Exception) else None
            self._close(
                f"the {self.size} processes of {self.name} were ended after a failure. Load the "
                f"target again."
            )
            if ended is None or isinstance(error, UserError):
                raise
            status = self.processes[ended].returncode or 0
            self._fault = (
                f"rank {ended + 1} of the {self.size} processes of {self.name} "
                f"{_describe_status(status)}; its output is above. The other ranks were ended. "
                f"Load the target again."
            )
            raise UserError(self._fault) from error
        finally:
            torch.set_num_threads(threads)

    @property
    def running(self) -> bool:
        """Whether the ranks can be used: false after `close` or a failure."""
        return not self._fault

    def bind(self, cores: Sequence[int]) -> list[int]:
        """Give each rank a share of these processor cores, with at most one thread per core.

        Returns rank 0's share, which the caller applies. Raises UserError if there are fewer cores
        than ranks. `unbind` reverts the binding.
        """
        if len(cores) < self.size:
            raise UserError(
                f"{self.name} runs in {self.size} processes, but the drafter's worker leaves them "
                f"{len(cores)} processor cores. Set the drafter's draft_cores=0 to share all "
                f"cores, or run on more cores."
            )
        ranks = [Shard(self._kind, rank, self.size) for rank in range(self.size)]
        shares = [list(cores)[rank.span(len(cores))] for rank in ranks]
        self._bind(shares, min(self._usual_threads, *map(len, shares)))
        return shares[0]

    def unbind(self, cores: Sequence[int]) -> None:
        """Let every rank run on all these cores, with its initial number of threads."""
        self._bind([list(cores)] * self.size, self._usual_threads)

    def _bind(self, shares: Sequence[list[int]], threads: int) -> None:
        self._threads = threads
        with self.together():
            for pipe, share in zip(self._pipes, shares[1:], strict=True):
                pipe.send(("bind", (share, threads)))

    def close(self) -> None:
        """End the other ranks, which makes the target unusable."""
        self._close(f"the processes of {self.name} were closed. Load the target again.")

    def _close(self, fault: str) -> None:
        self._fault = fault
        self._end()


def _close_after(process: "subprocess.Popen[bytes]", links: list[Link]) -> None:
    process.wait()
    for link in links:
        link.close()


def _first_ended(processes: "Sequence[subprocess.Popen[bytes]]") -> int | None:
    """Return the index of a process that has just ended, preferring one ended by a signal.

    The others end because of the rank that the signal ended. Returns None if no process ends within
    a second.
    """
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.05)
        ended = [index for index, process in enumerate(processes) if process.poll() is not None]
        if ended:
            return min(ended, key=lambda index: (processes[index].returncode or 0) >= 0)
    return None


def _describe_status(status: int) -> str:
    """Describe an exit status, which is -N for a process ended by signal N."""
    if status >= 0:
        return f"ended with status {status}"
    hint = " (often the machine's memory was full)" if -status == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"


def _end(
    pipes: list[Connection],
    processes: "list[subprocess.Popen[bytes]]",
    links: list[Link],
    meeting: str,
) -> None:
    for pipe in pipes:
        pipe.close()  # an idle rank ends when it reads the end of the pipe
    for link in links:
        link.close()  # a rank that waits for another one gets an error
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if meeting:
        shutil.rmtree(meeting, ignore_errors=True)
