"""Where what the target says at the positions of training rows is kept: in memory up to a limit, or
in files whose size is known before the first step.

Shapes: P positions of a row, C channels of a state, K tokens that the target goes on with.
"""

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from jobs.amounts import size as amount
from training.data.packing import PackedData
from training.features.taps import Layers

Key = tuple[int, ...]  # the samples in a row


@dataclass(frozen=True, slots=True)
class RowStates:
    """What the target says at positions of a row."""

    states_PC: Tensor
    # int64: what it goes on with behind each, where that is asked for
    tokens_PK: Tensor | None = None

    @property
    def bytes(self) -> int:
        return sum(
            part.numel() * part.element_size()
            for part in (self.states_PC, self.tokens_PK)
            if part is not None
        )

    def sent(self, device: torch.device) -> "RowStates":
        """The same on a device, without waiting for it."""
        tokens_PK = None if self.tokens_PK is None else devices.sent(self.tokens_PK, device)
        return RowStates(devices.sent(self.states_PC, device), tokens_PK)


class Store(Protocol):
    """Where rows are kept."""

    def get(self, key: Key) -> RowStates | None: ...

    def put(self, key: Key, row: RowStates) -> None: ...


class MemoryStore:
    """Rows on the device they were made on, up to a number of bytes; what comes later
    is made anew.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.free_bytes = limit_bytes
        self._known: dict[Key, RowStates] = {}

    def get(self, key: Key) -> RowStates | None:
        return self._known.get(key)

    def put(self, key: Key, row: RowStates) -> None:
        if row.bytes <= self.free_bytes:
            self.free_bytes -= row.bytes
            self._known[key] = row


@dataclass(frozen=True)
class StoreLayout:
    """Which positions are kept, and what of each."""

    heads: int
    judged: bool  # positions of the target's own predictions too
    channels: int  # C
    dtype: torch.dtype  # of the states
    tokens: int = 0  # that the target goes on with behind each
    taps: Layers = ()  # layers that are read; none: the state after the final norm alone

    @property
    def bytes(self) -> int:
        """Of one position."""
        return self.channels * self.dtype.itemsize + self.tokens * torch.int64.itemsize


class DiskStore:
    """All rows of a data set: states in one file, tokens in another, whose room is taken at the
    start, and a checksum for every row that is written.

    Ranks share the folder; all make the same files. A row whose checksum is wrong (of a run that
    was killed while it wrote) is made anew. Writing a row waits for the device, in the first epoch
    alone.
    """

    def __init__(
        self, folder: Path, rows: Sequence[Key], counts: Sequence[int], layout: StoreLayout
    ) -> None:
        """counts: positions kept of each row. Raises UserError where the disk has no room, and for
        files of another layout.
        """
        self._numbers = {key: number for number, key in enumerate(rows)}
        states, tokens, sums = (
            folder / name for name in ("states.bin", "tokens.bin", "checksums.bin")
        )
        total = sum(counts)
        sizes = {states: total * layout.channels * layout.dtype.itemsize, sums: 4 * len(rows)}
        if layout.tokens:
            sizes[tokens] = total * layout.tokens * torch.int64.itemsize
        _check_layout(states, sizes[states])
        _take_room(folder, sizes)
        self._states = _RowFile(states, counts, layout.channels, layout.dtype)
        self._tokens = (
            _RowFile(tokens, counts, layout.tokens, torch.int64) if layout.tokens else None
        )
        self._sums = np.memmap(sums, dtype=np.uint32, mode="r+", shape=(len(rows),))

    def get(self, key: Key) -> RowStates | None:
        number = self._numbers[key]
        if self._sums[number] == 0 or self._sums[number] != self._checksum(number):
            return None
        return RowStates(
            self._states.read(number), None if self._tokens is None else self._tokens.read(number)
        )

    def put(self, key: Key, row: RowStates) -> None:
        number = self._numbers[key]
        self._states.write(number, row.states_PC)
        if self._tokens is not None:
            assert row.tokens_PK is not None
            self._tokens.write(number, row.tokens_PK)
        self._sums[number] = self._checksum(number)

    def _checksum(self, number: int) -> int:
        """CRC-32 of the row's bytes, never 0, which stands for a row that was not written."""
        found = self._states.checksum(number, 0)
        return (found if self._tokens is None else self._tokens.checksum(number, found)) or 1


