"""What the head reads of the frozen target: its embedding, its lm_head, and at the positions that are asked for its hidden states, and what it
goes on with where that is asked for too.

The target is the same at every epoch, so its states may be kept: in memory up to a limit, or in a file whose size is known before the first
step. With a cache the target reads one row a forward, so that a row's states do not hang on its neighbours and a resumed run equals a
straight one bit for bit. Tokens that the target goes on with are kept behind a position's states, by their bytes.

Shapes: P positions, H hidden size, K tokens that the target goes on with, V vocabulary.
"""

import hashlib
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from decoding.errors import UserError
from recurrent_drafting.continuations import go_on
from recurrent_drafting.positions import Positions, positions
from training.objectives import hidden_states
from training.packing import Batch, PackedData, collate

Key = tuple[int, ...]  # the samples in a row


class Store(Protocol):
    """Where states of rows are kept."""

    def get(self, key: Key) -> Tensor | None: ...

    def put(self, key: Key, states_PH: Tensor) -> None: ...


class TargetStates:
    """The frozen target as the head sees it. No submodule of an objective, and the same one in every copy of it."""

    def __init__(self, target: Any, store: Store | None = None) -> None:
        """target: a Hugging Face causal LM with packed attention, before ranks cut it."""
        self.target = target
        self.store = store
        self._embedding_VH: Tensor = target.get_input_embeddings().weight.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TargetStates":
        return self

    @property
    def lm_head(self) -> Tensor:
        """[V, H]."""
        weight = self.target.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    def placed(self, device: torch.device) -> None:
        """To be called when the target has its place: ranks that cut it keep the embedding whole."""
        weight = self.target.get_input_embeddings().weight
        self._embedding_VH = self._embedding_VH.to(device) if isinstance(weight, DTensor) else weight.detach()

    def embed(self, ids: Tensor) -> Tensor:
        """The target's own embeddings of tokens, [..., H]."""
        return F.embedding(ids, self._embedding_VH)

    @torch.no_grad()
    def read(self, batch: Batch, where: Positions) -> Tensor:
        """The hidden states at where.kept_P, [P, H], by a forward."""
        return hidden_states(self.target, batch).flatten(0, 1)[where.kept_P]

    @torch.no_grad()
    def __call__(self, batch: Batch, where: Positions) -> Tensor:
        """The same for training data: from the store where they are kept, and kept there."""
        return self.read(batch, where) if self.store is None else self._rows(batch, where, 0)

    @torch.no_grad()
    def go_on(self, batch: Batch, where: Positions, count: int) -> tuple[Tensor, Tensor]:
        """(the hidden states at where.kept_P, the target's `count` likeliest tokens behind each [P, K]), as kept as states are."""
        rows, H = self._rows(batch, where, count), self._embedding_VH.shape[1]
        return rows[:, :H], rows[:, H:].contiguous().view(torch.int64)

    def _rows(self, batch: Batch, where: Positions, count: int) -> Tensor:
        """What is kept of a batch's positions, row by row: states, and behind them `count` tokens by their bytes."""
        ends = np.cumsum(where.kept_R).tolist()
        length = batch.ids_RT.shape[1]
        rows = []
        for index, (end, kept) in enumerate(zip(ends, where.kept_R, strict=True)):
            kept_P = where.kept_P[end - kept : end] - index * length
            rows.append(self._row(batch, index, kept_P, count) if kept else self._none(count))
        return torch.cat(rows)

    def _none(self, count: int) -> Tensor:
        """Of a rank that a step left without a row."""
        width = self._embedding_VH.shape[1] + said_width(count, self._embedding_VH.dtype)
        return self._embedding_VH.new_zeros(0, width)

    def _row(self, batch: Batch, index: int, kept_P: Tensor, count: int) -> Tensor:
        found = None if self.store is None else self.store.get(batch.rows[index])
        if found is not None:
            return found.to(kept_P.device, non_blocking=True)
        if count:
            states_PH, tokens_PK = go_on(self.target, batch.row(index), kept_P, count)
            made = torch.cat((states_PH, tokens_PK.view(states_PH.dtype)), dim=1)
        else:
            made = hidden_states(self.target, batch.row(index))[0][kept_P]
        if self.store is not None:
            self.store.put(batch.rows[index], made)
        return made


def said_width(count: int, dtype: torch.dtype) -> int:
    """Values of this dtype that hold `count` tokens (int64)."""
    return count * torch.int64.itemsize // dtype.itemsize


