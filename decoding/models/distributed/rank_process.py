"""One rank of a parallel target: a process that runs its part of the native target.

No arithmetic is duplicated. In tp a rank is a `NativeTarget` with fewer heads whose two output
products are summed over the ranks; in layers it has fewer layers, receives its input from the
previous rank and sends its output to the next. Rank 0 is the caller's process
(decoding/models/distributed/parallel.py, decoding/models/distributed/processes.py): it sends the
other ranks method calls. The only tensors that are exchanged are sums and hidden states.

Shapes: B rows, N new tokens, V vocabulary, C hidden size, I input size, O output size.
"""

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.distributed.links import Link
from decoding.models.distributed.shards import (
    RankSetup,
    Shard,
    connect,
    layer_span,
    local_config,
    read_shard,
)
from decoding.models.folder import read_config
from decoding.models.native.linear import Linear, can_pack
from decoding.models.native.model import NativeTarget
from decoding.models.native.weights import NativeConfig, Weights

Array = np.ndarray[Any, Any]
# methods of every rank's target that rank 0 calls by name
CACHE_METHODS = ("commit", "truncate", "select", "add_rows", "keep", "begin", "forget")


class SummedLinear:
    """A matrix product whose input is split over the ranks; their results are summed."""

    def __init__(self, inner: Linear, link: Link) -> None:
        self.inner, self.link = inner, link

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self.link.reduce(self.inner(x_NI))


class GatheredLinear:
    """A matrix product whose output is split over the ranks and gathered on rank 0."""

    def __init__(self, inner: Linear, link: Link, shard: Shard, num_outputs: int) -> None:
        self.inner, self.link, self.rank = inner, link, shard.rank
        ranks = [Shard(shard.kind, rank, shard.size) for rank in range(shard.size)]
        spans = [rank.span(num_outputs) for rank in ranks]
        self.sizes = [span.stop - span.start for span in spans]

    def __call__(self, x_NI: Tensor) -> Tensor:
        part_NO = self.inner(x_NI)
        if self.rank:
            self.link.send(part_NO, 0)
            return part_NO
        parts = [part_NO]
        for rank, size in enumerate(self.sizes[1:], 1):
            parts.append(self.link.receive(part_NO.new_empty(*part_NO.shape[:-1], size), rank))
        return torch.cat(parts, -1)


class PipelineStage(NativeTarget):
    """A rank with some of the layers; hidden states enter and leave the model on rank 0."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        max_length: int | None,
        link: Link,
        shard: Shard,
        spans: Sequence[range],
    ) -> None:
        """Wrap this rank's weights.

        spans: the layers of every rank.
        """
        super().__init__(weights, name, max_length, execution="eager")
        self.link, self.shard, self.spans = link, shard, spans
        self.num_layers = spans[-1].stop

    def through_layers(
        self,
        x_BNC: Tensor,
        parents_BN: Tensor | None,
        taps: tuple[int, ...],
        states: dict[int, Tensor],
    ) -> Tensor:
        """Run the model's layers on rank 0, and this rank's layers elsewhere.

        Elsewhere x_BNC is only the buffer for the input. After the last layer the other ranks send
        the hidden states at their taps to rank 0.
        """
        rank, size, first = self.shard.rank, self.shard.size, self.spans[self.shard.rank].start
        if rank:
            x_BNC = self.link.receive(x_BNC, rank - 1)
        mine = self._taps_of(rank, taps)
        found: dict[int, Tensor] = {}
        x_BNC = super().through_layers(x_BNC, parents_BN, tuple(tap - first for tap in mine), found)
        self.link.send(x_BNC, (rank + 1) % size)
        if rank:
            for tap in mine:
                self.link.send(found[tap - first], 0)
            return x_BNC
        states.update(found)
        x_BNC = self.link.receive(torch.empty_like(x_BNC), size - 1)
        for other in range(1, size):
            for tap in self._taps_of(other, taps):
                states[tap] = self.link.receive(torch.empty_like(x_BNC), other)
        return x_BNC

    def _taps_of(self, rank: int, taps: tuple[int, ...]) -> list[int]:
        """Return the taps after a rank's layers; rank 0 also has the embedding's output.

        The state after the final norm is computed on rank 0 later.
        """
        span = self.spans[rank]
        known = range(span.start + 1 if rank else 0, min(span.stop + 1, self.num_layers))
        return [tap for tap in taps if tap in known]


def load_part(setup: RankSetup) -> tuple[Weights, int]:
    """Return a rank's weights and the number of parameters of the complete model.

    Raises UserError for a damaged folder.
    """
    config, shard = NativeConfig.from_dict(read_config(setup.folder)), setup.shard
    state, parameters = read_shard(setup.folder, config, shard)
    place = torch.device(setup.device)
    has_ends = shard.kind == "tp" or shard.rank == 0
    packed, config = can_pack(place, setup.dtype), local_config(config, shard)
    return Weights(config, state, setup.dtype, place, packed, has_ends), parameters


def join(weights: Weights, setup: RankSetup, name: str, link: Link) -> NativeTarget:
    """Return a rank's target, whose products or layers exchange tensors with the other ranks."""
    if setup.shard.kind == "layers":
        config, shard = NativeConfig.from_dict(read_config(setup.folder)), setup.shard
        spans = [
            layer_span(config, Shard("layers", rank, shard.size)) for rank in range(shard.size)
        ]
        return PipelineStage(weights, name, setup.max_length, link, shard, spans)
    for layer in weights.layers:
        layer.out, layer.down = SummedLinear(layer.out, link), SummedLinear(layer.down, link)
    weights.head = GatheredLinear(weights.head, link, setup.shard, weights.config.vocab_size)
    return NativeTarget(weights, name, setup.max_length, execution="eager")


