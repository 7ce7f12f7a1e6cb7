"""A forward of the native target that a CUDA graph can record: fixed shapes, fixed buffers.

The eager version is `NativeTarget.features`, which slices the cache and the mask by the rows'
lengths on the host. Here the lengths are a tensor, the keys of a *bucket* of cache slots are read,
and a mask made on the device hides slots past each row's length. Buckets grow by at most a quarter,
so that short contexts do not pay for long ones. A step is recorded on first use for each (rows,
tokens, chain or tree, bucket, taps) and replayed afterwards. On a CPU the step runs unrecorded, so
that tests compare it with the eager version.

Shapes: B rows, N new tokens, V vocabulary, C hidden size, Q query heads, H key/value heads, G = Q /
H, D head size, T slots of a bucket, S slots of the cache, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.models.cache import visible_slots
from decoding.models.native.linear import rms_norm
from decoding.models.native.skips import KeptLayer
from decoding.models.native.weights import Layer, NativeConfig, Weights
from decoding.models.taps import join_taps

SMALLEST_BUCKET = 512  # slots; then four buckets to each doubling: 640, 768, 896, 1024, 1280 ...
SLOT_MULTIPLE = 64  # the slots of a cache are a multiple of it
# Maximum new tokens of a recorded step. Wide beams have 257 and more; wider forwards are bound by
# their products, not by launches.
WIDEST = 512


def bucket(slots: int, most: int) -> int:
    """Return the smallest bucket of at least `slots`, limited to the cache's `most` slots."""
    size = SMALLEST_BUCKET
    while size < slots:
        size += (1 << size.bit_length() - 1) // 4
    return min(size, most)


# logits and hidden states: after the final norm, or at the taps
StepOutput = tuple[Tensor, Tensor]


class StaticForward:
    """The recorded steps of one target; `bind` drops them, since they hold cache addresses."""

    def __init__(self, weights: Weights, layers: Sequence[KeptLayer], compiled: bool) -> None:
        """Prepare the steps of these layers.

        compiled: fuse each layer's operations with torch.compile.
        """
        self.weights, self.layers, self.device = weights, layers, weights.device
        self.layer: Callable[..., Tensor] = (
            devices.compiled(decoder_layer, self.device) if compiled else decoder_layer
        )
        self._steps: dict[tuple[Any, ...], _Step] = {}

    def bind(self, cache_L2BHSD: Tensor, rope: tuple[Tensor, Tensor]) -> None:
        """Use this cache and these rope tables, and drop the steps recorded with others."""
        self.cache_L2BHSD = cache_L2BHSD
        with torch.inference_mode(False):
            self.rope_S2D = torch.stack(rope, 1)
        self._steps = {}
        self._memory = devices.pool(self.device)

    def __call__(
        self,
        tokens_BN: Tensor,
        parents_BN: Tensor | None,
        lengths_B: Sequence[int],
        taps: tuple[int, ...],
    ) -> StepOutput:
        """Return logits and hidden states of new tokens after `lengths_B` committed ones.

        Hidden states are after the final norm, or at the taps. The tensors are copies.
        """
        B, N = tokens_BN.shape
        T = bucket(max(lengths_B) + N, self.cache_L2BHSD.shape[4])
        key = (B, N, T, parents_BN is not None, taps)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(self, B, N, T, taps)
        step.fill(tokens_BN, parents_BN, lengths_B)
        if step.run is None:
            step.run = devices.capture(step.body, self.device, self._memory)
        logits_BNV, hidden_BNC = step.run()
        return logits_BNV.clone(), hidden_BNC.clone()


