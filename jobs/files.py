"""Files that are complete or absent: temporary names, fsync, and the error for a full disk."""

import os
import secrets
import shutil
from pathlib import Path

from safetensors.torch import save, save_file
from torch import Tensor

from decoding.errors import UserError, without_stop


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions of its folder.

    Raises OSError or SafetensorError if the write fails.
    """
    save_file(tensors, path, metadata)
    match_folder_permissions(path)


def match_folder_permissions(path: Path) -> None:
    """Give a file the read and write permissions of its folder.

    safetensors creates files that only their owner can read, but a server may be another user.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)


def force_to_disk(path: Path) -> None:
    """Flush a closed file, or the names in a folder, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file and flush it, under a temporary name until it is complete."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and flush it, under a temporary name until it is complete."""
    # Ranks on several nodes may write the same file at once.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file and flush it, under a temporary name until it is complete.

    Creates the folder of the file. Raises UserError if the write fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_bytes(path, save(contiguous, metadata))
    except OSError as error:
        raise disk_error(path, error) from error


def disk_error(path: Path, error: Exception) -> UserError:
    """Return the error for a failed write, with the free space of the disk."""
    parent = next(folder for folder in path.parents if folder.exists())
    free_mb = shutil.disk_usage(parent).free / 1e6
    return UserError(
        f"could not write {path}: {without_stop(error)}. {free_mb:,.0f} MB are free there. Free "
        f"some space and run again; the last complete checkpoint is kept"
    )
