"""Folders of Medusa heads in two published layouts: vLLM's, which is written, and the original one.

vLLM: config.json with `model_type: medusa`, tensors `blocks.{i}.layers.{j}.weight|bias` and
`lm_heads.{i}.weight` (one, with `original_lm_head`, if heads share it), and `token_map` for a draft
vocabulary of `truncated_vocab_size` tokens. The biases need `medusa_fc_bias: true`, since vLLM's
loader defaults to false. vLLM drafts chains of best tokens, no trees.

Original (FasterDecoding/Medusa): config.json with `medusa_num_heads` and `medusa_num_layers`,
`medusa_lm_head.safetensors` with `{i}.{j}.linear.weight|bias` and `{i}.{layers}.weight`. Its loader
always builds five heads. Older files are pickles, which are refused.

`medusa_accuracy` in config.json, from which trees are chosen, is an extension that other readers
ignore.
"""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from decoding.errors import UserError
from decoding.models.draft_vocabulary import check_tokens
from decoding.models.folder import WEIGHTS, load_state, read_json
from heads.medusa.model import MedusaConfig, MedusaHeads
from training.heads import checkpoint

MODEL_TYPE = "medusa"
ORIGINAL_WEIGHTS = "medusa_lm_head.safetensors"
_ACCURACY = "medusa_accuracy"
_TOKENS = "token_map"


class VllmLayout:
    """vLLM's keys of config.json and names of tensors."""

    def config(self, shape: MedusaConfig, dtype: torch.dtype) -> dict[str, Any]:
        values: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": MODEL_TYPE,
            "num_heads": shape.num_heads,
            "num_hidden_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "truncated_vocab_size": shape.num_drafted,
            "medusa_fc_bias": True,
            "original_lm_head": shape.shared,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        if shape.accuracy:
            values[_ACCURACY] = [[round(share, 6) for share in row] for row in shape.accuracy]
        return values

    def stored_name(self, name: str) -> str:
        name = re.sub(r"^blocks\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        name = re.sub(r"^projections\.", "lm_heads.", name)
        return _TOKENS if name == "token_ids_V" else name

    def extensions(self, shape: MedusaConfig) -> list[str]:
        return []


LAYOUT = VllmLayout()


def original_name(name: str, layers: int) -> str:
    """Return a parameter's name in the original layout, for heads of `layers` blocks."""
    name = re.sub(r"^projections\.(\d+)\.", rf"\1.{layers}.", name)
    return name.removeprefix("blocks.")


def load_heads(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> MedusaHeads:
    """Load the heads of a folder in either layout, for drafting.

    Raises UserError for a folder of another kind, for a file that cannot be read, and for tensors
    that are missing, unknown, not finite, or of another shape than config.json describes.
    """
    original = _is_original(read_json(folder / "config.json"))
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
    accuracy = _read_accuracy(file, values.get(_ACCURACY))
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
            f"{file}: {_ACCURACY} is {str(found)[:60]}, expected a list of shares from 0 to 1 for "
            "every head. Remove the key to draft a default tree."
        )
    return rows


def _load_vllm(folder: Path) -> MedusaHeads:
    config = read_heads_config(folder)
    with torch.device("meta"):
        heads = MedusaHeads(config)
    described = f"{config.num_heads} heads of {config.num_layers} residual blocks"
    file = folder / WEIGHTS
    checkpoint.load_weights(heads, load_state(folder), LAYOUT.stored_name, file, described)
    if heads.token_ids_V is not None:
        heads.token_ids_V = heads.token_ids_V.long()
        check_tokens(file, _TOKENS, heads.token_ids_V, config.vocab_size)
    return heads


def _is_original(values: dict[str, Any]) -> bool:
    return "medusa_num_heads" in values and "hidden_size" not in values


def _load_original(folder: Path) -> MedusaHeads:
    """Load all heads in the file, whose number may differ from config.json's."""
    file = folder / ORIGINAL_WEIGHTS
    layers: Any = read_json(folder / "config.json").get("medusa_num_layers")
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
    try:
        found = load_file(file)
    except SafetensorError as error:
        raise UserError(
            f"{file} cannot be read as safetensors ({error}). Copy it again."
        ) from error
    count = len({name.split(".")[0] for name in found})
    projection = found.get(f"0.{layers}.weight")
    if projection is None or projection.ndim != 2:
        raise UserError(
            f"{file}: expected the tensor '0.{layers}.weight', the projection of a head with "
            f"{layers} residual blocks, found {', '.join(sorted(found)[:4])}. Use config.json and "
            f"{file.name} of the same heads."
        )
    V, H = projection.shape
    with torch.device("meta"):
        heads = MedusaHeads(MedusaConfig(V, H, count, layers))
    described = f"{count} heads of {layers} residual blocks"

    def name_in_file(name: str) -> str:
        return original_name(name, layers)

    checkpoint.load_weights(heads, found, name_in_file, file, described)
    return heads
