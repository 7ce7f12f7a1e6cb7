"""Head folders in the two published layouts: vLLM's, which we write, and the original one.

vLLM: config.json with `model_type: medusa`, tensors `blocks.{i}.layers.{j}.weight|bias` and
`lm_heads.{i}.weight` (one, with `original_lm_head`, where heads share it), and `token_map` for a
shortlist of `truncated_vocab_size` tokens. The biases want `medusa_fc_bias: true`, which its loader
takes for false where the key is missing. It drafts chains of best tokens from them, no trees.

Original (FasterDecoding/Medusa): config.json with `medusa_num_heads` and `medusa_num_layers`,
`medusa_lm_head.safetensors` with `{i}.{j}.linear.weight|bias` and `{i}.{layers}.weight`. Its own
loader takes five heads whatever the file holds, and older files are pickles, which are refused.

`medusa_accuracy` in config.json is ours and unknown to other readers: for each head the share of
held-out positions at which its token of rank 0, 1, ... was right, from which trees are chosen.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decoding.errors import UserError
from decoding.models.folder import WEIGHTS, load_state, read_json, refuse_nonfinite
from heads.medusa.model import MedusaConfig, MedusaHeads
from jobs.files import disk_error, save_tensors

MODEL_TYPE = "medusa"
ORIGINAL_WEIGHTS = "medusa_lm_head.safetensors"
LAYOUTS = ("vllm", "original")
_ACCURACY = "medusa_accuracy"


def save_heads(
    heads: MedusaHeads,
    folder: Path,
    *,
    accuracy: Sequence[Sequence[float]] | None = None,
    layout: str = "vllm",
    base_model: str = "",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write config.json and the weights.

    accuracy: by head and rank, for choosing trees. base_model: the target's name, which the
    original layout records. Raises UserError for heads that a layout cannot carry, and when a
    write fails.
    """
    config = heads.config
    if layout not in LAYOUTS:
        raise UserError(f"layout is '{layout}', expected one of {', '.join(LAYOUTS)}")
    values = _vllm_config(config) if layout == "vllm" else _original_config(config, base_model)
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    if accuracy is not None:
        values[_ACCURACY] = [[round(share, 6) for share in shares] for shares in accuracy]
    state = heads.state_dict()
    named = {_to_layout(name, config, layout): tensor for name, tensor in state.items()}
    stored = {
        name: tensor.detach()
        .to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in named.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = WEIGHTS if layout == "vllm" else ORIGINAL_WEIGHTS
        save_tensors(stored, folder / file, {"format": "pt"})
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise disk_error(folder, error) from error


def _vllm_config(config: MedusaConfig) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": MODEL_TYPE,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.num_drafted,
        "medusa_fc_bias": True,
        "original_lm_head": config.shared,
    }


def _original_config(config: MedusaConfig, base_model: str) -> dict[str, Any]:
    if config.shared or config.draft_vocab_size:
        what = "a shared projection" if config.shared else "a shortlist of the vocabulary"
        raise UserError(f"the original layout cannot carry {what}: take layout=vllm")
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": base_model,
        "version": "2",
    }


def _to_layout(name: str, config: MedusaConfig, layout: str) -> str:
    """A tensor's name in a layout, from ours."""
    if match := re.fullmatch(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        head, block, kind = match.groups()
        if layout == "vllm":
            return f"blocks.{head}.layers.{block}.{kind}"
        return f"{head}.{block}.linear.{kind}"
    if match := re.fullmatch(r"projections\.(\d+)\.weight", name):
        head = match[1]
        return (
            f"lm_heads.{head}.weight" if layout == "vllm" else f"{head}.{config.num_layers}.weight"
        )
    return {"token_ids_V": "token_map"}[name]


def read_heads_config(folder: Path) -> MedusaConfig:
    """Return the shape of a head folder of either layout. Raises UserError for a folder of another
    kind and for missing or wrong keys.
    """
    file = folder / "config.json"
    values = read_json(file)
    if _is_original(values):
        return _original_shape(folder, values)
    if values.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"{file}: model_type is {values.get('model_type')!r}, expected '{MODEL_TYPE}' or the "
            "original layout (medusa_num_heads, medusa_num_layers). A language model drafts with "
            "`use: chain`."
        )
    heads = values.get("num_heads", values.get("medusa_num_heads"))
    layers = values.get("num_hidden_layers", values.get("medusa_num_layers"))
    sizes = {
        "num_heads": heads,
        "num_hidden_layers": layers,
        "hidden_size": values.get("hidden_size"),
        "vocab_size": values.get("vocab_size"),
    }
    for key, size in sizes.items():
        if type(size) is not int or size < 1:  # true is an int to isinstance
            raise UserError(f"{file}: {key} is {size!r}, expected a whole number of 1 or more")
    V = sizes["vocab_size"]
    drafted = values.get("truncated_vocab_size") or V
    if type(drafted) is not int or not 1 <= drafted <= V:
        raise UserError(
            f"{file}: truncated_vocab_size is {drafted!r}, expected a whole number from 1 to {V}"
        )
    shared = values.get("original_lm_head", False)
    if not isinstance(shared, bool):
        raise UserError(f"{file}: original_lm_head is {shared!r}, expected true or false")
    return MedusaConfig(
        V,
        sizes["hidden_size"],
        sizes["num_heads"],
        sizes["num_hidden_layers"],
        shared,
        0 if drafted == V else drafted,
    )


