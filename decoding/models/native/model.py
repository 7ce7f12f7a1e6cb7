"""The native target: Llama, Mistral without window, Qwen2 and Qwen3 in few, small operations.

It fuses the qkv and gate/up products, keeps one cache tensor for all layers, and applies rope in
three operations and one mask a forward. The logits are tested against the hf backend. That is the
eager execution, which also reads long prompts of the others. Decode steps run faster as one call of
compiled C++ on a CPU (fused.py), and as recorded steps on a GPU (static.py).

Shapes: B rows, N new tokens, V vocabulary, C hidden size, Q query heads, H key/value heads, G = Q /
H, D head size, F feed-forward size, T cache slots, L layers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.interfaces import ChainCall, ChainChoice, Chooser, Tokens, VerifyCall
from decoding.models.cache import CachedTarget, Slots
from decoding.models.native.cached_attention import (
    Attention,
    CacheViews,
    Span,
    padded_attention,
    ragged_attention,
)
from decoding.models.native.chains import draft_chain, verifies, verify_chains
from decoding.models.native.fused import FusedForward
from decoding.models.native.linear import can_pack, rms_norm
from decoding.models.native.rope import inverse_frequencies, rope_tables
from decoding.models.native.skips import Skips
from decoding.models.native.static import SLOT_MULTIPLE, WIDEST, StaticForward, bucket
from decoding.models.native.weights import NativeConfig, Weights
from decoding.models.taps import check_taps, join_taps
from decoding.values import check_choice

# operation by operation; one call of C++ (CPU); recorded; recorded with fused layers
EXECUTIONS = ("eager", "fused", "graph", "compiled")
RECORDED = ("graph", "compiled")


class NativeTarget(CachedTarget):
    """A `Target` over `Weights`, made by `load_target`, or by `from_state` from a state dict."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        max_length: int | None = None,
        skips: Skips | None = None,
        execution: str | None = None,
    ) -> None:
        """Wrap weights that are on their device.

        max_length: None is the model's context. skips: sub-layers to leave out. execution: one of
        EXECUTIONS; None is graph on a GPU and eager on a CPU. Raises UserError for another
        execution, and for one that cannot run here.
        """
        if execution is None:
            execution = "graph" if devices.runs_ahead(weights.device) else "eager"
        check_choice("execution", execution, EXECUTIONS)
        config = weights.config
        self.weights, self.config, self.name, self.execution = weights, config, name, execution
        steps = (skips or Skips()).steps(weights.layers)
        self.layer_ids = tuple(step[0] for step in steps)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers = len(self.layer_ids)
        self.max_length = max_length or config.max_positions
        self.dtype, self.device = str(weights.dtype).removeprefix("torch."), weights.device
        self.num_parameters = weights.num_parameters
        self.slots = Slots(weights.dtype, weights.device)
        self._layers = [step[1:] for step in steps]
        self._static: StaticForward | None = None
        self._fused: FusedForward | None = None
        if execution == "fused":
            self._fused = FusedForward(weights, steps)
        elif execution in RECORDED:
            self._static = StaticForward(weights, steps, compiled=execution == "compiled")
        self._cache_L2BHTD: Tensor | None = None
        self._spare_layers = 0  # layers of the cache that only views use
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._kept: dict[int, Tensor] = {}  # name -> (L, 2, H, tokens, D)
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
        execution: str | None = None,
    ) -> "NativeTarget":
        """Make a target from config.json's fields and a Hugging Face state dict.

        packed: whether to use oneDNN's packed products; None uses them where they exist and the
        execution is not fused. execution: see `__init__`. Raises UserError for a model that this
        backend does not support, and for a missing tensor.
        """
        place = torch.device(device)
        if packed is None:
            packed = execution != "fused" and can_pack(place, dtype)
        weights = Weights(NativeConfig.from_dict(config), state, dtype, place, packed)
        return cls(weights, name, max_length, execution=execution)

    @property
    def backend(self) -> str:
        """Name of the backend in results, with the execution unless it is eager on a CPU."""
        plain = self.execution == "eager" and not devices.runs_ahead(self.device)
        return "native" if plain else f"native {self.execution}"

    @property
    def packed(self) -> bool:
        """Whether the products run on packed weights."""
        return self.weights.packed

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """Start `batch_size` empty rows with `capacity` cache slots each (default: max_length).

        The cache grows as needed and is reused; masks hide its old content.
        """
        capacity = capacity or self.max_length
        cache = self._cache_L2BHTD
        rows, slots = (0, 0) if cache is None else (cache.shape[2], cache.shape[4])
        if rows < batch_size or slots < capacity:
            rows, slots = max(rows, batch_size), max(slots, capacity)
            # a full bucket or the context, since masked attention needs an even number of slots
            if self._static is not None:
                most = math.ceil(max(slots, self.max_length) / SLOT_MULTIPLE) * SLOT_MULTIPLE
                slots = bucket(slots, most)
            config = self.config
            layers = config.num_layers + self._spare_layers
            shape = (layers, 2, rows, config.num_kv_heads, slots, config.head_dim)
            self._cache_L2BHTD = None  # free the old one first
            with torch.inference_mode(False):
                # Zeros, not empty: masked slots are multiplied by weight 0, and 0 x NaN is NaN.
                dtype = self.weights.dtype
                self._cache_L2BHTD = torch.zeros(shape, dtype=dtype, device=self.device)
                cos, sin = rope_tables(self._frequencies, slots, dtype)
                self._rope = (cos.to(self.device), sin.to(self.device))
            self._bind()
        self._view_rows(batch_size)
        self.slots.open(batch_size, capacity)

    def _bind(self) -> None:
        """Hand cache and rope tables to the execution that holds their addresses."""
        step = self._fused or self._static
        if step is not None:
            assert self._cache_L2BHTD is not None and self._rope is not None
            step.bind(self._cache_L2BHTD, self._rope)

    def _view_rows(self, num_rows: int) -> None:
        assert self._cache_L2BHTD is not None
        self._keys = [self._cache_L2BHTD[i, 0, :num_rows] for i in self.layer_ids]
        self._values = [self._cache_L2BHTD[i, 1, :num_rows] for i in self.layer_ids]

    @property
    def _views(self) -> CacheViews:
        assert self._rope is not None, "open() comes before forward()"
        return CacheViews(self._keys, self._values, *self._rope)

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return (logits_BNV, hidden_BNC) of new tokens after the committed ones.

        See `Target.forward`. In a partial view, taps are numbered by the layers that it runs.
        """
        if self._static is not None and tokens_BN.shape[1] <= WIDEST:
            check_taps(self, taps)
            self.slots.end_of(tokens_BN.shape[1])
            return self._static(tokens_BN, parents_BN, self.slots.lengths_B, taps)
        if self._fused is not None and self._fused.takes(tokens_BN.numel()):
            check_taps(self, taps)
            self.slots.end_of(tokens_BN.shape[1])
            return self._fused(tokens_BN, parents_BN, self.slots.lengths_B, taps)
        hidden_BNC, tapped_BNC = self._states(tokens_BN, parents_BN, taps)
        return self.weights.head(hidden_BNC), tapped_BNC

    def chain_call(self, num_tokens: int) -> ChainCall | None:
        """Return `draft_chain` if forwards over this many tokens run fused."""
        fused = self._fused is not None and self._fused.takes(num_tokens)
        return self._draft_chain if fused else None

    def _draft_chain(
        self, unseen_B: Tokens, tips_B: Sequence[int], counts_B: list[int], choice: ChainChoice
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Draft chains (see `Target.chain_call`)."""
        assert self._fused is not None
        self.slots.end_of(max(map(len, unseen_B)))
        tokens_BN, q_BNV, counts_B = draft_chain(
            self._fused, unseen_B, tips_B, counts_B, self.slots.lengths_B, choice
        )
        kept = zip(unseen_B, counts_B, strict=True)
        self.commit(None, [len(unseen) + max(count - 1, 0) for unseen, count in kept])
        return tokens_BN, q_BNV, counts_B

    def verify_call(self, chooser: Chooser) -> VerifyCall | None:
        """Return `verify_chains` if this target runs fused."""
        return verify_chains if self._fused is not None and verifies(chooser) else None

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        """Return the hidden states of `forward` without computing logits, never recorded."""
        self.slots.end_of(tokens_BN.shape[1])
        if self._fused is not None and self._fused.takes(tokens_BN.numel()):
            check_taps(self, taps)
            return self._fused(tokens_BN, parents_BN, self.slots.lengths_B, taps, False)[1]
        return self._states(tokens_BN, parents_BN, taps)[1]

    def features_of_rows(
        self, tokens_of: Mapping[int, Sequence[int]], taps: tuple[int, ...] = ()
    ) -> list[Tensor]:
        """Return the hidden states (N, C) of new tokens of some rows, in which N may differ.

        tokens_of: row -> its new tokens, at least one. Otherwise like `features`.
        """
        check_taps(self, taps)
        lengths_B = self.slots.lengths_B
        spans = [Span(row, lengths_B[row], len(tokens)) for row, tokens in tokens_of.items()]
        self.slots.check_end(max(span.end for span in spans))
        if self._fused is not None and self._fused.takes(sum(map(len, tokens_of.values()))):
            return self._fused.read(tokens_of, lengths_B, taps)
        attention = ragged_attention(self.config, spans, self._views)
        ids = [token for tokens in tokens_of.values() for token in tokens]
        states: dict[int, Tensor] = {}
        x_1TC = self.embed(torch.tensor([ids], device=self.device))
        x_1TC = self._run_layers(x_1TC, attention, taps, states)
        hidden_TC = self._after_layers(x_1TC, taps, states)[1][0]
        return list(hidden_TC.split([span.count for span in spans]))

    def _states(
        self, tokens_BN: Tensor, parents_BN: Tensor | None, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states after the final norm and at the taps (the same without taps)."""
        check_taps(self, taps)
        states: dict[int, Tensor] = {}
        x_BNC = self.through_layers(self.embed(tokens_BN), parents_BN, taps, states)
        return self._after_layers(x_BNC, taps, states)

    def _after_layers(
        self, x_BNC: Tensor, taps: tuple[int, ...], states: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the states of `_states`, from the last layer's output and those at the taps."""
        hidden_BNC = rms_norm(x_BNC, self.weights.norm_C, self.config.norm_eps)
        if not taps:
            return hidden_BNC, hidden_BNC
        states[self.num_layers] = hidden_BNC
        return hidden_BNC, join_taps(states, taps)

    def through_layers(
        self,
        x_BNC: Tensor,
        parents_BN: Tensor | None,
        taps: tuple[int, ...],
        states: dict[int, Tensor],
    ) -> Tensor:
        """Run the layers, from embedded tokens to the input of the final norm.

        states: is filled with the hidden states at the taps; tap 0 is x_BNC.
        """
        plan = self.slots.plan(x_BNC.shape[1], parents_BN)
        attention = padded_attention(self.config, plan, x_BNC.shape[1], self._views)
        return self._run_layers(x_BNC, attention, taps, states)

    def _run_layers(
        self,
        x_BNC: Tensor,
        attention: Attention,
        taps: tuple[int, ...],
        states: dict[int, Tensor],
    ) -> Tensor:
        """Run the layers with this attention (see `through_layers`)."""
        if 0 in taps:
            states[0] = x_BNC
        for index, (layer, attends, feeds) in enumerate(self._layers):
            if attends:
                x_BNC = x_BNC + attention(index, layer, x_BNC)
            if feeds:
                x_BNC = x_BNC + layer.feed_forward(self.config, x_BNC)
            if index + 1 in taps:
                states[index + 1] = x_BNC
        return x_BNC

    def _move(self, src_BL: Tensor, dst_BL: Tensor) -> None:
        assert self._cache_L2BHTD is not None
        cache = self._cache_L2BHTD
        rows = torch.arange(len(src_BL), device=self.device)[:, None]
        cache[:, :, rows, :, dst_BL] = cache[:, :, rows, :, src_BL]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        moves = self.slots.select(rows)
        if moves:
            assert self._cache_L2BHTD is not None
            src, dst = (devices.tensor(list(ends), self.device) for ends in zip(*moves))
            self._cache_L2BHTD[:, :, dst] = self._cache_L2BHTD[:, :, src]
        self._view_rows(len(rows))

    def add_rows(self, count: int) -> None:
        """Add `count` empty rows after the running ones; a cache with too few rows is copied."""
        assert self._cache_L2BHTD is not None, "open() comes before add_rows()"
        shape, rows = list(self._cache_L2BHTD.shape), len(self.lengths_B) + count
        if shape[2] < rows:
            shape[2] = rows
            self._replace_cache(shape)
        self.slots.add_rows(count)
        self._view_rows(rows)

    def keep(self, row: int, name: int) -> None:
        """Store a copy of a row's committed cache (see `Target.keep`)."""
        assert self._cache_L2BHTD is not None
        self._kept[name] = self._cache_L2BHTD[:, :, row, :, : self.lengths_B[row]].clone()

    def begin(self, row: int, name: int, length: int) -> None:
        """Fill an empty row with the first `length` tokens that `keep` stored for this name."""
        assert self._cache_L2BHTD is not None
        self._cache_L2BHTD[:, :, row, :, :length] = self._kept[name][..., :length, :]
        self.slots.lengths_B[row] = length

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., C) of token ids."""
        return F.embedding(ids, self.weights.embedding_VC)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states after the final norm."""
        return self.weights.head(hidden) if self._fused is None else self._fused.lm_head(hidden)

    def twin(self) -> "NativeTarget":
        """Return a target with the same weights, in the same memory, and a cache of its own."""
        return NativeTarget(self.weights, self.name, self.max_length, execution=self.execution)

    def partial(self, skips: Skips) -> "NativeTarget":
        """Return a view without the sub-layers in `skips`, which shares weights and cache.

        The view has separate lengths. It writes only past the committed tokens, to slots that this
        target's next forward overwrites. Open this target first; then call the view's `follow`
        after every commit.
        """
        name = f"{self.name} without {len(skips)} sub-layers"
        view = NativeTarget(self.weights, name, self.max_length, skips, self.execution)
        view.follow(self)
        return view

    def reserve_layer(self) -> None:
        """Give the cache one layer more than the model has, for a view that adds a layer.

        Its keys and values are moved, stored and dropped with the others. The committed part of an
        open cache is copied.
        """
        if self._spare_layers:
            return
        self._spare_layers = 1
        if self._cache_L2BHTD is not None:
            shape = list(self._cache_L2BHTD.shape)
            self._replace_cache([shape[0] + 1, *shape[1:]])

    def _replace_cache(self, shape: Sequence[int]) -> None:
        """Allocate a cache of more layers or rows, and copy the committed part of the rows."""
        cache, rows = self._cache_L2BHTD, len(self.lengths_B)
        assert cache is not None
        layers, used = len(cache), max(self.lengths_B, default=0)
        with torch.inference_mode(False):
            kept = cache[:, :, :rows, :, :used].clone()
        del cache
        self._cache_L2BHTD = kept
        self._bind()
        self._view_rows(rows)  # now nothing holds the old cache, which may be large
        with torch.inference_mode(False):
            self._cache_L2BHTD = torch.zeros(*shape, dtype=kept.dtype, device=self.device)
            self._cache_L2BHTD[:layers, :, :rows, :, :used] = kept
        self._bind()
        self._view_rows(rows)

    def follow(self, target: "NativeTarget") -> None:
        """Copy the lengths and rows of the viewed target, and share its cache.

        Recorded steps are kept as long as the cache is the same.
        """
        if self._cache_L2BHTD is not target._cache_L2BHTD:
            self._cache_L2BHTD, self._rope = target._cache_L2BHTD, target._rope
            self._bind()
        self.slots.capacity = target.slots.capacity
        self.slots.lengths_B = list(target.lengths_B)
        self._view_rows(len(self.lengths_B))
