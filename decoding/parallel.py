"""A target over several devices: tensor parallel (`tp`) or a run of layers each (`layers`), in ranks that it starts itself.

This process is rank 0 and has the whole interface of `Target`; the other ranks are processes that follow it (decoding/parallel_rank.py).
On a CPU the ranks share this process's threads, on GPUs rank i has the card i places after the target's. The ranks end with this object,
or with this process, however it ends.

Shapes: B rows, N new tokens, L tokens of a path, V vocabulary, C hidden size.
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
from torch import Tensor

from decoding.errors import UserError
from decoding.folder import read_config
from decoding.links import LINKS, Link, socket_mesh
from decoding.parallel_rank import Setup, connect, join, load_part
from decoding.shards import KINDS, Shard, check_divisible
from decoding.weights import NativeConfig

ROOT = Path(__file__).resolve().parent.parent
PARALLEL = ("none", *KINDS)
_GRACE_SECONDS = 5.0
Ended = "subprocess.Popen[bytes]"


def processes_of(parallel: str, processes: int, backend: str, device: str) -> int:
    """How many processes run a target, 1 where it is not split. device: cpu, cuda or cuda:N.

    Raises UserError where the settings contradict each other or the machine.
    """
    if parallel not in PARALLEL:
        raise UserError(f"parallel '{parallel}' is unknown, expected one of {', '.join(PARALLEL)}.")
    if parallel == "none":
        if processes > 1:
            raise UserError(f"processes is {processes} with parallel=none: take parallel=tp or parallel=layers.")
        return 1
    if backend != "native":
        raise UserError(f"parallel={parallel} splits a target of the native backend, not of {backend}: take native.")
    cards = torch.cuda.device_count() - _first_card(device) if device.startswith("cuda") else 0
    wanted = processes or cards
    if wanted < 2:
        found = f"processes is {processes}" if processes else f"{cards} GPUs are free from {device} on"
        raise UserError(f"parallel={parallel} needs processes=N, 2 or more; {found}.")
    if device.startswith("cuda") and cards < wanted:
        raise UserError(
            f"parallel={parallel} over {wanted} processes needs as many GPUs from {device} on; found {cards}."
        )
    return wanted


class ParallelTarget:
    """A `Target` (decoding/target.py) whose weights and work are split over processes."""

    def __init__(
        self,
        folder: str | Path,
        *,
        kind: str,
        processes: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_length: int | None = None,
        link: str | None = None,
    ) -> None:
        """kind: tp or layers. link: one of decoding.links.LINKS; None takes sockets on a CPU and nccl on GPUs.

        Raises UserError for a model that cannot be split so, a damaged folder, and a rank that cannot start.
        """
        config = NativeConfig.from_dict(read_config(folder))
        check_divisible(config, kind, processes, str(folder))
        link = link or ("nccl" if device.startswith("cuda") else "sockets")
        assert link in LINKS
        self.name, self.backend = Path(folder).resolve().name, f"native ({kind} over {processes} processes)"
        self.num_layers, self.size = config.num_layers, processes
        self.vocab_size, self.hidden_size, self._kind = config.vocab_size, config.hidden_size, kind
        self.max_length = max_length or config.max_positions
        self.dtype, self.devices = str(dtype).removeprefix("torch."), _devices(device, processes)
        self.device = torch.device(self.devices[0])
        self._threads = self._usual_threads = max(1, torch.get_num_threads() // processes)
        self._fault = ""
        meeting = tempfile.mkdtemp() if link != "sockets" else ""
        setup = Setup(str(folder), Shard(kind, 0, processes), dtype, self.devices[0], self.max_length, self._threads,
                      link, str(Path(meeting, "ranks")), {})  # fmt: skip
        mesh = socket_mesh(processes) if link == "sockets" else [{} for _ in range(processes)]
        self._pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Link] = []  # none or one; a list, so that `_end` sees it come
        self.close = weakref.finalize(self, _end, self._pipes, self.processes, self._links, meeting)
        for rank in range(1, processes):
            self._start(replace(setup, shard=Shard(kind, rank, processes), device=self.devices[rank]), mesh[rank])
        with self._together():
            weights, self.num_parameters = load_part(setup)
            for rank in range(1, processes):
                self._answer(rank)
            self._links.append(connect(replace(setup, sockets=_numbers(mesh[0], keep=True))))
            self._target = join(weights, setup, self.name, self._links[0])
        if link != "sockets":
            self._watch()

    def _start(self, setup: Setup, sockets: dict[int, socket.socket]) -> None:
        ours, theirs = Pipe()
        numbers = _numbers(sockets)
        environment = {**os.environ, "OMP_NUM_THREADS": str(setup.threads)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "decoding.parallel_rank", str(theirs.fileno())]
        # A session of its own: Ctrl-C is this process's to handle.
        self.processes.append(
            subprocess.Popen(
                command, pass_fds=[theirs.fileno(), *numbers.values()], env=environment, start_new_session=True
            )
        )
        theirs.close()
        for one in sockets.values():
            one.close()
        self._pipes.append(ours)
        ours.send(replace(setup, sockets=numbers))

    def _watch(self) -> None:
        """End the link when a rank ends: a collective on a GPU would wait for it for ever."""
        for process in self.processes:
            threading.Thread(target=_close_after, args=(process, self._links), daemon=True).start()

    @property
    def lengths_B(self) -> list[int]:
        """Committed tokens in the cache, by row."""
        return self._target.lengths_B

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """See `Target.open`; every rank allocates its part of the cache."""
        capacity = capacity or self.max_length
        with self._together():
            self._tell("open", batch_size, capacity)
            self._target.open(batch_size, capacity)
            for rank in range(1, self.size):
                self._answer(rank)

    def forward(self, tokens_BN: Tensor, parents_BN: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Target.forward`."""
        self._target.slots.end_of(tokens_BN.shape[1])  # refused here, before the other ranks begin
        with self._together():
            self._tell("run", *_arrays(tokens_BN, parents_BN), True)
            hidden_BNC = self._target.features(tokens_BN, parents_BN)
            return self._target.lm_head(hidden_BNC), hidden_BNC

    def features(self, tokens_BN: Tensor, parents_BN: Tensor | None = None) -> Tensor:
        """See `Target.features`."""
        self._target.slots.end_of(tokens_BN.shape[1])
        with self._together():
            self._tell("run", *_arrays(tokens_BN, parents_BN), False)
            return self._target.features(tokens_BN, parents_BN)

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        """See `Target.commit`; nothing is waited for."""
        with self._together():
            self._tell("commit", paths_BL, list(counts_B))
            self._target.commit(paths_BL, counts_B)

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """See `Target.truncate`."""
        with self._together():
            self._tell("truncate", list(lengths_B))
            self._target.truncate(lengths_B)

    def select(self, rows: Sequence[int]) -> None:
        """See `Target.select`."""
        with self._together():
            self._tell("select", list(rows))
            self._target.select(rows)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, (..., C); rank 0 has them all."""
        return self._target.embed(ids)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states after the final norm."""
        if self._kind == "layers":
            return self._target.lm_head(hidden)
        with self._together():
            self._tell("head", tuple(hidden.shape))
            for rank in range(1, self.size):
                self._links[0].send(hidden, rank)
            return self._target.lm_head(hidden)

    def bind(self, cores: Sequence[int]) -> list[int]:
        """Give each rank its own share of these processor cores, one thread a core. Returns rank 0's, which its caller binds it to.

        Raises UserError where there are fewer cores than ranks. `unbind` takes it back.
        """
        if len(cores) < self.size:
            raise UserError(
                f"{self.name} runs in {self.size} processes, but the drafter's worker leaves them {len(cores)} processor cores: "
                "give the drafter draft_cores=0 (they share all cores), or run on more cores."
            )
        shares = [list(cores)[Shard(self._kind, rank, self.size).span(len(cores))] for rank in range(self.size)]
        self._bind(shares, min(map(len, shares)))
        return shares[0]

    def unbind(self, cores: Sequence[int]) -> None:
        """Let every rank run on all these cores, with the threads that it began with."""
        self._bind([list(cores)] * self.size, self._usual_threads)

    def _bind(self, shares: Sequence[list[int]], threads: int) -> None:
        self._threads = threads
        with self._together():
            for pipe, share in zip(self._pipes, shares[1:], strict=True):
                pipe.send(("bind", (share, threads)))

    def _tell(self, name: str, *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((name, arguments))

    def _answer(self, rank: int) -> None:
        kind, value = self._pipes[rank - 1].recv()
        if kind == "error":
            raise UserError(value)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do. One that fails or is interrupted in the midst of it leaves them out of step: it ends them all."""
        if self._fault:
            raise UserError(self._fault)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        except BaseException as error:
            ended = _first_ended(self.processes) if isinstance(error, Exception) else None
            self.close()
            self._fault = f"{self.name}: the target's {self.size} processes were ended after a failure. Load it again."
            if ended is None or isinstance(error, UserError):
                raise
            self._fault = (
                f"rank {ended + 1} of the {self.size} of {self.name} {_how(self.processes[ended].returncode)}; its last words "
                "stand above, the other ranks were ended. Load the target again."
            )
            raise UserError(self._fault) from error
        finally:
            torch.set_num_threads(threads)


def device_beside(target: Any) -> str:
    """Where a drafter that runs at the same time as the target belongs: the card after the target's last, else the target's own."""
    devices = target.devices if isinstance(target, ParallelTarget) else [str(target.device)]
    if not devices[0].startswith("cuda"):
        return devices[0]
    following = max(_first_card(device) for device in devices) + 1
    return f"cuda:{following}" if following < torch.cuda.device_count() else devices[0]


def _first_card(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _devices(device: str, size: int) -> list[str]:
    if not device.startswith("cuda"):
        return [device] * size
    return [f"cuda:{_first_card(device) + rank}" for rank in range(size)]


def _numbers(sockets: dict[int, socket.socket], keep: bool = False) -> dict[int, int]:
    """File descriptors by rank. keep: they are taken out of their objects, which are done with."""
    return {rank: one.detach() if keep else one.fileno() for rank, one in sockets.items()}


def _arrays(tokens_BN: Tensor, parents_BN: Tensor | None) -> tuple[Any, Any]:
    """Token ids for the pipe. From a GPU that waits for them, once a forward."""
    return tokens_BN.cpu().numpy(), None if parents_BN is None else parents_BN.cpu().numpy()


def _close_after(process: "subprocess.Popen[bytes]", links: list[Link]) -> None:
    process.wait()
    for link in links:
        link.close()


def _first_ended(processes: "Sequence[subprocess.Popen[bytes]]") -> int | None:
    """Index of a process that ended within a moment, rather one that a signal ended: it takes the others along."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.05)
        ended = [index for index, process in enumerate(processes) if process.poll() is not None]
        if ended:
            return min(ended, key=lambda index: (processes[index].returncode or 0) >= 0)
    return None


def _how(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    hint = " (often the machine's memory was full)" if -status == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"


def _end(pipes: list[Connection], processes: "list[subprocess.Popen[bytes]]", links: list[Link], meeting: str) -> None:
    for pipe in pipes:
        pipe.close()  # an idle rank reads the end of its requests, and ends
    for link in links:
        link.close()  # a rank that waits for another one is told
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if meeting:
        shutil.rmtree(meeting, ignore_errors=True)
