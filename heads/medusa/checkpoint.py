"""Folders of Medusa heads, in the layouts of heads/medusa/layouts.py.

The original loader always builds five heads. Older files of its layout are pickles, which are
refused.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.draft_vocabulary import check_tokens
from decoding.models.folder import WEIGHTS, load_state, read_json
from heads.medusa.layouts import (
    ACCURACY,
    CONTRACT,
    MODEL_TYPE,
    ORIGINAL,
    ORIGINAL_WEIGHTS,
    TOKENS,
    VLLM,
)
from heads.medusa.model import MedusaConfig, MedusaHeads
from training.heads import checkpoint
from training.heads.published import PublishedLayout


def load_heads(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> MedusaHeads:
    """Load the heads of a folder in either layout, for drafting.

    Raises UserError for a folder of another kind, for a file that cannot be read, and for tensors
    that are missing, unknown, not finite, or of another shape than config.json describes.
    """
    original = CONTRACT.layout_of(read_json(folder / "config.json")) is ORIGINAL
    heads = _load_original(folder) if original else _load_vllm(folder)
    return heads.to(device, dtype).requires_grad_(False).eval()


def read_heads_config(folder: Path) -> MedusaConfig:
    """Read the shape of a folder in vLLM's layout.

    Raises UserError for a folder of another kind, and for missing or invalid values.
    """
    file = folder / "config.json"
    values = read_json(file)
    if values.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"{file}: model_type is {values.get('model_type')!r}, expected '{MODEL_TYPE}', or the "
            "original layout (medusa_num_heads, medusa_num_layers). Use `use: chain` for a "
            "language model."
        )
    heads: Any = values.get("num_heads", values.get("medusa_num_heads"))
    layers: Any = values.get("num_hidden_layers", values.get("medusa_num_layers"))
    H: Any = values.get("hidden_size")
    V: Any = values.get("vocab_size")
    sizes = {"num_heads": heads, "num_hidden_layers": layers, "hidden_size": H, "vocab_size": V}
    for key, size in sizes.items():
        checkpoint.check_size(file, key, size, 1)
    drafted: Any = values.get("truncated_vocab_size") or V
    checkpoint.check_size(file, "truncated_vocab_size", drafted, 0, V)
    shared = values.get("original_lm_head", False)
    if not isinstance(shared, bool):
        raise UserError(
            f"{file}: original_lm_head is {shared!r}, expected true or false. Use the config.json "
            f"that was written with these weights."
        )
    accuracy = _read_accuracy(file, values.get(ACCURACY))
    return MedusaConfig(V, H, heads, layers, shared, 0 if drafted == V else drafted, accuracy)


def _read_accuracy(file: Path, found: Any) -> tuple[tuple[float, ...], ...]:
    if found is None:
        return ()
    try:
        rows = tuple(tuple(float(share) for share in row) for row in found)
        valid = rows and all(row and 0 <= min(row) <= max(row) <= 1 for row in rows)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise UserError(
            f"{file}: {ACCURACY} is {str(found)[:60]}, expected a list of shares from 0 to 1 for "
            "every head. Remove the key to draft a default tree."
        )
    return rows


def _load_vllm(folder: Path) -> MedusaHeads:
    config = read_heads_config(folder)
    heads = _fill(config, VLLM, load_state(folder), folder / WEIGHTS)
    if heads.token_ids_V is not None:
        heads.token_ids_V = heads.token_ids_V.long()
        check_tokens(folder / WEIGHTS, TOKENS, heads.token_ids_V, config.vocab_size)
    return heads


def _fill(
    config: MedusaConfig, layout: PublishedLayout, stored: dict[str, Tensor], file: Path
) -> MedusaHeads:
    """Return heads of this shape with the tensors that were read from `file`."""
    with torch.device("meta"):
        heads = MedusaHeads(config)
    described = f"{config.num_heads} heads of {config.num_layers} residual blocks"
    layout = layout.of_shape(config)
    state = layout.with_names(stored, CONTRACT.read_as)
    checkpoint.load_weights(heads, state, layout.stored_name, file, described)
    return heads


def _load_original(folder: Path) -> MedusaHeads:
    """Load all heads in the file, whose number may differ from config.json's."""
    file, values = folder / ORIGINAL_WEIGHTS, read_json(folder / "config.json")
    layers: Any = values.get("medusa_num_layers")
    checkpoint.check_size(folder / "config.json", "medusa_num_layers", layers, 1)
    if not file.is_file():
        pickled = (folder / "medusa_lm_head.pt").is_file()
        why = (
            "has only medusa_lm_head.pt, a pickle, which can run code. Read it once with "
            f"torch.load(..., weights_only=True) and save it as {file.name} (safetensors)."
            if pickled
            else f"has no {file.name}. Copy the folder again."
        )
        raise UserError(f"{folder} {why}")
    found = load_state(folder, weights=ORIGINAL_WEIGHTS)
    count = len({name.split(".")[0] for name in found})
    projection = found.get(f"0.{layers}.weight")
    if projection is None or projection.ndim != 2:
        raise UserError(
            f"{file}: expected the tensor '0.{layers}.weight', the projection of a head with "
            f"{layers} residual blocks, found {', '.join(sorted(found)[:4])}. Use config.json and "
            f"{file.name} of the same heads."
        )
    V, H = projection.shape
    accuracy = _read_accuracy(folder / "config.json", values.get(ACCURACY))
    return _fill(MedusaConfig(V, H, count, layers, accuracy=accuracy), ORIGINAL, found, file)
