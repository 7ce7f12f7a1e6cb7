"""Named arrays in a folder that is complete or absent: appended in pieces, then mapped from disk.

Processes that map the same folder share its pages, so that any number of them needs its memory
once. `index.json` holds the size and CRC-32 of each file.
"""

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from decoding.errors import UserError
from jobs.files import force_to_disk

INDEX = "index.json"
_PARTIAL = ".partial"
_CHUNK = 2**24  # bytes read at once to check a file


class ArrayWriter:
    """Writer of arrays to a temporary folder, which is renamed once they are complete.

    Without `finish`, the temporary folder is deleted at the end of the block. Callers hold
    `lock_path` of the folder.
    """

    def __init__(self, folder: Path, dtypes: Mapping[str, str], remedy: str) -> None:
        """Prepare the files of one-dimensional arrays (name -> dtype).

        remedy: the last sentence of the error for a failed write.
        """
        self._folder, self._dtypes, self._remedy = folder, dict(dtypes), remedy
        self._partial = folder.with_name(f".{folder.name}{_PARTIAL}")
        self._files: dict[str, BinaryIO] = {}
        self._sums = dict.fromkeys(dtypes, 0)

    def __enter__(self) -> "ArrayWriter":
        """Create the temporary folder in place of one that a killed process left."""
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
            for name in self._dtypes:
                self._files[name] = (self._partial / name).open("wb")
        except OSError as error:
            raise self._error(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            try:
                file.close()
            except OSError:  # the rest of a buffer that a full disk refused, reported before
                continue
        shutil.rmtree(self._partial, ignore_errors=True)

    def append(self, name: str, array: np.ndarray) -> None:
        """Append the values of an array. Raises UserError if the disk is full."""
        content = np.ascontiguousarray(array, dtype=self._dtypes[name]).tobytes()
        try:
            self._files[name].write(content)
        except OSError as error:
            raise self._error(error) from error
        self._sums[name] = zlib.crc32(content, self._sums[name])

    def finish(self, metadata: dict[str, Any]) -> None:
        """Flush the files to the disk, and rename the folder. Raises UserError if that fails."""
        try:
            arrays = {}
            for name, file in self._files.items():
                file.flush()
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
                arrays[name] = {"dtype": self._dtypes[name], "bytes": size, "crc": self._sums[name]}
            index = self._partial / INDEX
            index.write_text(json.dumps({"arrays": arrays, "metadata": metadata}))
            force_to_disk(index)
            if self._folder.exists():
                shutil.rmtree(self._folder)
            os.replace(self._partial, self._folder)
            force_to_disk(self._folder.parent)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> UserError:
        parent = next(folder for folder in self._partial.parents if folder.exists())
        free_mb = shutil.disk_usage(parent).free / 1e6
        return UserError(
            f"could not write {self._folder}: {error.strerror}. {free_mb:,.0f} MB are free there, "
            f"and nothing was kept. {self._remedy}"
        )


def map_arrays(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Return the arrays and the metadata of a folder.

    Returns None if the folder is absent or incomplete: without an index, or with a file of another
    size than the index records.
    """
    index = _read_index(folder)
    if index is None:
        return None
    arrays = {}
    for name, file in index["arrays"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            return None
        dtype = np.dtype(file["dtype"])
        # An empty file cannot be mapped.
        arrays[name] = np.memmap(path, dtype, "r") if file["bytes"] else np.empty(0, dtype)
    return arrays, index["metadata"]


def check_arrays(folder: Path, remedy: str) -> None:
    """Read every file of a folder that `map_arrays` accepted, and compare its CRC-32.

    Raises UserError, which ends with the remedy, for the first file that differs.
    """
    index = _read_index(folder) or {"arrays": {}}
    for name, file in index["arrays"].items():
        found = 0
        with (folder / name).open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                found = zlib.crc32(chunk, found)
        if found != file["crc"]:
            raise UserError(
                f"{folder / name} was altered after it was written: its CRC-32 is {found:08x}, "
                f"expected {file['crc']:08x}. {remedy}"
            )


@contextmanager
def lock_path(folder: Path, remedy: str) -> Iterator[None]:
    """Hold the lock of a folder inside the block; wait while another process holds it.

    The kernel releases the lock of a process that dies. Raises UserError, which ends with the
    remedy, where no lock file can be created or locked.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f".{folder.name}.lock").open("ab")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}. {remedy}") from error
    with file:
        yield


def _read_index(folder: Path) -> dict[str, Any] | None:
    try:
        index = json.loads((folder / INDEX).read_text())
        complete = {"arrays", "metadata"} <= index.keys()
    except (OSError, ValueError, AttributeError):  # absent, damaged, or not an object
        return None
    return index if complete else None
