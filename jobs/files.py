"""Files that are whole or absent: temporary names, forced to the disk, and words for a full one."""

import os
import secrets
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from decoding.errors import UserError


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """A safetensors file that everybody may read whom its folder lets in. Raises OSError and
    SafetensorError.
    """
    save_file(tensors, path, metadata)
    match_folder_permissions(path)


def match_folder_permissions(path: Path) -> None:
    """safetensors writes for its owner's eyes alone; a served folder is read by others: the file
    gets what its folder allows.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)


def force_to_disk(path: Path) -> None:
    """fsync of a file that is closed, or of a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file and force it to the disk, under a temporary name until it is whole."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and force it to the disk, under a temporary name until it is whole."""
    # Ranks, of several nodes too, may write the same file.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def disk_error(path: Path, error: Exception) -> UserError:
    """The error for a write that failed, with the room that is left."""
    parent = next(folder for folder in path.parents if folder.exists())
    free_mb = shutil.disk_usage(parent).free / 1e6
    return UserError(
        f"could not write {path}: {error}. {free_mb:,.0f} MB are free there; the last whole "
        f"checkpoint is kept. Make room and run again"
    )
