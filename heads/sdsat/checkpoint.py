"""Folders of SDSAT's slots: this project's own layout, as no server reads such folders.

config.json has `model_type: shallow_draft_sdsat` and the fields of `SdsatConfig`: num_slots, rank,
and the sizes of the target. model.safetensors has `slots`, the embeddings (num_slots, hidden_size),
and with a rank for each layer of the target `layers.{i}.{qkv,out,gate_up,down}.{down,up}.weight`.
The target's weights are not stored.
"""

from dataclasses import fields
from pathlib import Path

import torch

from decoding.models.folder import WEIGHTS, load_state
from heads.sdsat.model import SdsatConfig, SdsatHead
from training.heads import checkpoint
from training.heads.own_layout import OwnLayout

LAYOUT = OwnLayout("shallow_draft_sdsat")


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
    values, file = LAYOUT.read(folder), folder / "config.json"
    for one in fields(SdsatConfig):
        least = 0 if one.name == "rank" else 1
        checkpoint.check_size(file, one.name, values.get(one.name), least)
    config = LAYOUT.shape(SdsatConfig, values)
    checkpoint.check_trained(folder, config)
    return config