class _Step:
    """The step of one shape: its input buffers, its constants and its recording."""

    run: Callable[[], StepOutput] | None = None

    def __init__(
        self, owner: StaticForward, rows: int, tokens: int, slots: int, taps: tuple[int, ...]
    ) -> None:
        self.owner, self.taps, self.slots = owner, taps, slots
        device, dtype = owner.device, owner.weights.dtype
        with torch.inference_mode(False):
            self.tokens_BN = torch.zeros(rows, tokens, dtype=torch.long, device=device)
            self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
            self.parents_BN: Tensor | None = None
            self.rows_B1 = torch.arange(rows, device=device)[:, None]
            self.offsets_N = torch.arange(tokens, device=device)
            self.columns_T = torch.arange(slots, device=device)
            self.zero = torch.zeros((), dtype=dtype, device=device)
            self.minus_infinity = torch.full((), float("-inf"), dtype=dtype, device=device)

    def fill(self, tokens_BN: Tensor, parents_BN: Tensor | None, lengths_B: Sequence[int]) -> None:
        """Copy a forward's inputs into the step's buffers."""
        self.tokens_BN.copy_(tokens_BN)
        devices.fill(self.lengths_B, list(lengths_B))
        if parents_BN is not None:
            if self.parents_BN is None:
                with torch.inference_mode(False):
                    self.parents_BN = torch.empty_like(self.tokens_BN)
            self.parents_BN.copy_(parents_BN)

    def body(self) -> StepOutput:
        """Run the forward on the buffers."""
        owner, config = self.owner, self.owner.weights.config
        slots_BN, positions_BN, mask = self._where()
        cos_sin_BN2D = owner.rope_S2D[positions_BN]
        cos, sin = cos_sin_BN2D[:, :, :1], cos_sin_BN2D[:, :, 1:]
        x_BNC = F.embedding(self.tokens_BN, owner.weights.embedding_VC)
        states = {0: x_BNC} if 0 in self.taps else {}
        rows = len(self.lengths_B)
        for index, (cached, layer, attends, feeds) in enumerate(owner.layers):
            cache_2BHSD = owner.cache_L2BHSD[cached, :, :rows]
            where = (cache_2BHSD, self.rows_B1, slots_BN, cos, sin, mask)
            x_BNC = owner.layer(config, layer, x_BNC, *where, attends, feeds)
            if index + 1 in self.taps:
                states[index + 1] = x_BNC
        hidden_BNC = rms_norm(x_BNC, owner.weights.norm_C, config.norm_eps)
        logits_BNV = owner.weights.head(hidden_BNC)
        if not self.taps:
            return logits_BNV, hidden_BNC
        states[len(owner.layers)] = hidden_BNC
        return logits_BNV, join_taps(states, self.taps)

    def _where(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (slots_BN, rope positions_BN, additive mask (B, 1, G * N, T)) on the device."""
        config = self.owner.weights.config
        positions_BN, slots_BN, visible_BNT = visible_slots(
            self.lengths_B, self.offsets_N, self.columns_T, self.parents_BN
        )
        mask = torch.where(visible_BNT, self.zero, self.minus_infinity)[:, None]
        group = config.num_heads // config.num_kv_heads
        return slots_BN, positions_BN, mask if group == 1 else mask.repeat(1, 1, group, 1)


def decoder_layer(
    config: NativeConfig,
    layer: Layer,
    x_BNC: Tensor,
    cache_2BHSD: Tensor,
    rows_B1: Tensor,
    slots_BN: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    attends: bool,
    feeds: bool,
) -> Tensor:
    """Run one decoder layer on static shapes; write keys and values to `slots_BN` of the cache.

    cos, sin: (B, N, 1, D). mask: (B, 1, G * N, T) over the first T slots. All layers of a model
    share one compiled form.
    """
    if attends:
        q_BNQD, k_BNHD, v_BNHD = layer.project(config, x_BNC, cos, sin)
        cache_2BHSD[:, rows_B1, :, slots_BN] = torch.stack((k_BNHD, v_BNHD), 2)
        keys, values = cache_2BHSD[:, :, :, : mask.shape[-1]]
        x_BNC = x_BNC + layer.attend(q_BNQD, keys, values, mask)
    if feeds:
        x_BNC = x_BNC + layer.feed_forward(config, x_BNC)
    return x_BNC