class MemoryStore:
    """States on the device they were made on, up to a number of bytes; what comes later is made anew."""

    def __init__(self, limit_bytes: int) -> None:
        self.free_bytes = limit_bytes
        self._known: dict[Key, Tensor] = {}

    def get(self, key: Key) -> Tensor | None:
        return self._known.get(key)

    def put(self, key: Key, states_PH: Tensor) -> None:
        size = states_PH.numel() * states_PH.element_size()
        if size <= self.free_bytes:
            self.free_bytes -= size
            self._known[key] = states_PH


class DiskStore:
    """States of all rows of a data set in one file, its room taken at the start; beside it a checksum for every row that is written.

    Ranks share the folder; all make the same files. A row whose checksum is wrong (of a run that was killed while it wrote) is made anew.
    """

    def __init__(
        self, folder: Path, rows: Sequence[Key], counts: Sequence[int], width: int, dtype: torch.dtype
    ) -> None:
        """counts: positions kept of each row. Raises UserError where the disk has no room."""
        self._dtype, self._width = dtype, width
        ends = np.cumsum(np.asarray(counts, dtype=np.int64) * width * dtype.itemsize)
        self._places = {
            key: (number, int(end) - count * width * dtype.itemsize, int(end))
            for number, (key, count, end) in enumerate(zip(rows, counts, ends, strict=True))
        }
        total = int(ends[-1])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "states.bin"
        _take_room(path, total)
        _take_room(folder / "checksums.bin", 4 * len(rows))
        self._bytes = torch.from_file(str(path), shared=True, size=total, dtype=torch.uint8)
        self._sums = np.memmap(folder / "checksums.bin", dtype=np.uint32, mode="r+", shape=(len(rows),))

    def get(self, key: Key) -> Tensor | None:
        number, begin, end = self._places[key]
        if self._sums[number] == 0 or self._sums[number] != _checksum(self._bytes[begin:end]):
            return None
        return self._bytes[begin:end].clone().view(self._dtype).view(-1, self._width)

    def put(self, key: Key, states_PH: Tensor) -> None:
        number, begin, end = self._places[key]
        self._bytes[begin:end] = states_PH.contiguous().cpu().flatten().view(torch.uint8)
        self._sums[number] = _checksum(self._bytes[begin:end])


def states_on_disk(
    root: Path, target_hash: str, data: PackedData, heads: int, judged: bool, width: int, dtype: torch.dtype, show: bool
) -> DiskStore:
    """The store of a target and its training data under `root`, with its price printed before its room is taken. Raises UserError.

    width: values of a position, as `said_width` counts the tokens behind its states.
    """
    keys = sorted(tuple(row) for row in data.rows)
    batches = (collate(data.samples, [key], data.capacity) for key in keys)
    counts = [len(positions(batch, heads, judged).kept_P) for batch in batches]
    digest = hashlib.sha256(f"{target_hash} {heads} {judged} {width} {dtype} {keys}".encode())
    for sample in data.samples:
        digest.update(sample.ids.tobytes() + sample.mask.tobytes())
    folder = root / digest.hexdigest()[:16]
    size = sum(counts) * width * dtype.itemsize
    if show:
        print(
            f"states: {sum(counts):,} of {data.tokens:,} positions, {size / 1e9:,.2f} GB on disk in {folder} "
            f"({_free_bytes(root) / 1e9:,.1f} GB free); later epochs and other runs on this data skip the target"
        )
    return DiskStore(folder, keys, counts, width, dtype)


def _take_room(path: Path, size: int) -> None:
    """Make the file `size` bytes long with all its room taken; what it holds already stays. Raises UserError where there is too little."""
    held = path.stat().st_blocks * 512 if path.exists() else 0
    free = _free_bytes(path.parent)
    if size - held > free:
        raise UserError(
            f"{path} needs {size / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free there: give states.folder on another disk, or states.cache=memory"
        )
    with path.open("ab") as file:
        if hasattr(os, "posix_fallocate"):  # macOS has none: its file grows as rows come
            os.posix_fallocate(file.fileno(), 0, max(1, size))
        file.truncate(max(1, size))


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())).free


def _checksum(part: Tensor) -> int:
    """CRC-32 of the bytes, never 0, which stands for a row that was not written."""
    return zlib.crc32(part.numpy().data) or 1