class _RowFile:
    """One array of each row, [P, width], in a mapped file."""

    def __init__(self, path: Path, counts: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._ends = np.cumsum(
            np.asarray([0, *counts], dtype=np.int64) * width * dtype.itemsize
        ).tolist()
        self._bytes = torch.from_file(
            str(path), shared=True, size=self._ends[-1], dtype=torch.uint8
        )

    def read(self, number: int) -> Tensor:
        return self._of(number).clone().view(self._dtype).view(-1, self._width)

    def write(self, number: int, values: Tensor) -> None:
        self._of(number).copy_(values.contiguous().cpu().flatten().view(torch.uint8))

    def checksum(self, number: int, before: int) -> int:
        """CRC-32 of the row's bytes, behind those that gave `before`."""
        return zlib.crc32(self._of(number).numpy().data, before)

    def _of(self, number: int) -> Tensor:
        return self._bytes[self._ends[number] : self._ends[number + 1]]


def states_on_disk(
    root: Path,
    target_hash: str,
    data: PackedData,
    layout: StoreLayout,
    count: Callable[[np.ndarray], int],
    show: bool,
) -> DiskStore:
    """The store of a target and its training data under `root`, with its price printed before its
    room is taken. Raises UserError.

    count: positions that are kept of a document, by its mask.
    """
    keys = sorted(tuple(row) for row in data.rows)
    of_sample = [count(sample.mask) for sample in data.samples]
    counts = [sum(of_sample[index] for index in key) for key in keys]
    # What a position takes stands for its width, as in caches of before: those whose files are the
    # same are read on, others are found and refused.
    width = layout.bytes // layout.dtype.itemsize
    digest = hashlib.sha256(
        f"{target_hash} {layout.heads} {layout.judged} {width} {layout.dtype} {keys}".encode()
    )
    if layout.taps:
        digest.update(str(layout.taps).encode())
    for sample in data.samples:
        digest.update(sample.ids.tobytes() + sample.mask.tobytes())
    folder = root / digest.hexdigest()[:16]
    size = sum(counts) * layout.bytes
    if show:
        print(
            f"states: {sum(counts):,} of {data.tokens:,} positions, {amount(size)} on disk in "
            f"{folder} ({amount(_free_bytes(root))} free); later epochs and other runs on this "
            f"data skip the target"
        )
    return DiskStore(folder, keys, counts, layout)


def _check_layout(path: Path, size: int) -> None:
    """Raise UserError for a file that holds more than states. A smaller one is being made by
    another rank.
    """
    found = path.stat().st_size if path.exists() else 0
    if found > max(1, size):
        raise UserError(
            f"{path} has {found:,} bytes, expected {size:,}: an earlier version kept the target's "
            f"tokens in the same file as its states, and such a cache is not read. Delete the "
            f"folder {path.parent}; it is made anew"
        )


def _take_room(folder: Path, sizes: Mapping[Path, int]) -> None:
    """Make the files so many bytes long with all their room taken; what they hold already stays.
    Raises UserError where there is too little.
    """
    held = sum(path.stat().st_blocks * 512 for path in sizes if path.exists())
    free, size = _free_bytes(folder), sum(sizes.values())
    if size - held > free:
        raise UserError(
            f"{folder} needs {amount(size)}, {amount(free)} are free there: give states.folder on "
            f"another disk, or states.cache=memory"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, length in sizes.items():
        with path.open("ab") as file:
            if hasattr(os, "posix_fallocate"):  # macOS has none: its file grows as rows come
                os.posix_fallocate(file.fileno(), 0, max(1, length))
            file.truncate(max(1, length))


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(
        next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    ).free
