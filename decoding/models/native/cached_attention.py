"""A layer's attention with the cache, in the eager execution.

The rows of a batch are padded to one length, or, for prompts of different lengths, their tokens are
one list, over all of which a product runs at once.

Shapes: B rows, N new tokens, T tokens of all rows, C hidden size, Q query heads, H key/value heads,
G = Q / H, D head size, S slots of the cache, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.models.cache import ForwardPlan
from decoding.models.native.weights import Layer, NativeConfig

# (index of the layer, layer, x_BNC) -> the attention's output (B, N, C). It also writes the new
# tokens' keys and values to the cache.
Attention = Callable[[int, Layer, Tensor], Tensor]


@dataclass(frozen=True)
class CacheViews:
    """The rows in use of an open cache, and the rotation by position."""

    keys_L: Sequence[Tensor]  # (B, H, S, D) each
    values_L: Sequence[Tensor]
    cos_SD: Tensor
    sin_SD: Tensor

    def rope_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (..., 1, D) at positions (...)."""
        return self.cos_SD[positions].unsqueeze(-2), self.sin_SD[positions].unsqueeze(-2)


def padded_attention(
    config: NativeConfig, plan: ForwardPlan, num_tokens: int, cache: CacheViews
) -> Attention:
    """Return the attention of a forward over `num_tokens` new tokens in every row."""
    if plan.positions_BN is None:
        span = slice(plan.end - num_tokens, plan.end)
        rope = cache.cos_SD[None, span, None], cache.sin_SD[None, span, None]
    else:
        rope = cache.rope_at(plan.positions_BN)
    group = config.num_heads // config.num_kv_heads
    # for queries that are folded as (B, H, G * N, D)
    mask = plan.mask if plan.mask is None or group == 1 else plan.mask.repeat(1, 1, group, 1)

    def attention(index: int, layer: Layer, x_BNC: Tensor) -> Tensor:
        q_BNQD, k_BNHD, v_BNHD = layer.project(config, x_BNC, *rope)
        B, N, Q, D = q_BNQD.shape
        keys, values = cache.keys_L[index], cache.values_L[index]
        if plan.start is not None:
            keys.narrow(2, plan.start, N).copy_(k_BNHD.transpose(1, 2))
            values.narrow(2, plan.start, N).copy_(v_BNHD.transpose(1, 2))
        else:
            rows = torch.arange(B, device=x_BNC.device)[:, None]
            keys[rows, :, plan.slots_BN] = k_BNHD
            values[rows, :, plan.slots_BN] = v_BNHD
        keys, values = keys.narrow(2, 0, plan.end), values.narrow(2, 0, plan.end)
        if not plan.causal:
            return layer.attend(q_BNQD, keys, values, mask)
        out = F.scaled_dot_product_attention(
            q_BNQD.transpose(1, 2), keys, values, is_causal=True, enable_gqa=keys.shape[1] != Q
        )
        return layer.out(out.transpose(1, 2).reshape(B, N, Q * D))

    return attention


@dataclass(frozen=True)
class Span:
    """New tokens of one row of a batch."""

    row: int
    start: int  # committed tokens before them
    count: int

    @property
    def end(self) -> int:
        """Slots of the row, the new tokens included."""
        return self.start + self.count


def ragged_attention(config: NativeConfig, spans: Sequence[Span], cache: CacheViews) -> Attention:
    """Return the attention of a forward over the new tokens of some rows, (1, T, C)."""
    device = cache.cos_SD.device
    positions = [torch.arange(span.start, span.end, device=device) for span in spans]
    rope = cache.rope_at(torch.cat(positions)[None])
    masks = [_causal_mask(span, cache.cos_SD) for span in spans]

    def attention(index: int, layer: Layer, x_1TC: Tensor) -> Tensor:
        q_1TQD, k_1THD, v_1THD = layer.project(config, x_1TC, *rope)
        out_1TQD = torch.empty_like(q_1TQD)
        first = 0
        for span, mask in zip(spans, masks, strict=True):
            new = slice(first, first := first + span.count)
            keys, values = (
                cached[span.row, None, :, : span.end]
                for cached in (cache.keys_L[index], cache.values_L[index])
            )
            keys[:, :, span.start :] = k_1THD[:, new].transpose(1, 2)
            values[:, :, span.start :] = v_1THD[:, new].transpose(1, 2)
            out_1QND = F.scaled_dot_product_attention(
                q_1TQD[:, new].transpose(1, 2), keys, values, mask,
                is_causal=mask is None, enable_gqa=config.num_heads != config.num_kv_heads,
            )  # fmt: skip
            out_1TQD[:, new] = out_1QND.transpose(1, 2)
        return layer.out(out_1TQD.flatten(2))

    return attention


def _causal_mask(span: Span, like: Tensor) -> Tensor | None:
    """Return the additive mask (count, end) after committed tokens; None: plain causal."""
    if span.start == 0:
        return None
    shape = (span.count, span.end)
    hidden = (
        torch.ones(shape, dtype=torch.bool, device=like.device).tril_(span.start).logical_not_()
    )
    zeros = torch.zeros(shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill_(hidden, float("-inf"))
