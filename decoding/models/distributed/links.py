"""Links by which the ranks of a parallel target exchange tensors.

`Sockets` is for CPU: a mesh of socket pairs, whose reader polls briefly before it sleeps. One sum
over two ranks took 10 to 40 microseconds, where gloo took 240 to 550 on the same two cores, and a
decoding step has two sums per layer. `Collectives` is torch.distributed: nccl between GPUs, and
gloo, with which the tests compare `Sockets`. Its process group is separate, so training may use the
default one.

Shapes: any; the tensors of one exchange have the same shape on all ranks.
"""

import os
import socket
import struct
from datetime import timedelta
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_SECONDS = 300  # maximum wait for another rank within a forward
# seconds of polling before sleeping: longer than a small product, too short to waste a core
SPIN_SECONDS = 2e-4
# Sent before reading: two chunks fit into a socket's buffer, so two senders never deadlock.
CHUNK_BYTES = 1 << 16


class Link(Protocol):
    """A rank's connection to the others; raises OSError or RuntimeError if another rank is gone."""

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, bit for bit equal on each; may overwrite x."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Send x to rank `to`, which calls `receive`."""
        ...

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill x with the tensor that rank `source` sends, and return x."""
        ...

    def close(self) -> None:
        """Close the link; ranks that wait at the other end get an error."""
        ...


class Sockets:
    """Link by stream sockets to all other ranks, which run on the same host."""

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        """Use the connected sockets to the other ranks, by rank."""
        self.rank, self.peers = rank, peers
        for peer in peers.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * CHUNK_BYTES)
            peer.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", TIMEOUT_SECONDS, 0)
            )

    def reduce(self, x: Tensor) -> Tensor:
        """Exchange all parts in chunks; each rank adds them in the order of the ranks."""
        x = x.contiguous()
        parts = {self.rank: x} | {rank: torch.empty_like(x) for rank in self.peers}
        mine, theirs = _bytes(x), {rank: _bytes(parts[rank]) for rank in self.peers}
        for start in range(0, len(mine), CHUNK_BYTES):
            chunk = mine[start : start + CHUNK_BYTES]
            for peer in self.peers.values():
                peer.sendall(chunk)
            for rank, into in theirs.items():
                self._read(rank, into[start : start + CHUNK_BYTES])
        total = parts[0]
        for rank in range(1, len(parts)):
            total = total + parts[rank]
        return total

    def send(self, x: Tensor, to: int) -> None:
        self.peers[to].sendall(_bytes(x.contiguous()))

    def receive(self, x: Tensor, source: int) -> Tensor:
        self._read(source, _bytes(x))
        return x

    def _read(self, rank: int, into: memoryview) -> None:
        peer, filled, patience = self.peers[rank], 0, perf_counter() + SPIN_SECONDS
        while filled < len(into):
            spinning = perf_counter() < patience
            try:
                count = peer.recv_into(into[filled:], 0, socket.MSG_DONTWAIT if spinning else 0)
            except BlockingIOError:
                if not spinning:
                    raise TimeoutError(
                        f"rank {rank} sent nothing for {TIMEOUT_SECONDS} seconds, expected a tensor"
                    ) from None
                os.sched_yield()  # ranks may share a core, which the other one needs to answer
                continue
            if count == 0:
                raise ConnectionResetError(f"rank {rank} closed its link, expected a tensor")
            filled += count

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()


def _bytes(x: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return x.view(-1).view(torch.uint8).numpy().data


def socket_mesh(size: int) -> list[dict[int, socket.socket]]:
    """Return for each rank its sockets to the others."""
    mesh: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            mesh[low][high], mesh[high][low] = socket.socketpair()
    return mesh


class Collectives:
    """Link by a process group of torch.distributed: gloo on the loopback device, or nccl."""

    def __init__(self, kind: str, rank: int, size: int, meeting_file: str) -> None:
        """Join the group through a new file whose path is equal on all ranks."""
        store = dist.FileStore(meeting_file, size)
        limit = timedelta(seconds=TIMEOUT_SECONDS)
        groups: Any = dist  # which groups exist depends on the build of torch
        if kind == "nccl":
            options = groups.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = groups.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = groups.ProcessGroupGloo._Options()
            options._devices = [groups.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = limit
            self._group = groups.ProcessGroupGloo(store, rank, size, options)

    def reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        self._group.send([x.contiguous()], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        self._group.recv([x], source, 0).wait()
        return x

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None
