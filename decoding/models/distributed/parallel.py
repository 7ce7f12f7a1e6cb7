"""A target split over several processes: tensor parallel (`tp`), or some layers each (`layers`).

This process is rank 0 and implements `Target`; it sends its calls to the other ranks, which
decoding/models/distributed/processes.py starts (decoding/models/distributed/rank_process.py is
their program). On a CPU the ranks share this process's threads; on GPUs rank i uses the i-th GPU
after the target's. There is no `partial`: a drafter that runs some of the target's layers needs a
target in one process.

Shapes: B rows, N new tokens, L tokens of a path, V vocabulary, C hidden size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from decoding.interfaces import ChainCall, Chooser, VerifyCall
from decoding.models.distributed.processes import Ranks
from decoding.models.distributed.rank_process import join, load_part
from decoding.models.distributed.shards import KINDS, RankSetup, Shard, check_divisible
from decoding.models.folder import read_config
from decoding.models.hub import name_of
from decoding.models.native.weights import NativeConfig
from decoding.models.taps import check_taps
from decoding.values import check_choice

PARALLEL = ("none", *KINDS)


def processes_of(parallel: str, processes: int, backend: str, device: str) -> int:
    """Return the number of processes of a target, 1 if it is not split.

    processes: 0 is one per GPU from `device` on. device: cpu, cuda or cuda:N. Raises UserError if
    the settings are inconsistent or there are too few GPUs.
    """
    check_choice("parallel", parallel, PARALLEL)
    if parallel == "none":
        if processes > 1:
            raise UserError(
                f"processes is {processes} with parallel=none, expected 0 or 1. Use parallel=tp or "
                f"parallel=layers."
            )
        return 1
    if backend != "native":
        raise UserError(
            f"parallel={parallel} needs the native backend, found {backend}. Use backend=native or "
            f"parallel=none."
        )
    cards = devices.count_gpus() - _first_card(device) if device.startswith("cuda") else 0
    wanted = processes or cards
    if wanted < 2:
        found = f"processes={processes}" if processes else f"{cards} GPUs for device={device}"
        raise UserError(
            f"parallel={parallel} needs at least 2 processes, found {found}. Set processes=2 or "
            f"more, or parallel=none."
        )
    if device.startswith("cuda") and cards < wanted:
        raise UserError(
            f"parallel={parallel} with processes={wanted} needs {wanted} GPUs starting at "
            f"{device}, found {cards}. Use "
            f"{f'processes={cards}' if cards > 1 else 'parallel=none'}."
        )
    return wanted


class ParallelTarget:
    """A `Target` whose weights and work are split over processes."""

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
        """Start the ranks and load their parts.

        kind: tp or layers. link: sockets, gloo or nccl (decoding/models/distributed/links.py); None
        is sockets on a CPU and nccl on GPUs. Raises UserError for a model that cannot be split, a
        damaged folder, and a rank that cannot start.
        """
        config = NativeConfig.from_dict(read_config(folder))
        check_divisible(config, kind, processes, str(folder))
        self.name = name_of(folder)
        self.backend = f"native ({kind} over {processes} processes)"
        self.num_layers, self.vocab_size = config.num_layers, config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_length = max_length or config.max_positions
        self.devices = _devices(device, processes)
        self.device, self.dtype = torch.device(self.devices[0]), str(dtype).removeprefix("torch.")
        self._cuts_head = kind == "tp"
        threads = max(1, torch.get_num_threads() // processes)
        link = link or ("nccl" if self.device.type == "cuda" else "sockets")
        shard, place = Shard(kind, 0, processes), self.devices[0]
        setup = RankSetup(str(folder), shard, dtype, place, self.max_length, threads, link)
        self.ranks = Ranks(self.name, setup, self.devices)
        with self.ranks.together():
            weights, self.num_parameters = load_part(setup)  # while the others load theirs
            self._link = self.ranks.connect()
            self._target = join(weights, setup, self.name, self._link)

    @property
    def lengths_B(self) -> list[int]:
        """Number of committed tokens in the cache of each row."""
        return self._target.lengths_B

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """Start empty rows; every rank allocates its part of the cache."""
        capacity = capacity or self.max_length
        with self.ranks.together():
            self.ranks.call("open", batch_size, capacity)
            self._target.open(batch_size, capacity)
            self.ranks.wait()

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        self._check(tokens_BN, taps)
        with self.ranks.together():
            self.ranks.call("run", *_arrays(tokens_BN, parents_BN), taps, True)
            return self._target.forward(tokens_BN, parents_BN, taps)

    def chain_call(self, num_tokens: int) -> ChainCall | None:
        """Return None: the processes meet at every step (see `Target.chain_call`)."""
        return None

    def verify_call(self, chooser: Chooser) -> VerifyCall | None:
        """Return None: chains are verified in Python (see `Target.verify_call`)."""
        return None

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        self._check(tokens_BN, taps)
        with self.ranks.together():
            self.ranks.call("run", *_arrays(tokens_BN, parents_BN), taps, False)
            return self._target.features(tokens_BN, parents_BN, taps)

    def _check(self, tokens_BN: Tensor, taps: tuple[int, ...]) -> None:
        """Raise the errors that a rank would raise, before the other ranks begin."""
        check_taps(self, taps)
        self._target.slots.end_of(tokens_BN.shape[1])

    def _on_all_ranks(self, name: str, *arguments: Any) -> None:
        """Call a method of every rank's target without waiting for the other ranks."""
        with self.ranks.together():
            self.ranks.call(name, *arguments)
            getattr(self._target, name)(*arguments)

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        self._on_all_ranks("commit", paths_BL, list(counts_B))

    def truncate(self, lengths_B: Sequence[int]) -> None:
        self._on_all_ranks("truncate", list(lengths_B))

    def select(self, rows: Sequence[int]) -> None:
        self._on_all_ranks("select", list(rows))

    def add_rows(self, count: int) -> None:
        self._on_all_ranks("add_rows", count)

    def keep(self, row: int, name: int) -> None:
        self._on_all_ranks("keep", row, name)

    def begin(self, row: int, name: int, length: int) -> None:
        self._on_all_ranks("begin", row, name, length)

    def forget(self) -> None:
        self._on_all_ranks("forget")

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., C) of token ids, from rank 0's complete table."""
        return self._target.embed(ids)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states after the final norm."""
        if not self._cuts_head:
            return self._target.lm_head(hidden)
        with self.ranks.together():
            self.ranks.call("head", tuple(hidden.shape))
            for rank in range(1, self.ranks.size):
                self._link.send(hidden, rank)
            return self._target.lm_head(hidden)

    def close(self) -> None:
        """End the other ranks, which also end with this process and this object."""
        self.ranks.close()


def device_for_drafter(target: Any) -> str:
    """Return the device of a drafter that runs at the same time as the target.

    It is the first free GPU after the target's last, else the first free one before it, else the
    target's device.
    """
    used = target.devices if isinstance(target, ParallelTarget) else [str(target.device)]
    if not used[0].startswith("cuda"):
        return used[0]
    taken = {_first_card(device) for device in used}
    cards = (*range(max(taken), devices.count_gpus()), *range(max(taken)))
    free = [card for card in cards if card not in taken]
    return f"cuda:{free[0]}" if free else used[0]


def _first_card(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _devices(device: str, size: int) -> list[str]:
    if not device.startswith("cuda"):
        return [device] * size
    return [f"cuda:{_first_card(device) + rank}" for rank in range(size)]


def _arrays(tokens_BN: Tensor, parents_BN: Tensor | None) -> tuple[Any, Any]:
    """Return token ids and parents as arrays for the pipe; on a GPU this waits for the device."""
    return tokens_BN.cpu().numpy(), None if parents_BN is None else parents_BN.cpu().numpy()
