"""The early-exit head: one decoder layer and a norm after the target's first N layers.

The drafter is the target's first N layers, this layer, this norm, and the target's lm_head (EESD,
arXiv 2406.03853). Only the layer and the norm are trained. The layer has the form of the target's
own layers, so it runs wherever those run (decoding/models/native/).

Shapes: C hidden size, Q query heads, H key/value heads, D head size, F feed-forward size, V drafted
vocabulary.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from decoding.models.native.linear import make_linear
from decoding.models.native.weights import Layer, NativeConfig, Weights
from heads.base import Head


@dataclass(frozen=True)
class EarlyExitConfig(NativeConfig):
    """Shape of the head: that of its target, and what the head adds."""

    exit_layer: int = 1  # N, the number of the target's layers before the head's
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def of_target(
        cls, target: Mapping[str, Any], exit_layer: int, draft_vocab_size: int = 0
    ) -> "EarlyExitConfig":
        """Return the shape of a head for a target, given the fields of its config.json.

        Raises UserError for a target that the native backend does not support.
        """
        fields = vars(NativeConfig.from_dict(target)) | {"draft_vocab_size": draft_vocab_size}
        biased = bool(target.get("attention_bias", False))
        return cls(
            **fields,
            exit_layer=exit_layer,
            qkv_bias=biased or fields["family"] == "qwen2",
            out_bias=biased,
            mlp_bias=bool(target.get("mlp_bias", False)),
        )

    @property
    def num_drafted(self) -> int:
        """Number of tokens that the head can draft."""
        return self.head_rows


class EarlyExitHead(Head):
    """The trained layer and norm, with the products fused as in the native backend."""

    token_ids_V: Tensor | None  # ids of the draft vocabulary, rising; None: the full vocabulary

    def __init__(self, config: EarlyExitConfig) -> None:
        super().__init__()
        self.config = config
        C, F, D = config.hidden_size, config.intermediate_size, config.head_dim
        Q, H = config.num_heads, config.num_kv_heads
        self.attention_norm = nn.Parameter(torch.ones(C))
        self.qkv = nn.Linear(C, (Q + 2 * H) * D, bias=config.qkv_bias)
        self.query_norm = self.key_norm = None
        if config.family == "qwen3":
            self.query_norm = nn.Parameter(torch.ones(D))
            self.key_norm = nn.Parameter(torch.ones(D))
        self.out = nn.Linear(Q * D, C, bias=config.out_bias)
        self.mlp_norm = nn.Parameter(torch.ones(C))
        self.gate_up = nn.Linear(C, 2 * F, bias=config.mlp_bias)
        self.down = nn.Linear(F, C, bias=config.mlp_bias)
        self.norm = nn.Parameter(torch.ones(C))
        ids_V = torch.arange(config.num_drafted) if config.draft_vocab_size else None
        self.register_buffer("token_ids_V", ids_V)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    def layer(self) -> Layer:
        """Return the layer in the native backend's form, with these parameters."""
        head_norms = None
        if self.query_norm is not None and self.key_norm is not None:
            queries = self.query_norm.expand(self.config.num_heads, -1)
            keys = self.key_norm.expand(self.config.num_kv_heads, -1)
            head_norms = torch.cat((queries, keys))
        return Layer(
            self.attention_norm,
            self.qkv,
            head_norms,
            self.out,
            self.mlp_norm,
            self.gate_up,
            self.down,
        )

    def draft_layer(self, weights: Weights) -> tuple[Layer, Tensor]:
        """Return a copy of the layer and of the norm (C,) to run with a target's weights."""
        head = copy.deepcopy(self).to(weights.device, weights.dtype).requires_grad_(False)
        products = {
            name: make_linear(module.weight, module.bias, weights.packed)
            for name, module in head.named_children()
            if isinstance(module, nn.Linear)
        }
        return replace(head.layer(), **products), head.norm  # type: ignore[arg-type]

    @torch.no_grad()
    def copy_layer(self, layer: Any) -> None:
        """Copy the weights of a layer of the target, a Hugging Face decoder layer."""
        attention, mlp = layer.self_attn, layer.mlp
        sources = (
            (self.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (self.out, (attention.o_proj,)),
            (self.gate_up, (mlp.gate_proj, mlp.up_proj)),
            (self.down, (mlp.down_proj,)),
        )
        for product, parts in sources:
            product.weight.copy_(torch.cat([part.weight for part in parts]))
            if product.bias is not None:
                product.bias.copy_(torch.cat([part.bias for part in parts]))
        self.attention_norm.copy_(layer.input_layernorm.weight)
        self.mlp_norm.copy_(layer.post_attention_layernorm.weight)
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.copy_(attention.q_norm.weight)
            self.key_norm.copy_(attention.k_norm.weight)
