"""Weights of heads in folders: config.json and model.safetensors in the layout of their kind."""

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
    """Layout of a head's folder: the keys of config.json and the names of tensors."""

    def config(self, shape: Any, dtype: Any) -> dict[str, Any]:
        """Return the values of config.json for a head."""
        ...

    def exported(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a head's state dict under the names of the files."""
        ...

    def imported(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Invert `exported`; unknown tensors keep their names and are then refused."""
        ...

    def extensions(self, shape: Any) -> list[str]:
        """Describe what other readers of the layout cannot load; empty if they load everything."""
        ...


def config_text(layout: FolderLayout, shape: Any, dtype: torch.dtype) -> str:
    """Return config.json of a head as text."""
    return json.dumps(layout.config(shape, dtype), indent=2, sort_keys=True) + "\n"


def save_head(
    layout: FolderLayout, shape: Any, head: Any, folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write config.json and model.safetensors. Raises UserError if a write fails."""
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
    """Load a folder's weights into an empty head; described: its config.json in words.

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
            f"{'; '.join(wrong)}. Use config.json and {WEIGHTS} of the same head, in the published "
            f"layout"
        )
    refuse_nonfinite(folder, stored)
    head.load_state_dict(layout.imported(stored), assign=True)


def check_size(file: Path, key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise UserError unless a value of config.json is a whole number from `least` to `most`."""
    if type(value) is int and least <= value <= (
        value if most is None else most
    ):  # True is no size
        return
    expected = f"of {least} or more" if most is None else f"from {least} to {most}"
    raise UserError(
        f"{file}: {key} is {value!r}, expected a whole number {expected}. Use the config.json that "
        f"was written with these weights."
    )


def check_sizes(folder: Path, shape: Any, target: Any) -> None:
    """Raise UserError for a head of other sizes than the target's Hugging Face configuration."""
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(shape, name), getattr(target, name)
        if ours != theirs:
            raise UserError(
                f"{folder}: the head has {name} {ours}, but the target {theirs}: a head reads the "
                f"hidden states and the embedding of the target it was trained for. Use that "
                f"target, or train a head for this one"
            )