class _Rank:
    """The methods that rank 0 calls on another rank."""

    def __init__(
        self, target: NativeTarget, setup: RankSetup, link: Link, pipe: Connection
    ) -> None:
        self.target, self.setup, self.link, self.pipe = target, setup, link, pipe

    def open(self, batch_size: int, capacity: int) -> None:
        self.target.open(batch_size, capacity)
        self.pipe.send(("value", None))  # rank 0 waits, so that it can report insufficient memory

    def run(
        self,
        tokens_BN: Array,
        parents_BN: Array | None,
        taps: tuple[int, ...],
        with_head: bool,
    ) -> None:
        device = self.target.device
        parents = None if parents_BN is None else torch.from_numpy(parents_BN).to(device)
        if isinstance(self.target, PipelineStage):
            room_BNC = self._buffer((*tokens_BN.shape, self.target.hidden_size))
            self.target.through_layers(room_BNC, parents, taps, {})
            return
        hidden_BNC = self.target.features(torch.from_numpy(tokens_BN).to(device), parents)
        if with_head:
            self.target.lm_head(hidden_BNC)

    def head(self, shape: Sequence[int]) -> None:
        self.target.lm_head(self.link.receive(self._buffer(shape), 0))

    def _buffer(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(*shape, dtype=self.setup.dtype, device=self.target.device)

    def bind(self, cores: Sequence[int], threads: int) -> None:
        bind_threads(cores)
        torch.set_num_threads(threads)


def bind_threads(cores: Sequence[int]) -> None:
    """Bind every thread of this process to these cores."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


@torch.inference_mode()
def serve(pipe: Connection) -> None:
    """Answer rank 0's calls until it closes the pipe."""
    setup: RankSetup = pipe.recv()
    torch.set_num_threads(setup.threads)
    try:
        weights, _ = load_part(setup)
    except UserError as error:
        pipe.send(("error", str(error)))
        return
    pipe.send(("value", None))
    link = connect(setup)
    target = join(weights, setup, "", link)
    rank = _Rank(target, setup, link, pipe)
    methods: dict[str, Callable[..., None]] = {
        **{name: getattr(rank, name) for name in ("open", "run", "head", "bind")},
        **{name: getattr(target, name) for name in CACHE_METHODS},
    }
    try:
        while True:
            try:
                name, arguments = pipe.recv()
            except EOFError:
                return
            methods[name](*arguments)
    except OSError as error:
        sys.exit(f"rank {setup.shard.rank} of the target ends: {error}")
    finally:
        link.close()


def main() -> None:
    """Run the rank's process; its argument is the file descriptor of its pipe."""
    serve(Connection(int(sys.argv[1])))
