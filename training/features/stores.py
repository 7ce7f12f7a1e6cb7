"""Stores of the target's features at training positions, in memory up to a limit or in files.

The size of the files is printed before they are created.

Shapes: C channels of a state, K tokens of a continuation, P positions of a row.
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
    """Features of the target at positions of a row."""

    states_PC: Tensor
    # continuations, int64, if the loss needs them
    tokens_PK: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """Return the tensors that a store keeps."""
        return [self.states_PC] + ([] if self.tokens_PK is None else [self.tokens_PK])

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def copy_to(self, device: torch.device) -> "RowStates":
        """Return a copy on a device, without waiting for the transfer."""
        return RowStates(*(devices.copy_to_device(part, device) for part in self.parts))


class Store(Protocol):
    """Storage of features by row."""

    def get(self, key: Key) -> RowStates | None: ...

    def put(self, key: Key, row: RowStates) -> None: ...


class MemoryStore:
    """Store on the rows' own device, up to `limit_bytes`; rows beyond it are recomputed."""

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
    """Rules that select the positions in a store, and the content of a position."""

    heads: int
    # includes the positions at which the target predicts
    uses_teacher: bool
    channels: int  # C
    dtype: torch.dtype  # of the states
    tokens: int = 0  # K
    # layers that are read; empty: only the state after the final norm
    taps: Layers = ()
    context: bool = False  # all tokens of a document

    @property
    def bytes(self) -> int:
        """Return the bytes per position."""
        return self.channels * self.dtype.itemsize + self.tokens * torch.int64.itemsize


class DiskStore:
    """Store of all rows of a data set in preallocated files: states, tokens and checksums by row.

    Ranks share the folder, and all create the same files. A row with a wrong checksum, left by a
    run that was killed while writing, is recomputed. Rows are written in the first epoch; every
    write waits for the device.
    """

    def __init__(
        self, folder: Path, rows: Sequence[Key], counts: Sequence[int], layout: StoreLayout
    ) -> None:
        """Create or open the files in `folder`.

        counts: the number of positions of each row. Raises UserError if the disk is too small, and
        for files of another layout.
        """
        self._numbers = {key: number for number, key in enumerate(rows)}
        widths = {folder / "states.bin": (layout.channels, layout.dtype)}
        if layout.tokens:
            widths[folder / "tokens.bin"] = (layout.tokens, torch.int64)
        sizes = {
            file: sum(counts) * width * dtype.itemsize for file, (width, dtype) in widths.items()
        }
        sums = folder / "checksums.bin"
        _check_layout(folder / "states.bin", sizes[folder / "states.bin"])
        _allocate(folder, {**sizes, sums: 4 * len(rows)})
        self._files = [_RowFile(file, counts, *width) for file, width in widths.items()]
        self._sums = np.memmap(sums, dtype=np.uint32, mode="r+", shape=(len(rows),))

    def get(self, key: Key) -> RowStates | None:
        number = self._numbers[key]
        if self._sums[number] == 0 or self._sums[number] != self._checksum(number):
            return None
        return RowStates(*(file.read(number) for file in self._files))

    def put(self, key: Key, row: RowStates) -> None:
        number = self._numbers[key]
        for file, values in zip(self._files, row.parts, strict=True):
            file.write(number, values)
        self._sums[number] = self._checksum(number)

    def _checksum(self, number: int) -> int:
        """Return the CRC-32 of the row's bytes, never 0, which marks an unwritten row."""
        found = 0
        for file in self._files:
            found = file.checksum(number, found)
        return found or 1


class _RowFile:
    """Memory-mapped file of one array [P, width] per row."""

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
        """Return the CRC-32 of the row's bytes, continued from `before`."""
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
    """Return the store under `root` for a target and its training data, and allocate its files.

    target_hash: the hash of the target's folder. count: returns the number of stored positions of a
    document, given its mask. show: print the size before it is allocated. Raises UserError if the
    disk is too small, and for files of another layout.
    """
    keys = sorted(tuple(row) for row in data.rows)
    of_sample = [count(sample.mask) for sample in data.samples]
    counts = [sum(of_sample[index] for index in key) for key in keys]
    # The width counts bytes per position, as in earlier versions: equal caches stay readable, and
    # others are found and refused.
    width = layout.bytes // layout.dtype.itemsize
    digest = hashlib.sha256(
        f"{target_hash} {layout.heads} {layout.uses_teacher} {width} {layout.dtype} {keys}".encode()
    )
    if layout.taps:
        digest.update(str(layout.taps).encode())
    if layout.context:
        digest.update(b"context")
    for sample in data.samples:
        digest.update(sample.ids.tobytes() + sample.mask.tobytes())
    folder = root / digest.hexdigest()[:16]
    size = sum(counts) * layout.bytes
    if show:
        print(
            f"states: {sum(counts):,} of {data.tokens:,} positions, {amount(size)} on disk in "
            f"{folder} ({amount(free_bytes(root))} free); later epochs and other runs on this "
            f"data skip the target"
        )
    return DiskStore(folder, keys, counts, layout)


def _check_layout(path: Path, size: int) -> None:
    """Raise UserError if the file is larger than `size`; a smaller one is still being created."""
    found = path.stat().st_size if path.exists() else 0
    if found > max(1, size):
        raise UserError(
            f"{path} has {found:,} bytes, expected {size:,}. An earlier version kept the target's "
            f"tokens in the same file as its states, which is no longer supported. Delete the "
            f"folder {path.parent}; it is created again"
        )


def _allocate(folder: Path, sizes: Mapping[Path, int]) -> None:
    """Allocate files of these sizes in bytes; existing content is kept.

    Raises UserError if the disk is too small.
    """
    held = sum(path.stat().st_blocks * 512 for path in sizes if path.exists())
    free, size = free_bytes(folder), sum(sizes.values())
    if size - held > free:
        raise UserError(
            f"{folder} needs {amount(size)}, but {amount(free)} are free. Set states.folder to "
            f"another disk, or use states.cache=memory"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, length in sizes.items():
        with path.open("ab") as file:
            if hasattr(os, "posix_fallocate"):  # not on macOS, where the file grows with its rows
                os.posix_fallocate(file.fileno(), 0, max(1, length))
            file.truncate(max(1, length))


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(
        next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    ).free
