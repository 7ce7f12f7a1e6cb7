"""Shapes of students: their configurations, and checks before a model is built.

The width of a head need not be hidden_size / heads. With grouped-query attention every group keeps
the same number of query heads. A student is a LLaMA if one can compute it, because serving engines
load a LLaMA best. Mistral and Qwen2 students are LLaMAs (Qwen2's biases are `attention_bias`). A
Qwen3 student is a Qwen3, which normalizes queries and keys.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from decoding.errors import UserError
from decoding.models.folder import refuse_unsupported_attention
from decoding.models.native.weights import FAMILIES
from training.config import StudentConfig
from training.models.shapes import WIDTHS, millions, parameter_counts, target_widths

# Allowed relative difference between the number of parameters and the size in a name.
NAMED = 0.1
# Limits that catch typing errors, which would fill the memory: the number of layers relative to the
# target's, and a width.
DEEPEST, WIDEST = 16, 2**20
# Matrix products are fastest with dimensions that are multiples of this.
ALIGNED = 64
_SHARED = (
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def student_config(shape: StudentConfig, target: Any) -> LlamaConfig | Qwen3Config:
    """Return the student's Hugging Face configuration.

    Vocabulary, context, rope, biases and all widths that are 0 come from the target's
    configuration. Raises UserError for unsupported families and invalid shapes.
    """
    if target.model_type not in FAMILIES:
        raise UserError(
            f"the target is of the family '{target.model_type}', expected one of "
            f"{', '.join(FAMILIES)}. Choose a target of one of these families"
        )
    refuse_unsupported_attention(target.to_dict(), "the target")
    theirs = {**target_widths(target), "num_hidden_layers": target.num_hidden_layers}
    _refuse_bad_sizes(shape, theirs)
    widths = _fill_widths(shape, theirs)
    _refuse_bad_heads(shape, widths, theirs, target.model_type)
    fields = target.to_dict()
    shared = {name: fields[name] for name in _SHARED if name in fields} | {
        "num_hidden_layers": shape.num_hidden_layers,
        "rope_parameters": target.rope_parameters,
        **widths,
    }
    if target.model_type == "qwen3":
        return Qwen3Config(attention_bias=fields.get("attention_bias", False), **shared)
    biased = target.model_type == "qwen2" or fields.get("attention_bias", False)
    return LlamaConfig(attention_bias=biased, mlp_bias=fields.get("mlp_bias", False), **shared)


def _refuse_bad_sizes(shape: StudentConfig, theirs: Mapping[str, int]) -> None:
    """Raise UserError for a number of layers or a width that is out of range."""
    for name, size in theirs.items():
        least, most, lowest = 0, WIDEST, f"0 for the target's {size}, or 1"
        if name == "num_hidden_layers":
            least, most, lowest = 1, DEEPEST * size, "1"
        if not least <= vars(shape)[name] <= most:
            raise UserError(f"student.{name} is {vars(shape)[name]}, expected {lowest} to {most:,}")
    if shape.head_dim % 2:
        raise UserError(
            f"student.head_dim is {shape.head_dim}, expected an even number, because rope rotates "
            f"pairs of channels"
        )


def _fill_widths(shape: StudentConfig, theirs: Mapping[str, int]) -> dict[str, Any]:
    """Return the student's widths, with the target's for those that are 0.

    If only the number of query heads is set, the number of key/value heads is the target's or, if
    this does not divide the query heads, the next smaller number that does.
    """
    widths = {name: vars(shape)[name] or theirs[name] for name in WIDTHS}
    if shape.num_attention_heads and not shape.num_key_value_heads:
        heads = shape.num_attention_heads
        most = min(heads, theirs["num_key_value_heads"])
        widths["num_key_value_heads"] = max(n for n in range(1, most + 1) if heads % n == 0)
    return widths


def _refuse_bad_heads(
    shape: StudentConfig, widths: Mapping[str, int], theirs: Mapping[str, int], family: str
) -> None:
    """Raise UserError if the heads do not divide into groups, or the hidden size into heads."""
    hidden, heads = widths["hidden_size"], widths["num_attention_heads"]
    groups = widths["num_key_value_heads"]
    if heads % groups:
        raise UserError(
            f"student.num_attention_heads is {heads}, expected a multiple of num_key_value_heads "
            f"({groups}), because all groups must have the same number of query heads"
        )
    if hidden % heads == 0:
        return
    for name, other in (
        ("num_attention_heads", "hidden_size"),
        ("hidden_size", "num_attention_heads"),
    ):
        if widths[name] > theirs[name] and not vars(shape)[other]:
            raise UserError(
                f"student.{name} is {widths[name]}, expected at most the target's {theirs[name]} "
                f"for a pruned student. Lower it, or also set student.{other} to train from "
                f"scratch (mode=random)"
            )
    if family != "qwen3":
        raise UserError(
            f"student.hidden_size is {hidden}, expected a multiple of the {heads} query heads, "
            f"because transformers loads no other LLaMA. Use "
            f"{nearest_divisible_width(hidden, heads) or heads}, for example"
        )


def nearest_divisible_width(size: int, heads: int) -> int:
    """Return the largest multiple of `heads` up to `size`, if possible also one of ALIGNED."""
    step = math.lcm(heads, ALIGNED)
    return size // step * step or size // heads * heads


def refuse_wider(student: Any, target: Any) -> None:
    """Raise UserError if the target cannot be cut to the student.

    The student must be at most as wide and as deep as the target, have the same head width, and
    have at most as many query heads per group. student, target: Hugging Face configurations.
    """
    ours, theirs = (
        {**target_widths(config), "num_hidden_layers": config.num_hidden_layers}
        for config in (student, target)
    )
    for name, size in ours.items():
        if size > theirs[name]:
            raise UserError(
                f"student.{name} is {size}, expected at most the target's {theirs[name]}. Lower "
                f"it, or train the shape from scratch (mode=random)"
            )
    if ours["head_dim"] != theirs["head_dim"]:
        raise UserError(
            f"student.head_dim is {ours['head_dim']}, expected the target's {theirs['head_dim']}, "
            f"because rope rotates each channel of a head at its frequency. Leave head_dim at 0, "
            f"or train the shape from scratch (mode=random)"
        )
    kept, full = (
        one["num_attention_heads"] // one["num_key_value_heads"] for one in (ours, theirs)
    )
    if kept > full:
        raise UserError(
            f"student.num_attention_heads / num_key_value_heads is {kept}, expected at most the "
            f"target's {full}. Use at most {full * ours['num_key_value_heads']} query heads, or "
            f"more key/value heads"
        )


def warn_unaligned_widths(student: Any) -> list[str]:
    """Return a warning for each of hidden size and MLP width that is not a multiple of ALIGNED.

    Products with a slightly larger, aligned matrix are often as fast.
    """
    return [
        f"student.{name} is {size}, not a multiple of {ALIGNED}: {size + -size % ALIGNED} is often "
        f"as fast"
        for name, size in target_widths(student).items()
        if name in ("hidden_size", "intermediate_size") and size % ALIGNED
    ]


def describe_size_mismatch(name: str, student: Any) -> str:
    """Return a note if the size in a student's name (`llama_796m`, `sheared_2b7`) is wrong.

    The number of parameters depends on the target's vocabulary and key/value heads. Returns an
    empty string if the size is right or the name has none.
    """
    size = re.search(r"_(\d+)(m|b)(\d*)$", name)
    if size is None:
        return ""
    named = float(f"{size[1]}.{size[3] or 0}") * (1e6 if size[2] == "m" else 1e9)
    count = parameter_counts(student)["all"]
    if abs(count - named) <= NAMED * named:
        return ""
    return (
        f"note: student.name is {name}, but with this target's vocabulary of "
        f"{student.vocab_size:,} the shape has {millions(count)}: a better name is "
        f"student.name={name[: size.start()]}_{count / 1e6:.0f}m"
    )


def removal_flops(config: Any, removed: int = 0) -> float:
    """Return the FLOPs per token of `distill.prune.layer_choice.find_removal_order`.

    removed: number of layers that an interrupted search removed.
    """
    layers, head = config.num_hidden_layers, 2.0 * config.vocab_size * config.hidden_size
    per_layer = 2.0 * parameter_counts(config)["layers"] / layers
    # With k layers left, a step runs the model without each of them.
    left = range(2, layers - removed + 1)
    return sum(k * (k + 1) / 2 * per_layer + (k + 1) * head for k in left)
