"""Shapes of students: any LLaMA that the target can be cut to, counted before anything is built.

Heads need not be hidden_size / heads wide, and grouped-query attention keeps as many query heads in
each group. A student is of the target's own family as far as serving engines go: a LLaMA where the
maths allow it (Qwen2's biases are a LLaMA's `attention_bias`), else the target's class (Qwen3
normalizes queries and keys).
"""

import math
import re
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from decoding.errors import UserError
from decoding.models.folder import refuse_unsupported_attention
from decoding.models.native.weights import FAMILIES
from training.config import StudentConfig
from training.models.shapes import WIDTHS, millions, parameter_counts, target_widths

# share by which a count may differ from the size that a name tells: published names are rounded
NAMED = 0.1
# times the target's layers; any width: what is more is a slip, and would fill the memory
DEEPEST, WIDEST = 16, 2**20
ALIGNED = 64  # what products of matrices like their sides to be a multiple of
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
    """The student's configuration: widths left at 0, vocabulary, context, rope and biases are the
    target's.

    target: the target's Hugging Face configuration. Raises UserError for a family that is not built
    here and for shapes that cannot be.
    """
    if target.model_type not in FAMILIES:
        raise UserError(
            f"the target is of the family '{target.model_type}', students are cut from "
            f"{', '.join(FAMILIES)}: take a target of those"
        )
    refuse_unsupported_attention(target.to_dict(), "the target")
    theirs = target_widths(target)
    for name in WIDTHS:
        if vars(shape)[name] < 0:
            raise UserError(
                f"student.{name} is {vars(shape)[name]}, expected 0 (the target's) or more"
            )
    layers = target.num_hidden_layers
    limits = {"num_hidden_layers": DEEPEST * layers, **dict.fromkeys(WIDTHS, WIDEST)}
    for name, most in limits.items():
        if vars(shape)[name] > most:
            theirs_too = {**theirs, "num_hidden_layers": layers}[name]
            raise UserError(
                f"student.{name} is {vars(shape)[name]}, expected at most {most:,} (the target has "
                f"{theirs_too})"
            )
    if shape.head_dim % 2:
        raise UserError(
            f"student.head_dim is {shape.head_dim}, expected an even number: rope turns channels "
            f"in pairs"
        )
    given: dict[str, Any] = {name: vars(shape)[name] or theirs[name] for name in WIDTHS}
    if shape.num_attention_heads and not shape.num_key_value_heads:
        # As many groups as the target has, or the next fewer that share the heads out evenly.
        most = min(given["num_attention_heads"], theirs["num_key_value_heads"])
        given["num_key_value_heads"] = max(
            n for n in range(1, most + 1) if given["num_attention_heads"] % n == 0
        )
    heads, groups = given["num_attention_heads"], given["num_key_value_heads"]
    if heads % groups:
        raise UserError(
            f"student.num_attention_heads ({heads}) is not a multiple of num_key_value_heads "
            f"({groups}): every group has as many query heads"
        )
    if (
        given["hidden_size"] % heads
        and heads > theirs["num_attention_heads"]
        and not shape.hidden_size
    ):
        raise UserError(
            f"student.num_attention_heads is {heads}, the target has "
            f"{theirs['num_attention_heads']}: a student that is cut out is never larger. Lower "
            f"it; from scratch (mode=random) give student.hidden_size as well"
        )
    if (
        0 < theirs["hidden_size"] < given["hidden_size"]
        and given["hidden_size"] % heads
        and not shape.num_attention_heads
    ):
        raise UserError(
            f"student.hidden_size is {given['hidden_size']}, the target has "
            f"{theirs['hidden_size']}, and {heads} query heads: a student that is cut out is never "
            f"larger, so take at most {theirs['hidden_size']}; from scratch (mode=random) give "
            f"student.num_attention_heads as well"
        )
    if target.model_type != "qwen3" and given["hidden_size"] % heads:
        nearest = nearest_divisible_width(given["hidden_size"], heads)
        raise UserError(
            f"student.hidden_size ({given['hidden_size']}) is not a multiple of its {heads} query "
            f"heads. head_dim is free, but transformers and compatible engines do not load such a "
            f"LLaMA. Use {nearest}, the nearest smaller width that fits"
        )
    if shape.num_hidden_layers < 1:
        raise UserError(
            f"student.num_hidden_layers is {shape.num_hidden_layers}; a drafter has at least one "
            f"layer"
        )
    fields = target.to_dict()
    shared = {name: value for name, value in fields.items() if name in _SHARED}
    shared |= {
        "num_hidden_layers": shape.num_hidden_layers,
        "rope_parameters": target.rope_parameters,
        **given,
    }
    if target.model_type == "qwen3":
        return Qwen3Config(attention_bias=fields.get("attention_bias", False), **shared)
    biased = target.model_type == "qwen2" or fields.get("attention_bias", False)
    return LlamaConfig(attention_bias=biased, mlp_bias=fields.get("mlp_bias", False), **shared)


