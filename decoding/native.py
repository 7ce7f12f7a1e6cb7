"""The native target: Llama, Mistral without window, Qwen2 and Qwen3 in few, small operations.

Fused qkv and gate/up products, one cache tensor for all layers, rope in three operations, one mask a forward. At the
sizes that fit a laptop, batch-1 decoding on a CPU is a matter of operation count, not of bytes; every line here was
weighed with that in mind. The logits are tested against the hf backend.

Shapes: B rows, N new tokens, V vocabulary, C hidden size, Q query heads, H key/value heads, G = Q / H, D head size,
F feed-forward size, T cache slots, L layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.cache import Plan, Slots
from decoding.errors import UserError
from decoding.folder import refuse_unsupported_attention
from decoding.linear import Linear, can_pack, make_linear
from decoding.rope import inverse_frequencies, rope_parameters, rope_tables

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


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

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "NativeConfig":
        """Raises UserError for a family, activation or rope kind that this backend does not have."""
        family = config["model_type"]
        if family not in FAMILIES:
            raise UserError(f"model_type '{family}' is not one of {', '.join(FAMILIES)}: use backend=hf for it.")
        refuse_unsupported_attention(dict(config), "config.json")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UserError(f"config.json: hidden_act '{activation}' is not 'silu': use backend=hf for it.")
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
        )


@dataclass(slots=True)
class Layer:
    """The weights of one decoder layer, fused."""

    attention_norm_C: Tensor
    qkv: Linear
    query_key_norm_QHD: Tensor | None  # Qwen3: the two head norms, one row a head
    out: Linear
    mlp_norm_C: Tensor
    gate_up: Linear
    down: Linear


class Weights:
    """All weights of a model on one device in one dtype; shared by a target and its partial views."""

    def __init__(
        self, config: NativeConfig, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, packed: bool
    ) -> None:
        self.config, self.dtype, self.device, self.packed = config, dtype, device, packed
        self._state = state
        self.embedding_VC = self._take("model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        self.norm_C = self._take("model.norm.weight")
        head_VC = self.embedding_VC if config.tied else self._take("lm_head.weight")
        self.head = make_linear(head_VC, None, packed)
        self.num_parameters = self._count(state)
        self._state = {}

    def _take(self, *names: str) -> Tensor:
        missing = [name for name in names if name not in self._state]
        if missing:
            raise UserError(f"the weights have no tensor '{missing[0]}', which a {self.config.family} model needs.")
        tensors = [self._state[name].detach().to(self.device, self.dtype) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _linear(self, prefix: str, names: Sequence[str]) -> Linear:
        weight = self._take(*(f"{prefix}{name}.weight" for name in names))
        has_bias = f"{prefix}{names[0]}.bias" in self._state
        bias = self._take(*(f"{prefix}{name}.bias" for name in names)) if has_bias else None
        return make_linear(weight, bias, self.packed)

    def _layer(self, prefix: str) -> Layer:
        config, head_norms = self.config, None
        if config.family == "qwen3":
            query, key = self._take(f"{prefix}self_attn.q_norm.weight"), self._take(f"{prefix}self_attn.k_norm.weight")
            head_norms = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
        return Layer(
            attention_norm_C=self._take(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(f"{prefix}self_attn.", ("q_proj", "k_proj", "v_proj")),
            query_key_norm_QHD=head_norms,
            out=self._linear(f"{prefix}self_attn.", ("o_proj",)),
            mlp_norm_C=self._take(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(f"{prefix}mlp.", ("gate_proj", "up_proj")),
            down=self._linear(f"{prefix}mlp.", ("down_proj",)),
        )

    def _count(self, state: Mapping[str, Tensor]) -> int:
        """Parameters, a tied embedding counted once."""
        return sum(t.numel() for name, t in state.items() if not (self.config.tied and name == "lm_head.weight"))


class NativeTarget:
    """A `Target` (decoding/target.py) over `Weights`. Made by `load_target`, or from a state dict with `from_state`."""

    backend = "native"

    def __init__(
        self, weights: Weights, name: str, max_length: int | None = None, layers: Sequence[int] | None = None
    ) -> None:
        config = weights.config
        self.weights, self.config, self.name = weights, config, name
        self.layer_ids = tuple(range(config.num_layers)) if layers is None else tuple(layers)
        self.vocab_size, self.hidden_size, self.num_layers = config.vocab_size, config.hidden_size, len(self.layer_ids)
        self.max_length = max_length or config.max_positions
        self.dtype, self.device = str(weights.dtype).removeprefix("torch."), weights.device
        self.num_parameters = weights.num_parameters
        self.taps: tuple[int, ...] = ()
        self.tapped: dict[int, Tensor] = {}
        self.slots = Slots(weights.dtype, weights.device)
        self._layers = [weights.layers[i] for i in self.layer_ids]
        self._cache_L2BHTD: Tensor | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rope: tuple[Tensor, Tensor] | None = None
        self._frequencies = inverse_frequencies(config.rope, config.head_dim, config.max_positions)

    @classmethod
    def from_state(
        cls,
        config: Mapping[str, Any],
        state: Mapping[str, Tensor],
        *,
        name: str = "in-memory",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_length: int | None = None,
        packed: bool | None = None,
    ) -> "NativeTarget":
        """From config.json's fields and the tensors of a Hugging Face state dict.

        packed: True or False chooses oneDNN's packed products or the plain ones; None takes packed where they exist.
        """
        place = torch.device(device)
        if packed is None:
            packed = can_pack(place, dtype)
        return cls(Weights(NativeConfig.from_dict(config), state, dtype, place, packed), name, max_length)

    @property
    def lengths_B(self) -> list[int]:
        """Committed tokens in the cache, by row."""
        return self.slots.lengths_B

    @property
    def packed(self) -> bool:
        """Whether the products run on packed weights."""
        return self.weights.packed

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """Start `batch_size` empty rows with `capacity` cache slots each (default: max_length)."""
        capacity = capacity or self.max_length
        config = self.config
        shape = (config.num_layers, 2, batch_size, config.num_kv_heads, capacity, config.head_dim)
        if self._cache_L2BHTD is None or self._cache_L2BHTD.shape != shape:
            with torch.inference_mode(False):
                # Zeros, not empty: a masked slot still meets a product with weight 0, and 0 x NaN would spread.
                self._cache_L2BHTD = torch.zeros(shape, dtype=self.weights.dtype, device=self.device)
                tables = rope_tables(self._frequencies, capacity, self.weights.dtype)
                self._rope = (tables[0].to(self.device), tables[1].to(self.device))
        self._view_rows(batch_size)
        self.slots.open(batch_size, capacity)

    def _view_rows(self, num_rows: int) -> None:
        assert self._cache_L2BHTD is not None
        self._keys = [self._cache_L2BHTD[i, 0, :num_rows] for i in self.layer_ids]
        self._values = [self._cache_L2BHTD[i, 1, :num_rows] for i in self.layer_ids]

    def forward(self, tokens_BN: Tensor, parents_BN: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(logits_BNV, hidden_BNC) of new tokens after the committed ones; hidden is after the final norm.

        parents_BN: a tree (see `Slots.plan`); None is a chain. Rows with fewer tokens are padded on the right.
        """
        hidden_BNC = self.features(tokens_BN, parents_BN)
        return self.weights.head(hidden_BNC), hidden_BNC

    def features(self, tokens_BN: Tensor, parents_BN: Tensor | None = None) -> Tensor:
        """The hidden states of `forward` without the product with the vocabulary."""
        weights, eps = self.weights, self.config.norm_eps
        plan = self.slots.plan(tokens_BN.shape[1], parents_BN)
        cos, sin = self._rope_rows(plan, tokens_BN.shape[1])
        mask = self._grouped_mask(plan)
        x_BNC = F.embedding(tokens_BN, weights.embedding_VC)
        if self.taps:
            self.tapped = {}
        for index, layer in enumerate(self._layers):
            x_BNC = x_BNC + self._attention(
                index, layer, self._norm(x_BNC, layer.attention_norm_C, eps), plan, cos, sin, mask
            )
            gate, up = layer.gate_up(self._norm(x_BNC, layer.mlp_norm_C, eps)).chunk(2, -1)
            x_BNC = x_BNC + layer.down(F.silu(gate).mul_(up))
            if index in self.taps:
                self.tapped[index] = x_BNC
        return self._norm(x_BNC, weights.norm_C, eps)

    def _norm(self, x_BNC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        if x_BNC.dtype == torch.bfloat16:  # the fused op with a weight takes three times as long in bfloat16
            return F.rms_norm(x_BNC, weight_C.shape, None, eps).mul_(weight_C)
        return F.rms_norm(x_BNC, weight_C.shape, weight_C, eps)

    def _rope_rows(self, plan: Plan, num_tokens: int) -> tuple[Tensor, Tensor]:
        """cos and sin for this forward's positions, (1 or B, N, 1, D)."""
        assert self._rope is not None, "open() comes before forward()"
        cos_TD, sin_TD = self._rope
        if plan.positions_BN is not None:
            return cos_TD[plan.positions_BN][:, :, None], sin_TD[plan.positions_BN][:, :, None]
        start, stop = plan.end - num_tokens, plan.end
        return cos_TD[None, start:stop, None], sin_TD[None, start:stop, None]

    def _grouped_mask(self, plan: Plan) -> Tensor | None:
        """The mask for queries folded as (B, H, G * N, D)."""
        group = self.config.num_heads // self.config.num_kv_heads
        if plan.mask is None or group == 1:
            return plan.mask
        return plan.mask.repeat(1, 1, group, 1)

    def _attention(
        self, index: int, layer: Layer, x_BNC: Tensor, plan: Plan, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        config = self.config
        Q, H, D = config.num_heads, config.num_kv_heads, config.head_dim
        B, N, _ = x_BNC.shape
        qkv = layer.qkv(x_BNC).view(B, N, Q + 2 * H, D)
        qk, v_BNHD = qkv[:, :, : Q + H], qkv[:, :, Q + H :]
        if layer.query_key_norm_QHD is not None:
            qk = F.rms_norm(qk, (D,), None, config.norm_eps) * layer.query_key_norm_QHD
        qk = (qk * cos).addcmul_(qk.roll(D // 2, -1), sin)
        q, k_BNHD = qk[:, :, :Q], qk[:, :, Q:]
        keys, values = self._keys[index], self._values[index]
        if plan.start is not None:
            keys.narrow(2, plan.start, N).copy_(k_BNHD.transpose(1, 2))
            values.narrow(2, plan.start, N).copy_(v_BNHD.transpose(1, 2))
        else:
            rows = torch.arange(B, device=self.device)[:, None]
            keys[rows, :, plan.slots_BN] = k_BNHD
            values[rows, :, plan.slots_BN] = v_BNHD
        keys, values = keys.narrow(2, 0, plan.end), values.narrow(2, 0, plan.end)
        if plan.causal or Q == H:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=mask, is_causal=plan.causal, enable_gqa=Q != H
            )
            return layer.out(out.transpose(1, 2).reshape(B, N, Q * D))
        # Grouped heads: the G queries that share a key head become further rows of it, so no key is copied.
        q = q.view(B, N, H, Q // H, D).permute(0, 2, 3, 1, 4).reshape(B, H, -1, D)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return layer.out(out.view(B, H, Q // H, N, D).permute(0, 3, 1, 2, 4).reshape(B, N, Q * D))

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        """Keep accepted nodes (see `Slots.commit`); None is the chain and costs a length update."""
        self.slots.commit(paths_BL, counts_B, self._move)

    def _move(self, src_BL: Tensor, dst_BL: Tensor) -> None:
        assert self._cache_L2BHTD is not None
        cache = self._cache_L2BHTD
        rows = torch.arange(len(src_BL), device=self.device)[:, None]
        cache[:, :, rows, :, dst_BL] = cache[:, :, rows, :, src_BL]

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Roll rows back to `lengths_B` tokens."""
        self.slots.truncate(lengths_B)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows` of the batch, in that order; the others stop costing."""
        moves = self.slots.select(rows)
        if moves:
            assert self._cache_L2BHTD is not None
            src, dst = [m[0] for m in moves], [m[1] for m in moves]
            self._cache_L2BHTD[:, :, dst] = self._cache_L2BHTD[:, :, src]
        self._view_rows(len(rows))

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, (..., C)."""
        return F.embedding(ids, self.weights.embedding_VC)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states after the final norm."""
        return self.weights.head(hidden)

    def partial(self, layers: Sequence[int]) -> "NativeTarget":
        """A view that runs only `layers`, sharing weights and the keys and values that this target committed.

        The view keeps its own lengths and writes beyond the committed tokens only, where this target's next forward
        overwrites it. Open this target first; follow its commits with `follow`.
        """
        view = NativeTarget(self.weights, f"{self.name}[{len(layers)} layers]", self.max_length, layers)
        view._cache_L2BHTD, view._rope = self._cache_L2BHTD, self._rope
        view.slots.open(len(self.lengths_B), self.slots.capacity)
        view._view_rows(len(self.lengths_B))
        view.follow(self)
        return view

    def follow(self, whole: "NativeTarget") -> None:
        """Take the committed lengths and rows of the target that this is a partial view of."""
        self.slots.lengths_B = list(whole.lengths_B)
        self._view_rows(len(self.lengths_B))
