"""The student: a LLaMA of any shape, started from chosen layers of the target or at random."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.errors import UserError
from training.config import StudentConfig
from training.models import random_llama

_WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
_SHARED = (
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def student_config(shape: StudentConfig, target: Any) -> LlamaConfig:
    """The student's LlamaConfig: widths left at 0, vocabulary, context and rope are the target's.

    target: the target's Hugging Face configuration. Raises UserError for shapes that cannot be.
    """
    theirs = target_widths(target)
    given: dict[str, Any] = {name: vars(shape)[name] or theirs[name] for name in _WIDTHS}
    if shape.num_attention_heads and not shape.num_key_value_heads:
        given["num_key_value_heads"] = min(given["num_attention_heads"], target.num_key_value_heads)
    if given["num_attention_heads"] % given["num_key_value_heads"]:
        raise UserError(
            f"drafter.num_attention_heads ({given['num_attention_heads']}) is no multiple of num_key_value_heads ({given['num_key_value_heads']})"
        )
    if shape.num_hidden_layers < 1:
        raise UserError(f"drafter.num_hidden_layers is {shape.num_hidden_layers}; a drafter has at least one layer")
    shared = {name: value for name, value in target.to_dict().items() if name in _SHARED}
    return LlamaConfig(
        num_hidden_layers=shape.num_hidden_layers, rope_parameters=target.rope_parameters, **given, **shared
    )


def chosen_layers(shape: StudentConfig, target_layers: int) -> list[int]:
    """Target layers that the student starts from: as given, or first, last and evenly spaced between; one layer takes the first."""
    if shape.layers:
        wrong = [layer for layer in shape.layers if not 0 <= layer < target_layers]
        if wrong or len(shape.layers) != shape.num_hidden_layers:
            raise UserError(
                f"drafter.layers is {shape.layers}: expected {shape.num_hidden_layers} layers (drafter.num_hidden_layers) "
                f"from 0 to {target_layers - 1}"
            )
        return list(shape.layers)
    if shape.num_hidden_layers > target_layers:
        raise UserError(
            f"drafter.num_hidden_layers is {shape.num_hidden_layers}, the target has {target_layers}; use init=random for a deeper student"
        )
    if shape.num_hidden_layers == 1:
        return [0]
    return [
        round(index * (target_layers - 1) / (shape.num_hidden_layers - 1)) for index in range(shape.num_hidden_layers)
    ]


def build_student(shape: StudentConfig, target: Any, dtype: torch.dtype) -> LlamaForCausalLM:
    """A student of `shape` for the Hugging Face model `target`, with packed attention.

    init=layers copies embedding, final norm, lm_head and the chosen layers, so all widths must be the target's. init=random copies nothing.
    """
    if shape.init not in ("layers", "random"):
        raise UserError(f"drafter.init is '{shape.init}'; expected layers or random")
    config = student_config(shape, target.config)
    student = random_llama(config, dtype)
    if shape.init == "random":
        return student
    _refuse_other_widths(config, target.config)
    source = target.state_dict()
    mapping = {
        f"model.layers.{new}.": f"model.layers.{old}."
        for new, old in enumerate(chosen_layers(shape, target.config.num_hidden_layers))
    }
    weights = {}
    for name in student.state_dict():
        prefix = next((prefix for prefix in mapping if name.startswith(prefix)), "")
        origin = mapping[prefix] + name.removeprefix(prefix) if prefix else name
        if origin not in source:
            raise UserError(
                f"the target has no weight '{origin}': init=layers needs a target of the LLaMA family; use drafter.init=random"
            )
        weights[name] = source[origin].to(dtype)
    student.load_state_dict(weights)
    return student


def target_widths(target: Any) -> dict[str, int]:
    """The widths of a target's configuration; families without an explicit head_dim have hidden_size / heads."""
    fields = target.to_dict()
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return {name: head_dim if name == "head_dim" else fields[name] for name in _WIDTHS}


def _refuse_other_widths(config: LlamaConfig, target: Any) -> None:
    ours, theirs = target_widths(config), target_widths(target)
    for name in _WIDTHS:
        if ours[name] != theirs[name]:
            raise UserError(
                f"drafter.{name} is {ours[name]}, the target's is {theirs[name]}: layers can only be copied at equal widths. "
                "Leave it at 0, or use drafter.init=random"
            )