def nearest_divisible_width(size: int, heads: int) -> int:
    """The next smaller width that the heads divide, a multiple of ALIGNED where there is one."""
    step = math.lcm(heads, ALIGNED)
    return size // step * step or size // heads * heads


def refuse_wider(student: Any, target: Any) -> None:
    """Raise UserError for a student that the target cannot be cut to: wider or deeper, other head
    widths, groups of more query heads.
    """
    ours, theirs = target_widths(student), target_widths(target)
    ours["num_hidden_layers"], theirs["num_hidden_layers"] = (
        student.num_hidden_layers,
        target.num_hidden_layers,
    )
    for name, size in ours.items():
        if size > theirs[name]:
            raise UserError(
                f"student.{name} is {size}, the target has {theirs[name]}: a student is cut out of "
                f"its target and is never larger. Lower it, or train the shape from scratch "
                f"(mode=random)"
            )
    if ours["head_dim"] != theirs["head_dim"]:
        raise UserError(
            f"student.head_dim is {ours['head_dim']}, the target's is {theirs['head_dim']}: rope "
            f"turns each channel of a head at a frequency of its own, so heads are cut whole. "
            f"Leave it at 0, or train the shape from scratch (mode=random)"
        )
    a_group = [
        widths["num_attention_heads"] // widths["num_key_value_heads"] for widths in (ours, theirs)
    ]
    if a_group[0] > a_group[1]:
        raise UserError(
            f"student.num_attention_heads / num_key_value_heads is {a_group[0]}, the target has "
            f"{a_group[1]} query heads to a key/value head: take at most "
            f"{a_group[1] * ours['num_key_value_heads']} query heads, or more key/value heads"
        )


def warn_unaligned_widths(student: Any) -> list[str]:
    """Warnings for sides that are no multiple of ALIGNED: such products are slower than
    wider ones.
    """
    sides = {name: target_widths(student)[name] for name in ("hidden_size", "intermediate_size")}
    return [
        f"student.{name} is {size}, not a multiple of {ALIGNED}: {size + -size % ALIGNED} is often "
        f"as fast"
        for name, size in sides.items()
        if size % ALIGNED
    ]


def describe_size_mismatch(name: str, student: Any) -> str:
    """A note where a name tells another size than this target's vocabulary and groups give the
    shape (`llama_796m`, `sheared_2b7`); else empty.
    """
    told = re.search(r"_(\d+)(m|b)(\d*)$", name)
    if told is None:
        return ""
    whole, unit, tenths = told.groups()
    named = float(f"{whole}.{tenths or 0}") * (1e6 if unit == "m" else 1e9)
    count = parameter_counts(student)["all"]
    if abs(count - named) <= NAMED * named:
        return ""
    return (
        f"note: student.name is {name}, and with this target's vocabulary of "
        f"{student.vocab_size:,} the shape has {millions(count)}: "
        f"student.name={name[: told.start()]}_{count / 1e6:.0f}m would say so"
    )


def removal_flops(config: Any, gone: int = 0) -> float:
    """Operations a token of taking layers away one by one
    (distill.prune.layer_choice.removal_order): of k layers left, each is left out in turn.

    gone: layers that were taken away before.
    """
    layers = config.num_hidden_layers
    a_layer, head = (
        2.0 * parameter_counts(config)["layers"] / layers,
        2.0 * config.vocab_size * config.hidden_size,
    )
    return sum(k * (k + 1) / 2 * a_layer + (k + 1) * head for k in range(2, layers - gone + 1))
