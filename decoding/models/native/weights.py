"""The native target's weights: read from a Hugging Face state dict, fused, in one dtype.

Shapes: B rows, N new tokens, T cache slots, V vocabulary, C hidden size, Q query heads, H key/value
heads, G = Q / H, D head size, S tokens of a draft vocabulary.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.errors import UserError
from decoding.models.draft_vocabulary import D2T, ids_of, spread
from decoding.models.folder import refuse_unsupported_attention
from decoding.models.native.attention import grouped_attention
from decoding.models.native.linear import Linear, make_linear, rms_norm
from decoding.models.native.rope import rope_parameters, rotate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_UNITS = 64  # unit vectors at once, which bounds the memory of reading a packed head


@dataclass(frozen=True)
class NativeConfig:
    """The shape of a model, from the fields of config.json."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tied: bool
    rope: dict[str, Any]
    draft_vocab_size: int = 0  # rows of the head (decoding/models/draft_vocabulary.py); 0: all

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "NativeConfig":
        """Return the configuration given by the fields of config.json.

        Raises UserError for an unsupported family, attention, activation or kind of rope, and for
        rope fields that contradict each other.
        """
        family = config["model_type"]
        if family not in FAMILIES:
            raise UserError(
                f"model_type '{family}' is not one of {', '.join(FAMILIES)}. Use backend=hf for it."
            )
        refuse_unsupported_attention(dict(config), "config.json")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UserError(
                f"config.json: hidden_act '{activation}' is not 'silu'. Use backend=hf for it."
            )
        heads = config["num_attention_heads"]
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_positions=config.get("max_position_embeddings", 2048),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope=rope_parameters(dict(config)),
            draft_vocab_size=config.get("draft_vocab_size") or 0,
        )

    @property
    def head_rows(self) -> int:
        """Rows of the output layer."""
        return self.draft_vocab_size or self.vocab_size


@dataclass(slots=True)
class Layer:
    """One decoder layer with fused weights."""

    attention_norm_C: Tensor
    qkv: Linear
    # Qwen3: the norms of query and key heads, one row a head
    query_key_norm_QHD: Tensor | None
    out: Linear
    mlp_norm_C: Tensor
    gate_up: Linear
    down: Linear
    # EAGLE-3: the norm of the state that is read beside the embedding (heads/eagle/fused.py)
    state_norm_C: Tensor | None = None

    def project(
        self, config: NativeConfig, x_BNC: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries (B, N, Q, D), keys and values (B, N, H, D), rotated by position.

        cos, sin: (1 or B, N, 1, D).
        """
        Q, H, D = config.num_heads, config.num_kv_heads, config.head_dim
        normed_BNC = rms_norm(x_BNC, self.attention_norm_C, config.norm_eps)
        qkv = self.qkv(normed_BNC).view(*x_BNC.shape[:2], Q + 2 * H, D)
        qk, v_BNHD = qkv[:, :, : Q + H], qkv[:, :, Q + H :]
        if self.query_key_norm_QHD is not None:
            qk = F.rms_norm(qk, (D,), None, config.norm_eps) * self.query_key_norm_QHD
        qk = rotate(qk, cos, sin)
        return qk[:, :, :Q], qk[:, :, Q:], v_BNHD

    def attend(
        self, q_BNQD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Return the attention's output (B, N, C).

        mask: additive, (1 or B, 1, G * N, T).
        """
        return self.out(grouped_attention(q_BNQD, keys_BHTD, values_BHTD, mask).flatten(2))

    def feed_forward(self, config: NativeConfig, x_BNC: Tensor) -> Tensor:
        """Return the MLP's output (B, N, C)."""
        gate, up = self.gate_up(rms_norm(x_BNC, self.mlp_norm_C, config.norm_eps)).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))


