"""Rotary position tables, plain and with Llama 3.1's frequency scaling.

Source: RoFormer (arXiv 2104.09864), the rotate-half form of Hugging Face Llama; Llama 3.1 scaling
as in `transformers.modeling_rope_utils`. Shapes: X any dimensions, T positions, D head size.
"""

import math
from typing import Any

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.values import quote

KINDS = ("default", "llama3")


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope fields of a config.json, in the form of transformers 5 or the older one.

    Raises UserError for a kind that this backend lacks, and for two fields that contradict each
    other.
    """
    given = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for key, rope in given.items():
        for name in ("rope_type", "type"):
            if name in rope and rope[name] not in KINDS:
                raise UserError(
                    f"config.json: {key}.{name} '{rope[name]}' is not known to the native backend, "
                    f"which has 'default' and 'llama3'. Use backend=hf."
                )
    first, *others = [_complete(rope, config) for rope in given.values()] or [_complete({}, config)]
    # transformers reads only rope_scaling if both exist, so neither is preferred silently
    if others and others[0] != first:
        raise UserError(
            f"config.json: rope_scaling is {quote(config['rope_scaling'])}, which contradicts "
            f"rope_parameters ({quote(config['rope_parameters'])}), expected the same rotary "
            f"positions in both. Remove the field that the model was not trained with."
        )
    return first


def _complete(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return rope fields with their defaults, and the kind under its newer name."""
    defaults = {
        "rope_theta": config.get("rope_theta", 10000.0),
        "rope_type": rope.get("type", "default"),
    }
    return defaults | {name: value for name, value in rope.items() if name != "type"}


def inverse_frequencies(parameters: dict[str, Any], head_dim: int, max_positions: int) -> Tensor:
    """Return the rotation angles per position (D / 2,), in float32 as in the reference."""
    frequencies = 1.0 / (
        parameters["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    )
    if parameters["rope_type"] == "default":
        return frequencies
    factor, low, high = (
        float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor")
    )
    old_context = float(parameters.get("original_max_position_embeddings", max_positions))
    wavelengths = 2 * math.pi / frequencies
    smooth = (old_context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > old_context / low, frequencies / factor, blended)
    return torch.where(wavelengths < old_context / high, frequencies, scaled)


def rope_tables(
    frequencies: Tensor, num_positions: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (cos_TD, sin_TD), with which `rotate` turns heads to their positions.

    The sign of rotate-half is part of sin.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x_XD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys (..., D) turned to their positions.

    cos, sin: rows of `rope_tables`, which broadcast over the heads.
    """
    return (x_XD * cos).addcmul_(x_XD.roll(x_XD.shape[-1] // 2, -1), sin)
