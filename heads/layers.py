"""Layers that several heads share: rotary positions and the gated feed-forward layer.

Shapes: X any dimensions, T positions, H hidden size, E inner size, D head size.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from decoding import devices
from decoding.models.native import rope
from decoding.models.native.linear import Linear, PlainLinear

Rope = tuple[Tensor, Tensor]  # cos and sin of some positions, (..., 1, D)


def rope_tables(
    fields: Mapping[str, Any], head_dim: int, max_positions: int, length: int, like: Tensor
) -> Rope:
    """Return cos and sin (T, 1, D) of the positions from 0 to length - 1.

    fields, max_positions: of `rope.inverse_frequencies`. like: a tensor of the dtype and on the
    device that the tables get.
    """
    frequencies = rope.inverse_frequencies(dict(fields), head_dim, max_positions)
    cos_TD, sin_TD = rope.rope_tables(frequencies, length, like.dtype)
    return (
        devices.copy_to_device(cos_TD[:, None], like.device),
        devices.copy_to_device(sin_TD[:, None], like.device),
    )


def rope_at(tables: Rope, positions_X: Tensor) -> Rope:
    """Return cos and sin (..., 1, D) at these positions."""
    cos_T1D, sin_T1D = tables
    return cos_T1D[positions_X], sin_T1D[positions_X]


def share_weights(layers: list[nn.Linear], joined: Linear) -> None:
    """Let the weights of linear layers be parts of their joined weight, which is not packed."""
    assert isinstance(joined, PlainLinear)
    parts = joined.weight_OI.split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x_XH: Tensor) -> Tensor:
        found = self.down_proj(F.silu(self.gate_proj(x_XH)) * self.up_proj(x_XH))
        assert isinstance(found, Tensor)
        return found
