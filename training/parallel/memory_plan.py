"""Bytes that one rank needs for training, computed for each kind of parallelism.

Rajbhandari et al. 2020 (ZeRO, section 3.1) count 16 bytes per parameter for Adam in mixed
precision: 2 for the weight, 2 for its gradient, and 12 for the optimizer (float32 master and two
moments). Their stages shard the 12, then the gradient, then the weight. Here a bfloat16 weight's
gradient accumulates in float32 (4 more bytes). A float32 weight is its master, except with
DeepSpeed, which always keeps one. Not counted are the CUDA context and libraries (about 0.5 to 1 GB
per GPU) and memory that the allocator wastes.
"""

from collections.abc import Mapping
from typing import Any

from decoding import devices
from decoding.values import check_choice
from jobs.amounts import size
from jobs.ranks import KINDS, SHARDED_WEIGHTS, ZERO
from training.held_out.answers import PROMPTS_PER_BATCH, HeldOutFields
from training.losses.chunked import chunk_rows
from training.models.build import dtype_of
from training.models.shapes import (
    cache_bytes_per_token,
    head_rows,
    parameter_counts,
    target_widths,
)
from training.parallel.zero import BUCKET

_WIDTHS = {"float32": 4, "bfloat16": 2}
_MOMENTS = 8  # two of float32
_MASTER = 4


def bytes_per_rank(
    trained_parameters: int,
    frozen_parameters: int,
    kind: str,
    world_size: int,
    dtype: str,
    trained_outside_layers: int = 0,
    frozen_outside_layers: int = 0,
) -> dict[str, float]:
    """Return the bytes of a rank: weights, gradients, optimizer, frozen, buffers and total.

    `frozen` is the target's share. dtype: float32, or bfloat16 with float32 masters.
    trained_outside_layers: trained parameters that zero3 and fsdp gather from a step's forward to
    its backward (embedding, lm_head). frozen_outside_layers: parameters of the target that every
    rank holds in full (lm_head). The decoder layer gathered while it runs is not counted. Raises
    UserError for an unknown kind or dtype.
    """
    check_choice("parallel.kind", kind, KINDS)
    check_choice("dtype", dtype, tuple(_WIDTHS))
    width, stage = _WIDTHS[dtype], ZERO.get(kind, 0)
    mixed, fsdp = dtype == "bfloat16", kind == "fsdp"
    weight_ranks = world_size if kind in SHARDED_WEIGHTS else 1
    gradient_ranks = world_size if stage >= 2 or fsdp else 1
    state_ranks = world_size if stage or fsdp else 1
    gradient = float(width) if stage == 1 or not mixed else 4.0 if stage else width + 4.0
    # DeepSpeed converts its shard of the gradients to float32 for the update.
    widened = 4.0 / world_size if stage == 1 else 0.0
    plan = {
        "weights": trained_parameters * width / weight_ranks,
        "gradients": trained_parameters * (gradient / gradient_ranks + widened),
        "optimizer": trained_parameters
        * (_MOMENTS + (_MASTER if mixed or stage else 0))
        / state_ranks,
        "frozen": frozen_parameters * width / weight_ranks,
        "buffers": float(min(BUCKET, trained_parameters) * width * 2 if stage else 0),
    }
    if weight_ranks > 1:
        others = 1 - 1 / weight_ranks
        plan["frozen"] += frozen_outside_layers * width * others
        # and their gradients, before they are sharded
        plan["buffers"] += trained_outside_layers * width * 2 * others
    return plan | {"total": sum(plan.values())}


def answering_bytes(target: Any, config: HeldOutFields) -> dict[str, float]:
    """Return the bytes of one GPU of rank 0 while the target answers the held-out prompts.

    `second copy`: the target, which decoding loads again in target.dtype, in full or spread over
    GPUs by target.parallel. `keys and values up to`: the cache of one batch of prompts of
    data.max_length tokens each. target: the target's Hugging Face configuration.
    """
    asked, width = config.target, dtype_of(config.target.dtype).itemsize
    sharing = (asked.processes or devices.count_gpus() or 1) if asked.parallel != "none" else 1
    tokens = min(PROMPTS_PER_BATCH, config.held_out.max_prompts) * config.data.max_length
    parts = {
        "second copy": parameter_counts(target)["all"] * width,
        "keys and values up to": tokens * cache_bytes_per_token(target, width),
    }
    return {name: count / sharing for name, count in parts.items()}


def answering_line(held: Mapping[str, float]) -> str:
    """Describe the memory of rank 0 while the target answers, from the bytes held by each part."""
    parts = ", ".join(f"{name} {size(count)}" for name, count in held.items())
    return (
        f"memory of rank 0 while the target answers the held-out prompts: "
        f"{size(sum(held.values()))} ({parts})"
    )


def loss_bytes(rows: float, vocabulary: int, output_parameters: int, width: int) -> float:
    """Return the bytes of a chunked loss: logits of the largest chunk, and output gradients.

    rows: number of predictions. width: bytes per weight of the output layers, whose gradients are
    kept in float32 and in their dtype.
    """
    return min(chunk_rows(vocabulary), rows) * vocabulary * 4 * 6 + output_parameters * (4 + width)


def activation_bytes(
    config: Any, tokens: int, dtype: str, checkpointing: bool = False
) -> dict[str, float]:
    """Return the bytes that autograd keeps for `tokens` packed tokens: `layers` and `loss`.

    Counted from the operations of Hugging Face's LLaMA, as Korthikanti et al. 2022 (section 4.1)
    count GPT's; the fused attention kernel keeps no scores. A layer keeps for each of its two norms
    the float32 input, the normed value and its product with the weight; for attention q, k and v
    (repeated over a group's heads), the result and its contiguous copy; for the MLP gate, up,
    silu(gate) and their product. checkpointing: every layer keeps only its input, plus one complete
    layer during its backward. `loss`: logits of one chunk with derived tensors, and the lm_head's
    gradient in float32 and in its dtype. A test holds the layers' estimate to 10 %.
    """
    width, widths, layers = _WIDTHS[dtype], target_widths(config), config.num_hidden_layers
    hidden, vocabulary = widths["hidden_size"], config.vocab_size
    heads = widths["num_attention_heads"] * widths["head_dim"]
    norms = 2 * (4 + 2 * width) * hidden
    layer = tokens * (norms + width * (5 * heads + 4 * widths["intermediate_size"]))
    kept = layers * tokens * width * hidden + layer if checkpointing else layers * layer
    loss = loss_bytes(tokens, vocabulary, head_rows(config) * hidden, width)
    return {"layers": float(kept), "loss": float(loss)}
