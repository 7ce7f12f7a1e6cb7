"""Folders of a small random llama, and changes to its configuration and weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_targets import hf_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAN, INF = math.nan, math.inf


def save_llama(folder: Path) -> Path:
    """Write a random llama with 3 layers and a vocabulary of 48 and return its folder.

    Its width is 32, its MLP's 40, and it has 4 query and 2 key/value heads.
    """
    hf_model("llama", layers=3, dtype=torch.float32).save_pretrained(folder)
    return folder


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **fields}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))


def change(folder: Path, changed: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(folder / WEIGHTS)
    changed(state)
    save_file(state, folder / WEIGHTS, {"format": "pt"})
