"""Weights of heads in folders: config.json and model.safetensors by the layout of their kind, and
what is refused when they are read.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from decoding.errors import UserError
from decoding.models.folder import WEIGHTS, load_state, refuse_nonfinite
from jobs.files import disk_error, save_tensors


class FolderLayout(Protocol):
    """The files of a head's folder: the keys of config.json, and the names of tensors."""

    def config(self, shape: Any, dtype: Any) -> dict[str, Any]:
        """Return config.json."""
        ...

    def exported(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a head's state dict under the names of the files."""
        ...

    def imported(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inverse of `exported`. Tensors that it does not know keep their names, which are then
        refused.
        """
        ...

    def extensions(self, shape: Any) -> list[str]:
        """Return what other readers of the layout do not know, in words; empty where they load
        all.
        """
        ...


def config_text(layout: FolderLayout, shape: Any, dtype: torch.dtype) -> str:
    """Return config.json of a head as text."""
    return json.dumps(layout.config(shape, dtype), indent=2, sort_keys=True) + "\n"


def save_head(
    layout: FolderLayout, shape: Any, head: Any, folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write config.json and model.safetensors. Raises UserError when a write fails."""
    state = {
        name: tensor.detach()
        .to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in layout.exported(head.state_dict()).items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(state, folder / WEIGHTS, {"format": "pt"})
        (folder / "config.json").write_text(config_text(layout, shape, dtype), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise disk_error(folder, error) from error


def load_weights(layout: FolderLayout, head: Any, folder: Path, described: str) -> None:
    """Give an empty head the weights of a folder. described: what config.json says, in words.

    Raises UserError naming every tensor that is missing, unknown, of another shape, or not finite.
    """
    stored = load_state(folder)
    wanted, found = layout.exported(head.state_dict()), stored
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in wanted]
    wrong += [
        f"{name} has the shape {list(found[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if wrong:
        raise UserError(
            f"{folder / WEIGHTS}: does not hold the head that config.json describes ({described}): "
            f"{'; '.join(wrong)}. Take config.json and {WEIGHTS} from one head, in the published "
            f"layout"
        )
    refuse_nonfinite(folder, stored)
    head.load_state_dict(layout.imported(stored), assign=True)


def check_size(file: Path, key: str, value: Any, least: int) -> None:
    """Raise UserError for a value of config.json that is no whole number of `least` or more."""
    if type(value) is not int or value < least:  # true is an int to isinstance
        raise UserError(
            f"{file}: {key} is {value!r}, expected a whole number of {least} or more; the "
            f"published layout has it"
        )


def check_draft_vocabulary(file: Path, key: str, value: Any, vocab_size: int) -> None:
    """Raise UserError for a size in config.json that no draft vocabulary has; 0 is none."""
    if type(value) is not int or not 0 <= value <= vocab_size:
        raise UserError(
            f"{file}: {key} is {value!r}, expected a whole number up to vocab_size "
            f"({vocab_size}), or no such key"
        )


def check_sizes(folder: Path, shape: Any, target: Any) -> None:
    """Raise UserError for a head that was made for a target of other sizes; target: its Hugging
    Face configuration.
    """
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(shape, name), getattr(target, name)
        if ours != theirs:
            raise UserError(
                f"{folder}: the head has {name} {ours}, the target {theirs}: a head reads the "
                f"hidden states and the embedding of the very target it "
                "was trained for. Take that target, or train a head for this one"
            )
