"""The EAGLE heads: one decoder layer over states of the target (EAGLE-3, arXiv 2503.01840).

The element at position t joins two inputs: g_t, a linear map of the target's states at t in some
layers (taps), and the embedding of the token at t + 1. From the elements up to t the layer predicts
the token at t + 2. The next element of a draft has the layer's own output in place of g, and the
drafted token; its position is one higher. The embedding is the target's. Each tapped state may be
normalized before the map (`fc_norm`), and the output before it is fed back (`norm_output`), as in
EAGLE-3.1 (arXiv 2605.09992).

A head that drafts in parallel (P-EAGLE, arXiv 2602.01469) has mask elements in place of all later
ones: learned states take the place of the target's, and a mask token that of the drafted one.

An EAGLE-1 head (arXiv 2401.15077) reads one state, that after the target's final norm, and its
output is the same state one token later, from which the target's own lm_head predicts. The map
joins embedding and state, and the layer has no norm before its attention.

Parameters have the names of the published files (heads/eagle/checkpoint.py).

Shapes: X any dimensions, C channels of all taps, H hidden size, I inputs of the attention, Q query
heads, K key/value heads, D head size, V drafted vocabulary, T positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decoding.errors import UserError
from decoding.models.native.rope import KINDS, rope_parameters, rotate
from heads.base import RestrictedHead
from heads.layers import FeedForward, Rope, rope_tables

NUM_TAPS = 3


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return a low, a middle and a high layer of a target: 2, L // 2 and L - 3, as published.

    Targets of fewer than 7 layers have no such three; theirs are spread evenly up to the last.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    spread = (num_layers * part // NUM_TAPS for part in range(1, NUM_TAPS + 1))
    return tuple(sorted({max(1, layer) for layer in spread}))


@dataclass(frozen=True)
class EagleConfig:
    """Shape of the head."""

    vocab_size: int  # of the target
    hidden_size: int  # H, the target's
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    # layers of the target, as in Hugging Face's `hidden_states`; empty: the published default
    taps: tuple[int, ...]
    rope: Mapping[str, Any]  # fields of `rope_parameters` in config.json
    max_positions: int
    draft_vocab_size: int = 0  # tokens of the draft vocabulary; 0: all
    norm_eps: float = 1e-5
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    parallel: int = 0  # tokens that one pass drafts, from mask elements; 0: a token a step
    mask_token_id: int = 0  # of mask elements
    masks_by_depth: bool = False  # mask elements have a learned state for each depth
    # EAGLE-1: the output is the target's next state after the final norm, as is the only tap, which
    # has no number; the norms and switches above are EAGLE-3's
    predicts_states: bool = False
    fc_bias: bool = False  # EAGLE-1

    @property
    def num_drafted(self) -> int:
        """Number of tokens that the head can draft."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_taps(self) -> int:
        """Number of tapped layers."""
        return 1 if self.predicts_states else len(self.taps) or NUM_TAPS

    @property
    def proposed_tokens(self) -> int:
        """Tokens of a draft in a layout that names their number."""
        return self.parallel or 3

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies, in the older form of config.json."""
        return float(self.rope["rope_theta"])

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """All other rope fields in the older form; None for plain rotary positions."""
        fields = {name: value for name, value in self.rope.items() if name != "rope_theta"}
        return fields if fields["rope_type"] != "default" else None

    def taps_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the taps in a target of this many layers; () is the state after the final norm.

        Raises UserError for a layer that the target lacks.
        """
        if self.predicts_states:
            return ()
        taps = self.taps or default_taps(num_layers)
        if max(taps) > num_layers or len(taps) != self.num_taps:
            raise UserError(
                f"the EAGLE-3 head reads the layers {list(self.taps) or 'low, middle and high'} of "
                f"its target, but this target has {num_layers}. Use a head that was trained for "
                f"this target."
            )
        return taps


