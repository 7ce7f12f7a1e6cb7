"""Cut of a target: the kept layers, channels, heads and MLP units, and the resulting student.

A cut is exact: the student computes what the target would compute with everything else masked to
zero (tests/distill/test_cut.py). The RMS norms of both see only the kept channels.

Shapes: L kept layers, C hidden size, H key/value heads, G query heads per group, Q query heads, D
head width, F MLP width; K kept units of a dimension.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decoding.errors import UserError
from jobs.files import disk_error, save_tensors
from training.models.build import random_model
from training.models.shapes import target_widths
from training.parallel.fsdp import GatheredState

FORM = 1  # version of the file format


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
    a_group: int

    @property
    def heads_LQ(self) -> Tensor:
        """Kept query heads, numbered within the complete layer."""
        return self.groups_LK[:, :, None].mul(self.a_group).add(self.queries_LKG).flatten(1)


def keep_everything(config: Any) -> Cut:
    """Return the cut that keeps everything."""
    widths, layers = target_widths(config), config.num_hidden_layers
    groups, heads = widths["num_key_value_heads"], widths["num_attention_heads"]
    return Cut(
        tuple(range(layers)),
        torch.arange(widths["hidden_size"]),
        torch.arange(groups).repeat(layers, 1),
        torch.arange(heads // groups).repeat(layers, groups, 1),
        torch.arange(widths["intermediate_size"]).repeat(layers, 1),
        torch.ones(2 * layers + 1),
        heads // groups,
    )


def cut_state(
    state: Mapping[str, Tensor], cut: Cut, head_dim: int, head: bool = True
) -> dict[str, Tensor]:
    """Return copies of the student's weights by Hugging Face name; reads only the kept layers."""
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
    if head and "lm_head.weight" in state:
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
            kept[name] = tensor.clone()  # as wide as a head, shared by all heads
        else:
            raise UserError(
                f"the target has the weight '{name}', which no supported family has. It cannot be "
                f"cut; choose another target"
            )
    return kept


def _channels(heads_K: Tensor, head_dim: int) -> Tensor:
    """Return the rows of a projection that belong to these heads."""
    return (heads_K[:, None] * head_dim + torch.arange(head_dim)).flatten()


def cut_model(model: Any, cut: Cut, config: Any) -> Any:
    """Cut a student out of a Hugging Face model, with its dtype and device.

    `config` comes from distill.shapes.student_config. If `model` is sharded, all ranks must call
    this: each gets the complete student, and only one layer of the model is gathered at a time.
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
    """Write a cut with the hash of its target and JSON notes on how it was found."""
    tensors = {
        "layers": torch.tensor(cut.layers),
        "hidden": cut.hidden_K,
        "groups": cut.groups_LK,
        "queries": cut.queries_LKG,
        "units": cut.units_LK,
        "norm_scale": cut.norm_scale,
    }
    head = {
        "form": str(FORM),
        "target": target_hash,
        "a_group": str(cut.a_group),
        "notes": json.dumps(notes),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, path, head)
    except (OSError, SafetensorError) as error:
        raise disk_error(path, error) from error


def load_cut(path: Path, target_hash: str) -> Cut:
    """Read a cut that `save_cut` wrote.

    Raises UserError for a missing or damaged file, and for the cut of another target.
    """
    if not path.is_file():
        raise UserError(
            f"{path} does not exist, expected the masks.safetensors of a finished distill.prune run"
        )
    try:
        with safe_open(path, "pt") as file:
            head = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({error}). Copy it again, or prune again"
        ) from error
    if head.get("form") != str(FORM):
        raise UserError(
            f"{path} has cut format {head.get('form')}, expected {FORM}: use a file that "
            f"distill.prune wrote"
        )
    if head["target"] != target_hash:
        raise UserError(
            f"{path} was made for another target ({_source(head)}hash {head['target'][:12]}), "
            f"this one has hash {target_hash[:12]}. Prune this target, or use the model that the "
            f"masks were made for; in a staged run that is the model of the previous stage"
        )
    layers = tuple(int(layer) for layer in found["layers"])
    hidden_K, groups_LK, queries_LKG = found["hidden"], found["groups"], found["queries"]
    return Cut(
        layers,
        hidden_K,
        groups_LK,
        queries_LKG,
        found["units"],
        found["norm_scale"],
        int(head["a_group"]),
    )


def _source(head: dict[str, str]) -> str:
    """Return the folder that a cut was made for, as a prefix, or an empty string if unknown."""
    folder = json.loads(head.get("notes", "{}")).get("source")
    return f"{folder}, " if folder else ""


def refuse_other_shape(cut: Cut, student: Any, path: str) -> None:
    """Raise UserError if a saved cut does not have the student's shape."""
    widths = target_widths(student)
    asked = {"num_hidden_layers": student.num_hidden_layers} | {
        name: widths[name] for name in widths if name != "head_dim"
    }
    held = {
        "num_hidden_layers": len(cut.layers),
        "hidden_size": len(cut.hidden_K),
        "num_key_value_heads": cut.groups_LK.shape[1],
        "num_attention_heads": cut.heads_LQ.shape[1],
        "intermediate_size": cut.units_LK.shape[1],
    }
    for name, size in asked.items():
        if held[name] != size:
            raise UserError(
                f"{path} keeps {held[name]} of {name}, student.{name} is {size}: set the shape "
                f"that the masks were made for"
            )
