"""Cut of a target: the kept layers, channels, heads and MLP units, and the resulting student.

A cut is exact: the student equals the target with all other units masked to zero and with RMS norms
over the kept channels (tests/distill/test_cut.py).

Shapes: L kept layers, C hidden size, H key/value heads, G query heads per group, Q query heads, D
head width, F MLP width; K kept units of a dimension.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decoding.errors import UserError
from jobs.files import write_tensors
from training.models.build import random_model
from training.models.shapes import target_widths
from training.parallel.fsdp import GatheredState

FORM = 1  # version of the file format
# Tensors of the file by their field in `Cut`; `layers` is stored too.
_STORED = {
    "hidden": "hidden_K",
    "groups": "groups_LK",
    "queries": "queries_LKG",
    "units": "units_LK",
    "norm_scale": "norm_scale",
}


@dataclass(frozen=True)
class Cut:
    """Kept units as ascending indices into the target."""

    layers: tuple[int, ...]
    # residual channels, the same in all layers
    hidden_K: Tensor
    # key/value heads
    groups_LK: Tensor
    # query heads within the kept groups, from 0
    queries_LKG: Tensor
    # MLP units
    units_LK: Tensor
    # factors for the weights of each layer's two norms and of the last norm [2 L + 1]
    norm_scale: Tensor
    # number of query heads per group of the target
    group_size: int

    @property
    def heads_LQ(self) -> Tensor:
        """Kept query heads, numbered within the complete layer."""
        return self.groups_LK[:, :, None].mul(self.group_size).add(self.queries_LKG).flatten(1)


def keep_layers(config: Any, layers: Sequence[int]) -> Cut:
    """Return the cut that keeps these layers at full width.

    config: the target's Hugging Face configuration.
    """
    widths, count = target_widths(config), len(layers)
    groups = widths["num_key_value_heads"]
    group_size = widths["num_attention_heads"] // groups
    return Cut(
        tuple(layers),
        torch.arange(widths["hidden_size"]),
        torch.arange(groups).repeat(count, 1),
        torch.arange(group_size).repeat(count, groups, 1),
        torch.arange(widths["intermediate_size"]).repeat(count, 1),
        torch.ones(2 * count + 1),
        group_size,
    )


def cut_state(
    state: Mapping[str, Tensor], cut: Cut, head_dim: int, head: bool = True
) -> dict[str, Tensor]:
    """Return the student's weights by Hugging Face name, copied from the target's `state`.

    Only the kept layers are read. head: whether to include lm_head. Raises UserError for an unknown
    weight.
    """
    hidden = cut.hidden_K
    kept = {"model.embed_tokens.weight": state["model.embed_tokens.weight"][:, hidden].clone()}
    for new, old in enumerate(cut.layers):
        prefix = f"model.layers.{old}."
        source = {
            name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)
        }
        for name, tensor in _cut_layer(source, cut, new, head_dim).items():
            kept[f"model.layers.{new}.{name}"] = tensor
    kept["model.norm.weight"] = state["model.norm.weight"][hidden] * cut.norm_scale[-1]
    if head:
        kept["lm_head.weight"] = state["lm_head.weight"][:, hidden].clone()
    return kept


def _cut_layer(layer: Mapping[str, Tensor], cut: Cut, new: int, head_dim: int) -> dict[str, Tensor]:
    hidden, units = cut.hidden_K, cut.units_LK[new]
    query, key = (_channels(heads[new], head_dim) for heads in (cut.heads_LQ, cut.groups_LK))
    rows = {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": key,
        "self_attn.o_proj": hidden,
        "mlp.gate_proj": units,
        "mlp.up_proj": units,
        "mlp.down_proj": hidden,
    }
    columns = {"self_attn.o_proj": query, "mlp.down_proj": units}
    kept = {}
    for name, tensor in layer.items():
        module, kind = name.rsplit(".", 1)
        if module in rows:
            tensor = tensor[rows[module]]
            kept[name] = tensor[:, columns.get(module, hidden)] if kind == "weight" else tensor
        elif module in ("input_layernorm", "post_attention_layernorm"):
            kept[name] = tensor[hidden] * cut.norm_scale[2 * new + (module != "input_layernorm")]
        elif module in ("self_attn.q_norm", "self_attn.k_norm"):
            kept[name] = tensor.clone()  # one head wide, shared by all heads
        else:
            raise UserError(
                f"the target has the unknown weight '{name}', which cannot be cut. Choose a "
                f"target of a supported family"
            )
    return kept


def _channels(heads_K: Tensor, head_dim: int) -> Tensor:
    """Return the indices of a projection's channels that belong to these heads."""
    return (heads_K[:, None] * head_dim + torch.arange(head_dim)).flatten()