class Weights:
    """All weights of a model on one device, shared by a target and its partial views."""

    def __init__(
        self,
        config: NativeConfig,
        state: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        packed: bool,
        has_ends: bool = True,
    ) -> None:
        """Fuse and pack the weights of a state dict.

        has_ends: False for layers from the middle of a model, without embedding, final norm and
        head. Raises UserError for a missing tensor.
        """
        self.config, self.dtype, self.device, self.packed = config, dtype, device, packed
        self._state = state
        self.num_parameters = 0  # counts a tied embedding once
        self.embedding_VC = self.norm_C = torch.empty(0)
        self.head = make_linear(self.embedding_VC, None, False)
        self.head_weight_VC: Tensor | None = None  # unless it is packed
        self.ids_N: Tensor | None = None  # the tokens of a draft vocabulary
        if has_ends:
            self.embedding_VC = self._take("model.embed_tokens.weight")
            self.norm_C = self._take("model.norm.weight")
            head_VC = self.embedding_VC if config.tied else self._take("lm_head.weight")
            if config.draft_vocab_size:
                d2t_N = self._stored(D2T)[0]
                self.ids_N = ids_of(d2t_N, config.vocab_size, "the weights").to(device)
            self._set_head(head_VC)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        self._state = {}

    def _set_head(self, head_VC: Tensor) -> None:
        """Use this output layer, whose rows are the tokens in `ids_N`, if there are any."""
        product = make_linear(head_VC, None, self.packed)
        self.head_weight_VC = None if self.packed else head_VC
        self.head = product if self.ids_N is None else lambda x_NC: self.spread(product(x_NC))

    def with_layer(self, layer: Layer, norm_C: Tensor, ids_S: Tensor | None) -> "Weights":
        """Return weights that share these, with one more layer and another final norm.

        ids_S: the rising ids whose rows of the head are kept, as a draft vocabulary; None: all.
        """
        longer = copy.copy(self)
        longer.layers, longer.norm_C = [*self.layers, layer], norm_C
        longer.config = replace(self.config, num_layers=self.config.num_layers + 1)
        if ids_S is not None:
            longer.ids_N = ids_S
            longer.config = replace(longer.config, draft_vocab_size=len(ids_S))
            longer._set_head(self._head_rows(ids_S))
        return longer

    def _head_rows(self, ids_S: Tensor) -> Tensor:
        """Return these rows (S, C) of the output layer."""
        if self.head_weight_VC is not None:
            return self.head_weight_VC[ids_S]
        # a packed weight cannot be indexed; products with unit vectors are its columns, exactly
        units_CC = torch.eye(self.config.hidden_size, dtype=self.dtype, device=self.device)
        columns = [self.head(part)[:, ids_S] for part in units_CC.split(_UNITS)]
        return torch.cat(columns).T.contiguous()

    def spread(self, logits: Tensor) -> Tensor:
        """Return the logits (..., V) of a head's outputs: -inf outside its draft vocabulary."""
        if self.ids_N is None:
            return logits
        return spread(logits, self.ids_N, self.config.vocab_size, float("-inf"))

    def _take(self, *names: str) -> Tensor:
        """Return the concatenated tensors of these names on the device, and count them."""
        found = self._stored(*names)
        self.num_parameters += sum(tensor.numel() for tensor in found)
        tensors = [tensor.to(self.device, self.dtype) for tensor in found]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _stored(self, *names: str) -> list[Tensor]:
        missing = [name for name in names if name not in self._state]
        if missing:
            raise UserError(
                f"the weights have no tensor '{missing[0]}', which a {self.config.family} model "
                f"needs. Pass a complete state dict."
            )
        return [self._state[name].detach() for name in names]

    def _linear(self, prefix: str, names: Sequence[str]) -> Linear:
        weight = self._take(*(f"{prefix}{name}.weight" for name in names))
        has_bias = f"{prefix}{names[0]}.bias" in self._state
        bias = self._take(*(f"{prefix}{name}.bias" for name in names)) if has_bias else None
        return make_linear(weight, bias, self.packed)

    def _layer(self, prefix: str) -> Layer:
        config, head_norms, state_norm = self.config, None, f"{prefix}hidden_norm.weight"
        if config.family == "qwen3":
            query = self._take(f"{prefix}self_attn.q_norm.weight")
            key = self._take(f"{prefix}self_attn.k_norm.weight")
            head_norms = torch.cat(
                (query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1))
            )
        return Layer(
            attention_norm_C=self._take(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(f"{prefix}self_attn.", ("q_proj", "k_proj", "v_proj")),
            query_key_norm_QHD=head_norms,
            out=self._linear(f"{prefix}self_attn.", ("o_proj",)),
            mlp_norm_C=self._take(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(f"{prefix}mlp.", ("gate_proj", "up_proj")),
            down=self._linear(f"{prefix}mlp.", ("down_proj",)),
            state_norm_C=self._take(state_norm) if state_norm in self._state else None,
        )
