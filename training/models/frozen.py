"""The frozen target of a training job, in full on every rank or read shard by shard.

A target too large for one GPU would not fit the machine's memory several times either: eight ranks
that each read 13.5 GB take 108 GB. A sharded model therefore starts on the meta device, and each
rank reads only its rows of every weight.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from decoding.errors import UserError
from decoding.models.folder import weight_files
from decoding.models.model_check import check_model, check_tied_head
from training.models.attention import PACKED
from training.models.build import known_config, load_causal_lm
from training.objectives import freeze
from training.parallel.strategy import Parallel

_ROPE = "model.rotary_emb."


def load_frozen(folder: Path, dtype: torch.dtype, parallel: Parallel) -> Any:
    """Load a folder's causal LM with packed attention, frozen, in full or sharded over ranks.

    Raises UserError if the folder holds no language model, or a damaged one.
    """
    if not parallel.shards_weights:
        return parallel.place_frozen(freeze(load_causal_lm(folder, dtype)))
    check_model(folder)
    check_tied_head(folder)
    with torch.device("meta"):
        config = known_config(folder)
        model = freeze(
            AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
            )
        )
    files = {name: file for file in weight_files(folder) for name in _tensor_names(file)}
    why = _find_mismatch(model, files)
    if why:
        if parallel.is_main:
            print(f"note: {why}, so every rank reads the full target before sharding it")
        return parallel.place_frozen(freeze(load_causal_lm(folder, dtype)))
    parallel.place_frozen(model)
    # no file holds the rope frequencies
    if any(name.startswith(_ROPE) for name, _ in model.named_buffers()):
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(parallel.device)
    _read_weights(model, files, parallel)
    return model


def _find_mismatch(model: Any, files: dict[str, Path]) -> str:
    """Return why the model cannot be filled tensor by tensor from the files; "" if it can."""
    lacking = sorted({name for name, _ in model.named_parameters()} - files.keys())
    if lacking:
        return f"none of the target's files holds '{lacking[0]}'"
    computed = [name for name, _ in model.named_buffers() if not name.startswith(_ROPE)]
    return f"the target computes '{computed[0]}' when it is built" if computed else ""


@torch.no_grad()
def _read_weights(model: Any, files: dict[str, Path], parallel: Parallel) -> None:
    """Fill every parameter, or this rank's rows of it, from the files.

    Raises UserError for a tensor of another shape.
    """
    tied = model.config.tie_word_embeddings
    wanted: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        source = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
        wanted.setdefault(source, []).append(parameter)
    for file in dict.fromkeys(files.values()):
        with safe_open(file, "pt") as opened:  # mapped while it is read
            for name in wanted.keys() & opened.keys():
                for parameter in wanted[name]:
                    _fill_parameter(parameter, opened.get_slice(name), parallel, f"{file}: {name}")


def _fill_parameter(parameter: Tensor, rows: Any, parallel: Parallel, source: str) -> None:
    shape = list(parameter.shape)
    if list(rows.get_shape()) != shape:
        raise UserError(
            f"{source} has shape {rows.get_shape()}, but config.json expects {shape}. Copy the "
            f"folder again"
        )
    if not isinstance(parameter, DTensor):
        parameter.copy_(rows[:])
        return
    assert parameter.placements == (Shard(0),), parameter.placements
    mine = parameter.to_local()
    if len(mine):  # shards have equal sizes except for the last ones
        first = parallel.rank * -(-shape[0] // parallel.world_size)
        mine.copy_(rows[first : first + len(mine)])


def _tensor_names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())
