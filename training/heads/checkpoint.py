"""Weights of heads in folders: config.json and model.safetensors in the layout of their kind."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from decoding.errors import UserError
from decoding.models.folder import CARD, WEIGHTS, read_json, refuse_nonfinite
from jobs.files import disk_error, save_tensors


class FolderLayout(Protocol):
    """Layout of a head's folder: keys of config.json and names of tensors."""

    def config(self, shape: Any, dtype: torch.dtype) -> dict[str, Any]:
        """Return the values of config.json for a head of this shape, stored in this dtype."""
        ...

    def stored_name(self, name: str) -> str:
        """Return the name that the file gives to the tensor `name` of the head's state dict."""
        ...

    def extensions(self, shape: Any) -> list[str]:
        """Describe what other readers of the layout cannot load; empty if they load everything."""
        ...


def config_text(layout: FolderLayout, shape: Any, dtype: torch.dtype) -> str:
    """Return the content of a head's config.json."""
    return json.dumps(layout.config(shape, dtype), indent=2, sort_keys=True) + "\n"


def save_head(
    layout: FolderLayout, shape: Any, head: Any, folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write a head's config.json and model.safetensors to `folder`.

    dtype: the dtype in which floating-point tensors are stored. Raises UserError if a write fails.
    """
    state = {layout.stored_name(name): tensor for name, tensor in head.state_dict().items()}
    write_head_files(folder, state, config_text(layout, shape, dtype), dtype)


def write_head_files(
    folder: Path, state: dict[str, Tensor], config: str, dtype: torch.dtype, weights: str = WEIGHTS
) -> None:
    """Write tensors by their names in the file, and the text of config.json.

    dtype: that of floating-point tensors. weights: name of the file of tensors. Raises UserError
    if a write fails.
    """
    stored = {
        name: tensor.detach()
        .to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in state.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(stored, folder / weights, {"format": "pt"})
        (folder / "config.json").write_text(config, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise disk_error(folder, error) from error


def load_weights(
    head: nn.Module,
    stored: dict[str, Tensor],
    stored_name: Callable[[str], str],
    file: Path,
    described: str,
) -> None:
    """Load the tensors `stored`, read from `file`, into an empty head.

    stored_name: see `FolderLayout`. described: the head that config.json describes, in words.
    Raises UserError naming every tensor that is missing, unknown or of another shape, and for
    tensors that are not finite.
    """
    wanted = {stored_name(name): (name, tensor) for name, tensor in head.state_dict().items()}
    wrong = [f"{name} is missing" for name in wanted if name not in stored]
    wrong += [f"{name} is unknown" for name in stored if name not in wanted]
    wrong += [
        f"{name} has the shape {list(stored[name].shape)}, expected {list(tensor.shape)}"
        for name, (_, tensor) in wanted.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    if wrong:
        raise UserError(
            f"{file} does not hold the head that config.json describes ({described}): "
            f"{'; '.join(wrong)}. Use config.json and {file.name} of the same head, in the "
            f"published layout."
        )
    refuse_nonfinite(file.parent, stored)
    state = {name: stored[at] for at, (name, _) in wanted.items()}
    head.load_state_dict(state, assign=True)


def check_size(file: Path, key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise UserError unless a value of config.json is a whole number from `least` to `most`.

    most: None sets no upper limit.
    """
    if type(value) is int and least <= value <= (
        value if most is None else most
    ):  # True is not a size
        return
    expected = f"of {least} or more" if most is None else f"from {least} to {most}"
    raise UserError(
        f"{file}: {key} is {value!r}, expected a whole number {expected}. Use the config.json that "
        f"was written with these weights."
    )


def trained_shape(folder: Path) -> dict[str, Any]:
    """Return the shape on a head's card; empty for published folders, which have none."""
    card = folder / CARD
    shape = read_json(card).get("shape") if card.is_file() else None
    return shape if isinstance(shape, dict) else {}


def check_trained(folder: Path, shape: Any) -> None:
    """Raise UserError if config.json describes another head than the card beside it.

    No tensor shows the layers that a head reads, the shift of a block, or the tokens of a pass, so
    a changed value would lower acceptance silently. shape: as config.json describes it; layers that
    it does not name, and temperatures, which are fitted later, are not compared.
    """
    trained = trained_shape(folder)
    ours = json.loads(json.dumps(asdict(shape)))
    wrong = [
        f"{name} is {value}, but the head was trained with {trained[name]}"
        for name, value in ours.items()
        if trained.get(name, value) != value and name != "temperatures" and value != []
    ]
    if wrong:
        raise UserError(
            f"{folder / 'config.json'}: {'; '.join(wrong)} ({CARD}). Use the config.json that was "
            f"written with these weights."
        )


def check_sizes(folder: Path, shape: Any, target: Any) -> None:
    """Raise UserError if a head's hidden size or vocabulary differs from the target's.

    folder: the head's folder, for the error. target: the target's Hugging Face configuration.
    """
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(shape, name), getattr(target, name)
        if ours != theirs:
            raise UserError(
                f"{folder}: the head has {name} {ours}, but the target has {theirs}. A head reads "
                f"the hidden states and the embedding of the target that it was trained for. Use "
                f"that target, or train a head for this one."
            )