def _is_original(values: dict[str, Any]) -> bool:
    return "medusa_num_heads" in values and "hidden_size" not in values


def _original_shape(folder: Path, values: dict[str, Any]) -> MedusaConfig:
    """The shape by the tensors: the file may hold more or fewer heads than config.json says."""
    layers = values.get("medusa_num_layers")
    if type(layers) is not int or layers < 1:
        raise UserError(
            f"{folder / 'config.json'}: medusa_num_layers is {layers!r}, expected a whole number "
            "of 1 or more"
        )
    state = _original_state(folder)
    heads = {name.split(".")[0] for name in state}
    projection = state.get(f"0.{layers}.weight")
    if heads != {str(head) for head in range(len(heads))} or projection is None:
        raise UserError(
            f"{folder / ORIGINAL_WEIGHTS}: expected the tensors '0.{layers}.weight' and so on of "
            f"heads with {layers} residual blocks, found {', '.join(sorted(state)[:4])}. Take "
            "config.json and weights from one model"
        )
    V, H = projection.shape
    return MedusaConfig(V, H, len(heads), layers)


def _original_state(folder: Path) -> dict[str, Tensor]:
    file = folder / ORIGINAL_WEIGHTS
    if not file.is_file():
        pickled = folder / "medusa_lm_head.pt"
        why = (
            f"has only {pickled.name}, a pickle, which can run code: convert it once with "
            "scripts/to_safetensors.py"
            if pickled.is_file()
            else f"has no {file.name}: copy the folder again"
        )
        raise UserError(f"{folder}: {why}")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(
            f"{file}: cannot be read as safetensors ({error}). Copy it again."
        ) from error


def load_heads(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> MedusaHeads:
    """Return the heads of a folder of either layout. Raises UserError naming every tensor that is
    missing, unknown, of another shape than config.json says, or not finite.
    """
    config = read_heads_config(folder)
    layout = "original" if _is_original(read_json(folder / "config.json")) else "vllm"
    file = folder / (WEIGHTS if layout == "vllm" else ORIGINAL_WEIGHTS)
    found = load_state(folder) if layout == "vllm" else _original_state(folder)
    # some vLLM folders prefix every name
    found = {name.removeprefix("medusa_heads."): tensor for name, tensor in found.items()}
    with torch.device("meta"):
        heads = MedusaHeads(config)
    wanted = {_to_layout(name, config, layout): name for name in heads.state_dict()}
    biases = [name for name in wanted if name.endswith(".bias")]
    if layout == "vllm" and not any(name in found for name in biases):  # medusa_fc_bias: false
        found |= {name: torch.zeros(config.hidden_size) for name in biases}
    shapes = {_to_layout(name, config, layout): t.shape for name, t in heads.state_dict().items()}
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in wanted]
    wrong += [
        f"{name} has the shape {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in found and found[name].shape != shape
    ]
    if wrong:
        raise UserError(
            f"{file}: does not hold the heads that config.json describes ({config.num_heads} "
            f"heads of {config.num_layers} residual blocks): {'; '.join(wrong)}. Take config.json "
            "and weights from one model"
        )
    refuse_nonfinite(folder, found)
    state = {ours: found[theirs] for theirs, ours in wanted.items()}
    if (ids_V := state.get("token_ids_V")) is not None:
        state["token_ids_V"] = _checked_ids(file, ids_V, config)
    heads.load_state_dict(state, assign=True)
    return heads.to(device, dtype).requires_grad_(False).eval()


def _checked_ids(file: Path, ids_V: Tensor, config: MedusaConfig) -> Tensor:
    """A shortlist as int64. Raises UserError for one that is no rising list of the target's ids."""
    ids_V = ids_V.long()
    if bool((ids_V.diff() <= 0).any()) or ids_V[0] < 0 or ids_V[-1] >= config.vocab_size:
        raise UserError(
            f"{file}: token_map is no rising list of token ids below {config.vocab_size}: the file "
            "is damaged, copy it again"
        )
    return ids_V


def read_accuracy(folder: Path) -> list[list[float]] | None:
    """Return the measured accuracies (heads, ranks) of a folder; None where it has none. Raises
    UserError for values that are no shares.
    """
    found = read_json(folder / "config.json").get(_ACCURACY)
    if found is None:
        return None
    fine = isinstance(found, list) and all(
        isinstance(row, list)
        and row
        and all(isinstance(share, int | float) and 0 <= share <= 1 for share in row)
        for row in found
    )
    if not fine or not found:
        raise UserError(
            f"{folder / 'config.json'}: {_ACCURACY} is {str(found)[:60]}, expected a list of "
            "shares from 0 to 1 for every head. Take the key out to draft a tree without them"
        )
    return [[float(share) for share in row] for row in found]
