"""Folders of SDSAT's slots: this project's own layout, as no server reads such folders.

config.json has `model_type: shallow_draft_sdsat` and the fields of `SdsatConfig`: num_slots, rank,
and the sizes of the target. model.safetensors has `slots`, the embeddings (num_slots, hidden_size),
and with a rank for each layer of the target `layers.{i}.{qkv,out,gate_up,down}.{down,up}.weight`.
The target's weights are not stored.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from decoding.models.folder import WEIGHTS, load_state, read_json
from decoding.values import quote
from heads.sdsat.model import SdsatConfig, SdsatHead
from training.heads import checkpoint

MODEL_TYPE = "shallow_draft_sdsat"


class SdsatLayout:
    """Keys of config.json and names of tensors."""

    def config(self, shape: SdsatConfig, dtype: torch.dtype) -> dict[str, Any]:
        stored = str(dtype).removeprefix("torch.")
        return {"model_type": MODEL_TYPE, "torch_dtype": stored, **asdict(shape)}

    def stored_name(self, name: str) -> str:
        return name

    def extensions(self, shape: SdsatConfig) -> list[str]:
        return []


LAYOUT = SdsatLayout()


def load_head(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> SdsatHead:
    """Load the slots of a folder, for drafting.

    Raises UserError for a folder of another kind, for invalid values, and for tensors that are
    missing, unknown, not finite, or of another shape than config.json describes.
    """
    config, file = read_head_config(folder), folder / WEIGHTS
    with torch.device("meta"):
        head = SdsatHead(config)
    described = f"{config.num_slots} slots of width {config.hidden_size}, rank {config.rank}"
    checkpoint.load_weights(head, load_state(folder), LAYOUT.stored_name, file, described)
    return head.to(device, dtype).requires_grad_(False).eval()


def read_head_config(folder: Path) -> SdsatConfig:
    """Read the shape of a folder's slots.

    Raises UserError for a folder of another kind, and for a missing or invalid value.
    """
    file = folder / "config.json"
    values = read_json(file)
    if values.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"{file}: model_type is {quote(values.get('model_type'))}, expected '{MODEL_TYPE}'. "
            f"Use `use: chain` for a language model."
        )
    names = [one.name for one in fields(SdsatConfig)]
    for name in names:
        checkpoint.check_size(file, name, values.get(name), least=0 if name == "rank" else 1)
    return SdsatConfig(**{name: values[name] for name in names})
