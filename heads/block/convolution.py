"""The convolution of DFlash2: each slot of a block mixes with the slots just before it.

A sub-layer of a decoder layer (attention or MLP) has one convolution of its input and one of its
output. Channel c of the mixed slot t is the sum over the taps o of
(base[o, c] + delta_t[o, group of c]) x[t - o, c], where slots before the block are zero. Both
deltas of a slot are a linear map of the sub-layer's input there. A new convolution changes nothing.

Shapes: B rows, A blocks of a row, S slots, N = A S, H hidden size, O taps, G groups of channels.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.block.shape import BlockConfig

BEFORE, AFTER = 0, 1  # the sub-layer


class BlockConvolution(nn.Module):
    """The convolutions around one sub-layer."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        H, taps = config.hidden_size, config.conv_taps
        self.block_size, self.taps, self.group = config.block_size, taps, config.conv_group
        base_2OH = torch.zeros(2, taps, H)
        base_2OH[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base_2OH)
        self.kernel_projection = nn.Linear(H, 2 * taps * (H // config.conv_group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x_BNH: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the output (B, N, H) of a sub-layer between its convolutions."""
        deltas_BN2OG = self.kernel_projection(x_BNH).unflatten(-1, (2, self.taps, -1))
        mixed_BNH = self._mix(x_BNH, deltas_BN2OG[:, :, BEFORE], self.base_kernel[BEFORE])
        found_BNH = layer(mixed_BNH)
        return self._mix(found_BNH, deltas_BN2OG[:, :, AFTER], self.base_kernel[AFTER])

    def _mix(self, x_BNH: Tensor, deltas_BNOG: Tensor, base_OH: Tensor) -> Tensor:
        """Return the mixed slots (B, N, H)."""
        S = self.block_size
        x_BASH = x_BNH.unflatten(1, (-1, S))
        mixed_BASH = torch.zeros_like(x_BASH)
        for tap in range(self.taps):
            before_BASH = F.pad(x_BASH, (0, 0, tap, 0))[:, :, :S]
            delta_BNH = deltas_BNOG[:, :, tap].repeat_interleave(self.group, -1)
            kernel_BASH = (base_OH[tap] + delta_BNH).unflatten(1, (-1, S))
            mixed_BASH = mixed_BASH + kernel_BASH * before_BASH
        return mixed_BASH.flatten(1, 2)


def run_between(
    convolution: BlockConvolution | None, layer: Callable[[Tensor], Tensor], x_BNH: Tensor
) -> Tensor:
    """Return the output (B, N, H) of a sub-layer, between its convolutions if it has them."""
    return layer(x_BNH) if convolution is None else cast(Tensor, convolution(x_BNH, layer))
