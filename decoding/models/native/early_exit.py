"""A view of a native target's first layers, followed by one layer of its own.

The first layers read the target's keys and values. Those of the own layer lie in a spare layer of
the target's cache, so the target moves and drops them with its own when rows change. The own layer
comes last in the weights; the layers between are skipped.

Shapes: B rows, N new tokens, C hidden size, H key/value heads, D head size, S tokens of a draft
vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.models.native.fused import WIDEST, FusedForward
from decoding.models.native.model import NativeTarget
from decoding.models.native.skips import Skips
from decoding.models.native.weights import Layer


class EarlyExit(NativeTarget):
    """A target that ends after its first layers with another layer and norm.

    After every commit of the target, call `follow`, and `append` what the own layer has not read.
    """

    def __init__(
        self, target: NativeTarget, layers: int, own: Layer, norm_C: Tensor, ids_S: Tensor | None
    ) -> None:
        """Wrap an open target, whose cache gets a spare layer.

        layers: number of the target's layers that run. own, norm_C: the layer after them, and the
        norm before the target's lm_head. ids_S: see `Weights.with_layer`.
        """
        target.reserve_layer()
        between = tuple(range(layers, target.config.num_layers))
        weights = target.weights.with_layer(own, norm_C, ids_S)
        name = f"{target.name} up to layer {layers}"
        skips = Skips(between, between)
        super().__init__(weights, name, target.max_length, skips, target.execution)
        self._own = own
        self._own_step: FusedForward | None = None
        if self._fused is not None:  # of the own layer's attention alone, which writes its keys
            self._own_step = FusedForward(weights, [(len(weights.layers) - 1, own, True, False)])
        self.follow(target)

    def _bind(self) -> None:
        super()._bind()
        if self._own_step is not None:
            assert self._cache_L2BHTD is not None and self._rope is not None
            self._own_step.bind(self._cache_L2BHTD, self._rope)

    def append(self, states_BNC: Tensor, counts_B: Sequence[int]) -> None:
        """Write the own layer's keys and values of tokens after the committed ones; commit them.

        states_BNC: the target's states after its first layers, padded on the right, whose own keys
        and values the target has written. counts_B: number of tokens of each row.
        """
        assert self._rope is not None, "open the target first"
        (B, N), device = states_BNC.shape[:2], self.device
        room = len(self._rope[0]) - max(self.lengths_B)  # which padding may exceed
        if self._own_step is not None and B * N <= WIDEST and room >= N:
            self._own_step.write(states_BNC, self.lengths_B)
            self.commit(None, counts_B)
            return
        slots_BN = devices.tensor(self.lengths_B, device)[:, None] + torch.arange(N, device=device)
        slots_BN.clamp_(max=len(self._rope[0]) - 1)  # padding may reach past the cache
        cos, sin = (table_TD[slots_BN][:, :, None] for table_TD in self._rope)
        _, k_BNHD, v_BNHD = self._own.project(self.config, states_BNC, cos, sin)
        rows_B1 = torch.arange(B, device=device)[:, None]
        self._keys[-1][rows_B1, :, slots_BN] = k_BNHD
        self._values[-1][rows_B1, :, slots_BN] = v_BNHD
        self.commit(None, counts_B)
