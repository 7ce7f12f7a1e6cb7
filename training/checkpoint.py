"""Checkpoints that are complete or absent: written under a temporary name, hashed, renamed.

A checkpoint folder holds model.safetensors, optimizer.safetensors, rng.safetensors and, written
last, state.json with the loop's state and the hash of every file. A folder without state.json, or
with another hash, is reported by name and the previous one is used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from decoding import devices
from decoding.errors import UserError
from decoding.models.folder import sha256
from jobs.files import disk_error, force_to_disk, save_tensors, write_text
from jobs.run_files import read_object

STATE = "state.json"
_CHECKSUM = "checksum"  # key of the loop state's hash, which checkpoints of earlier versions lack
_PARTS = ("model", "optimizer", "rng")


@dataclass
class Checkpoint:
    """A checkpoint read from its folder."""

    folder: Path
    state: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]


def save(
    folder: Path,
    state: dict[str, Any],
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    rng: dict[str, Tensor],
) -> Path:
    """Write `folder` (such as checkpoints/step_000100) so that it is complete or absent.

    state: the loop's state, as JSON values. Files and names are synced to the disk before the
    rename, so earlier checkpoints survive a power cut. Returns `folder`. Raises UserError if a
    write fails.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    # remains of a run that was killed while saving this step
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, tensors in zip(_PARTS, (model, optimizer, rng), strict=True):
            save_tensors(
                {key: value.detach().contiguous() for key, value in tensors.items()},
                partial / f"{name}.safetensors",
            )
            force_to_disk(partial / f"{name}.safetensors")
        hashes = {path.name: sha256(path) for path in sorted(partial.glob("*.safetensors"))}
        write_text(
            partial / STATE,
            json.dumps({**state, "hashes": hashes, _CHECKSUM: _checksum(state)}, indent=1),
        )
        shutil.rmtree(folder, ignore_errors=True)
        force_to_disk(partial)
        os.replace(partial, folder)
        force_to_disk(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise disk_error(folder, error) from error
    return folder


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint. Raises UserError naming the file if one is missing or damaged."""
    state_file = folder / STATE
    if not state_file.is_file():
        raise UserError(
            f"checkpoint {folder} was never completed, as it has no {STATE}. Delete the folder"
        )
    state, hashes = read_object(state_file, "Delete the checkpoint's folder", _read_state)
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file() or sha256(path) != expected:
            raise UserError(
                f"checkpoint {folder}: {name} is {'missing' if not path.is_file() else 'damaged'}. "
                f"Delete the folder"
            )
    tensors = {name: load_file(folder / f"{name}.safetensors") for name in _PARTS}
    return Checkpoint(folder, state, **tensors)


def _read_state(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the loop's state and the files' hashes. Raises ValueError if either is invalid."""
    hashes, checksum = values.pop("hashes"), values.pop(_CHECKSUM, None)
    if (
        not isinstance(hashes, dict)
        or not {f"{name}.safetensors" for name in _PARTS} <= hashes.keys()
    ):
        raise ValueError(f"hashes is {hashes!r:.40}, expected hashes of {', '.join(_PARTS)}")
    if checksum not in (None, _checksum(values)):
        raise ValueError("its values have changed since it was written")
    return values, hashes


def _checksum(state: dict[str, Any]) -> str:
    """Return the SHA-256 of the loop's state as JSON stores it."""
    as_read = json.loads(json.dumps(state))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def drop_tied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop names that share storage with an earlier one, as safetensors stores a tensor once."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept


def load_weights(model: nn.Module, found: Checkpoint) -> None:
    """Load a checkpoint's weights into the model.

    Raises UserError if they belong to another model.
    """
    odd = sorted(drop_tied(model.state_dict()).keys() ^ found.model.keys())
    if odd:
        raise UserError(
            f"checkpoint {found.folder} belongs to another model (only one of the two has the "
            f"tensor '{odd[0]}'). Choose another output_dir="
        )
    model.load_state_dict(found.model, strict=False)  # tied names are stored once


def latest(root: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest complete checkpoint under `root`, or None; skip and report damaged ones."""
    for folder in sorted(root.glob("step_*"), reverse=True):
        try:
            return load(folder)
        except UserError as error:
            report(f"skipped: {error}")
    return None


def name_of(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:06d}"


def prune(root: Path, keep: int, best: int, keep_every: int = 0) -> None:
    """Delete all checkpoints but the newest `keep` (at least one) and those of some steps.

    These are the step `best`, and the multiples of `keep_every` unless it is 0.
    """
    folders = sorted(root.glob("step_*"))
    for folder in folders[: max(0, len(folders) - max(1, keep))]:
        step = int(folder.name.removeprefix("step_"))
        if step != best and not (keep_every and step % keep_every == 0):
            shutil.rmtree(folder)


def rng_state() -> dict[str, Tensor]:
    """Return the states of torch's, NumPy's and, if there is a GPU, CUDA's generators."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    assert kind == "MT19937", kind
    assert isinstance(keys, np.ndarray)
    numpy_state = np.array([position, has_gauss], dtype=np.int64)
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy_position": torch.from_numpy(numpy_state),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
    }
    of_card = devices.rng_state()
    return tensors if of_card is None else {**tensors, "cuda": of_card}


def restore_rng(tensors: dict[str, Tensor]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(tensors["torch"])
    position, has_gauss = (int(value) for value in tensors["numpy_position"])
    keys = tensors["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(tensors["numpy_gauss"][0])))
    if "cuda" in tensors:
        devices.restore_rng(tensors["cuda"])