def read_rope(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the rope fields of a config.json. Raises UserError for a kind that the head lacks.

    where: the source of the values, for the error.
    """
    for key in ("rope_parameters", "rope_scaling"):
        given = values.get(key) or {}
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in KINDS:
            raise UserError(
                f"{where}: {key} is of the type '{kind}', which EAGLE-3 heads do not support here, "
                f"expected one of {', '.join(KINDS)}. Use another kind of head for this target."
            )
    return rope_parameters(values)


class Attention(nn.Module):
    """The projections of the layer's attention.

    In EAGLE-3 it reads embeddings and states side by side, I = 2 H channels, in EAGLE-1 I = H.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        width = config.hidden_size * (1 if config.predicts_states else 2)
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, key, bias=False)
        self.v_proj = nn.Linear(width, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def queries(self, inputs_XI: Tensor, rope: Rope) -> Tensor:
        """Return rotated queries (..., Q, D)."""
        return rotate(self.q_proj(inputs_XI).unflatten(-1, (-1, self.head_dim)), *rope)

    def keys_values(self, inputs_XI: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values (..., K, D)."""
        keys, values = (
            project(inputs_XI).unflatten(-1, (-1, self.head_dim))
            for project in (self.k_proj, self.v_proj)
        )
        return rotate(keys, *rope), values


class EagleLayer(nn.Module):
    """The decoder layer. Attention itself differs between training and drafting."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.norm_eps
        self.norm_before_residual = config.norm_before_residual
        if not config.predicts_states:
            self.input_layernorm = nn.RMSNorm(H, eps)
            self.hidden_norm = nn.RMSNorm(H, eps)
        self.post_attention_layernorm = nn.RMSNorm(H, eps)
        self.self_attn = Attention(config)
        self.mlp = FeedForward(H, config.intermediate_size)

    def join(self, embedded_XH: Tensor, hidden_XH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projections' inputs (..., 2 H) and the residual (..., H) in EAGLE-3."""
        normed_XH = self.hidden_norm(hidden_XH)
        inputs_X2H = torch.cat((self.input_layernorm(embedded_XH), normed_XH), -1)
        return inputs_X2H, normed_XH if self.norm_before_residual else hidden_XH

    def output(self, residual_XH: Tensor, mixed_XQD: Tensor) -> Tensor:
        """Return the layer's output (..., H) from the mixed values of its attention."""
        residual_XH = residual_XH + self.self_attn.o_proj(mixed_XQD.flatten(-2))
        found = residual_XH + self.mlp(self.post_attention_layernorm(residual_XH))
        assert isinstance(found, Tensor)
        return found


class EagleHead(RestrictedHead):
    """An EAGLE head of a target."""

    # in place of the tapped states of mask elements: one state for all, or one for each depth
    mask_hidden: nn.Parameter | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        H, V, eps = config.hidden_size, config.num_drafted, config.norm_eps
        self.midlayer = EagleLayer(config)
        joined = 2 if config.predicts_states else config.num_taps
        self.fc = nn.Linear(joined * H, H, bias=config.fc_bias)
        norms = (nn.RMSNorm(H, eps) for _ in range(config.num_taps if config.fc_norm else 0))
        self.fc_norm = nn.ModuleList(norms)
        self.norm = nn.Identity() if config.predicts_states else nn.RMSNorm(H, eps)
        if not config.predicts_states:  # else the target's own predicts
            self.lm_head = nn.Linear(H, V, bias=False)
        masks = config.parallel - 1 if config.masks_by_depth else min(config.parallel, 1)
        states = torch.randn(1, masks, config.num_taps * H) if masks else None
        self.mask_hidden = None if states is None else nn.Parameter(states)
        self.register_vocabulary(config.draft_vocab_size, config.vocab_size)

    def rope_tables(self, length: int) -> Rope:
        """Return cos and sin (T, 1, D) of the positions from 0, in the head's dtype and device."""
        config = self.config
        return rope_tables(
            config.rope, config.head_dim, config.max_positions, length, self.fc.weight
        )

    def fuse(self, taps_XC: Tensor) -> Tensor:
        """Return g (..., H) of the target's states at the taps; of zeros it is zero.

        In EAGLE-1 it is the state itself.
        """
        if self.config.predicts_states:
            return taps_XC
        if self.config.fc_norm:
            parts = taps_XC.chunk(len(self.fc_norm), -1)
            pairs = zip(self.fc_norm, parts, strict=True)
            taps_XC = torch.cat([norm(part) for norm, part in pairs], -1)
        found = self.fc(taps_XC)
        assert isinstance(found, Tensor)
        return found

    def mask_states(self, count: int) -> Tensor:
        """Return the states g (count, H) of the first mask elements of a draft."""
        assert self.mask_hidden is not None
        return self.fuse(self.mask_hidden[0, :count]).expand(count, -1)

    def join(self, embedded_XH: Tensor, hidden_XH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (..., I) of the projections and the residual (..., H).

        hidden_XH: g, or what `step` has returned in its place.
        """
        if not self.config.predicts_states:
            return self.midlayer.join(embedded_XH, hidden_XH)
        joined_XH = self.fc(torch.cat((embedded_XH, hidden_XH), -1))
        return joined_XH, joined_XH

    def step(self, residual_XH: Tensor, mixed_XQD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the lm_head, and the state that replaces g in the next element."""
        states_XH = self.midlayer.output(residual_XH, mixed_XQD)
        features_XH = self.norm(states_XH)
        return features_XH, features_XH if self.config.norm_output else states_XH

    @torch.no_grad()
    def start_from(self, lm_head_VH: Tensor) -> None:
        """Initialize the output layer with its tokens' rows of the target's lm_head."""
        ids_V = self.token_ids_V
        self.lm_head.weight.copy_(lm_head_VH if ids_V is None else lm_head_VH[ids_V])