def cut_model(model: Any, cut: Cut, config: Any) -> Any:
    """Cut a student out of a Hugging Face model, in the model's dtype and on its device.

    config: the student's, from distill.shapes.student_config. If `model` is sharded, all ranks must
    call this function. It gathers one layer of the model at a time, and each rank gets the complete
    student. Raises UserError for an unknown weight.
    """
    weight = model.model.embed_tokens.weight
    student = random_model(config, weight.dtype, empty=True)
    state, head_dim = GatheredState(model.state_dict()), target_widths(config)["head_dim"]
    kept = cut_state(state, cut, head_dim, head=not config.tie_word_embeddings)
    kept = {name: tensor.to(weight.dtype) for name, tensor in kept.items()}
    for name, wanted in student.state_dict().items():
        # A LLaMA with biases has this bias, Qwen2 does not.
        if name.endswith("o_proj.bias") and name not in kept:
            kept[name] = torch.zeros(wanted.shape, dtype=weight.dtype, device=weight.device)
    kept = {name: tensor.to(weight.device) for name, tensor in kept.items()}
    student.load_state_dict(kept, strict=not config.tie_word_embeddings, assign=True)
    student.tie_weights()
    return student


def save_cut(cut: Cut, path: Path, target_hash: str, notes: dict[str, Any]) -> None:
    """Write a cut as safetensors, with the hash of its target and notes that JSON can hold."""
    tensors = {name: getattr(cut, field) for name, field in _STORED.items()}
    tensors |= {"layers": torch.tensor(cut.layers)}
    head = {
        "form": str(FORM),
        "target": target_hash,
        "a_group": str(cut.group_size),
        "notes": json.dumps(notes),
    }
    write_tensors(path, tensors, head)


def refuse_missing_cut(path: Path) -> None:
    """Raise UserError if the file of a cut does not exist, or is a folder."""
    if not path.is_file():
        raise UserError(
            f"{path} is not a file, expected the masks.safetensors of a finished distill.prune "
            f"run. Check masks="
        )


def load_cut(path: Path, target_hash: str) -> Cut:
    """Read a cut that `save_cut` wrote.

    Raises UserError for a missing or damaged file, another file format, and the cut of another
    target.
    """
    refuse_missing_cut(path)
    try:
        with safe_open(path, "pt") as file:
            head = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise UserError(
            f"{path} is damaged, expected a safetensors file ({error}). Copy it again, or prune "
            f"again"
        ) from error
    if head.get("form") != str(FORM):
        raise UserError(
            f"{path} has cut format {head.get('form')}, expected {FORM}. Use a file that "
            f"distill.prune wrote"
        )
    if head["target"] != target_hash:
        folder = json.loads(head.get("notes", "{}")).get("source")
        source = f"{folder}, " if folder else ""
        raise UserError(
            f"{path} was made for another target ({source}hash {head['target'][:12]}), expected "
            f"one with hash {target_hash[:12]}. Prune this target, or use the model that the masks "
            f"were made for (in a staged run, the student of the previous stage)"
        )
    return Cut(
        layers=tuple(found["layers"].tolist()),
        group_size=int(head["a_group"]),
        **{field: found[name] for name, field in _STORED.items()},
    )


def refuse_other_shape(cut: Cut, student: Any, path: str) -> None:
    """Raise UserError if a cut does not have the student's shape. path: the cut's file."""
    asked = {**target_widths(student), "num_hidden_layers": student.num_hidden_layers}
    kept = {
        "num_hidden_layers": len(cut.layers),
        "hidden_size": len(cut.hidden_K),
        "num_key_value_heads": cut.groups_LK.shape[1],
        "num_attention_heads": cut.heads_LQ.shape[1],
        "intermediate_size": cut.units_LK.shape[1],
    }
    for name, size in kept.items():
        if asked[name] != size:
            raise UserError(
                f"student.{name} is {asked[name]}, expected {size} as in {path}. Set the student's "
                f"shape to the shape of the masks"
            )
