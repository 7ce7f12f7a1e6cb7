"""The `fused` execution on a CPU: each forward over few tokens is one call of compiled C++.

The folder `step` has the whole step, from the embedding to the logits, and its step.cpp says how;
library.py builds it. This module hands it the addresses of weights and cache. The eager version is
`NativeTarget.through_layers`, which also runs where there is no compiler.

Shapes: B rows, N new tokens, V vocabulary, C hidden size, H key/value heads, D head size, S slots
of the cache, L layers, I inputs, O outputs.
"""

import ctypes
import math
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.errors import UserError
from decoding.models.native import library
from decoding.models.native.library import Forward, load_library
from decoding.models.native.linear import PlainLinear
from decoding.models.native.skips import KeptLayer
from decoding.models.native.weights import Layer, Weights

# The types of weights, by their numbers in structures.h, and in which their products are summed.
SUM_DTYPES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
}
CODES = {dtype: code for code, dtype in enumerate(SUM_DTYPES)}
# New tokens in all rows of a fused forward; wider ones, such as prompts, run eagerly, where each
# weight is used often enough for a library's matrix products. In bfloat16 none do: near ties are
# common, and texts would depend on the rows beside them.
WIDEST = 128
SLICE = 512  # most tokens of a call for wider chains and prompts, which bounds its buffers


def refuse(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the fused step cannot run here, None if it can."""
    if device.type != "cpu":
        return f"it is for CPUs, and the model is on {device}"
    if dtype not in CODES:
        known = ", ".join(str(each).removeprefix("torch.") for each in CODES)
        return f"it is for {known}, and the model is in {str(dtype).removeprefix('torch.')}"
    try:
        library.compiler()
    except UserError as error:
        return None if library.find_libraries() else str(error)
    return None


def fused_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x (..., I) @ weight_OI^T + bias_O, with each row's bits independent of the others."""
    rows = x.numel() // weight_OI.shape[1]
    if rows > WIDEST or x.dtype != weight_OI.dtype:
        return F.linear(x, weight_OI, bias_O)
    x, out = x.contiguous(), x.new_empty((*x.shape[:-1], len(weight_OI)))
    load_library().linear(
        CODES[x.dtype], torch.get_num_threads(), rows, *weight_OI.shape, x.data_ptr(),
        weight_OI.data_ptr(), address(bias_O), out.data_ptr(),
    )  # fmt: skip
    return out


class FusedLinear:
    """A linear layer as one call of C++, for the heads of a target that runs fused."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI.detach().contiguous(), bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return fused_linear(x_NI, self.weight_OI, self.bias_O)


def fuse_linears(module: torch.nn.Module) -> None:
    """Run a trained module's linear layers as `FusedLinear`, without gradients, where it can."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            if refuse(layer.weight.dtype, layer.weight.device) is not None:
                return
            layer.forward = FusedLinear(layer.weight, layer.bias)  # type: ignore[assignment,method-assign]


class FusedForward:
    """The fused step of one target; `bind` gives it the target's cache."""

    def __init__(self, weights: Weights, layers: Sequence[KeptLayer]) -> None:
        """Prepare the step of these layers.

        Raises UserError if the step cannot be built here.
        """
        reason = refuse(weights.dtype, weights.device)
        if reason is not None:
            raise UserError(f"execution 'fused' does not work here: {reason}. Use execution=eager.")
        if weights.packed:
            raise ValueError("the fused step needs plain weights, found packed ones.")
        self.weights, self.layers, self.library = weights, layers, load_library()
        config = weights.config
        self._choices_of: dict[int, int] = {}
        self._columns_of: dict[tuple[int, ...], ctypes.Array[ctypes.c_int32]] = {}
        self._held: list[Tensor] = []  # whose addresses the structures hold
        self._layer = (library.Layer * len(layers))(*(self._layer_of(*each[1:]) for each in layers))
        self.sum_dtype = SUM_DTYPES[weights.dtype]
        sizes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
        self.model = library.Model(
            CODES[weights.dtype], len(layers), *sizes, config.intermediate_size, config.head_rows,
            0, len(weights.embedding_VC), config.norm_eps, self._layer,
            *map(self._hold, (weights.embedding_VC, weights.norm_C, weights.head_weight_VC)),
        )  # fmt: skip
        # without hardware for it, PyTorch multiplies bfloat16 some five times as slowly
        self._widest = sys.maxsize if weights.dtype == torch.bfloat16 else WIDEST

    def takes(self, rows: int) -> bool:
        """Return whether forwards over this many new tokens, in all rows, run fused."""
        return rows <= self._widest

    def bind(self, cache_L2BHSD: Tensor, rope: tuple[Tensor, Tensor], first_slot: int = 0) -> None:
        """Use this cache and these rope tables (S, D).

        first_slot: the one that is seen first, from which `lengths_B` count.
        """
        self._cache, self._first_slot = cache_L2BHSD, first_slot
        self._rope = [table[first_slot:].to(self.sum_dtype).contiguous() for table in rope]
        self.model.S = cache_L2BHSD.shape[4]
        self.model.cosines, self.model.sines = (table.data_ptr() for table in self._rope)
        for place, (cached, *_) in zip(self._layer, self.layers, strict=True):
            parts = cache_L2BHSD[cached, :, :, :, first_slot:]
            place.keys, place.values = (part.data_ptr() for part in parts)

    def __call__(
        self,
        tokens_BN: Tensor,
        parents_BN: Tensor | None,
        lengths_B: Sequence[int],
        taps: tuple[int, ...],
        has_logits: bool = True,
        places_B: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of new tokens after `lengths_B` committed ones.

        places_B: rows of the cache, one of which may occur again with a later slot; None: all.
        Hidden states are after the final norm, or at the taps. The logits of bfloat16 weights are
        in float32. Without `has_logits` they are not computed, and the first tensor is empty.
        Raises IndexError for a token outside the vocabulary.
        """
        B, N = tokens_BN.shape
        if (width := max(1, SLICE // B)) < N and parents_BN is None:
            parts = [
                self(part_BN, None, [length + n * width for length in lengths_B], taps, has_logits)
                for n, part_BN in enumerate(tokens_BN.split(width, 1))
            ]
            logits, hidden = (torch.cat(each, 1) for each in zip(*parts, strict=True))
            return logits, hidden
        weights, wanted = self.weights, taps or (len(self.layers),)
        C, V = weights.config.hidden_size, weights.config.head_rows
        hidden = torch.empty(B, N, len(wanted) * C, dtype=weights.dtype)
        logits = torch.empty(B, N, V if has_logits else 0, dtype=self.sum_dtype)
        if tokens_BN.dtype != torch.int64 or not tokens_BN.is_contiguous():
            tokens_BN = tokens_BN.to(torch.int64).contiguous()
        parents_BN = None if parents_BN is None else parents_BN.contiguous()
        forward = Forward(
            B, N, len(wanted), torch.get_num_threads(), not has_logits and parents_BN is None,
            address(tokens_BN), address(parents_BN),
            (ctypes.c_int64 * B)(*lengths_B), self.columns(wanted),
            address(hidden), address(logits) if has_logits else None, None,
            None if places_B is None else (ctypes.c_int32 * B)(*places_B),
        )  # fmt: skip
        self.check(self.library.forward_step(self.model, forward), N)
        return weights.spread(logits) if has_logits else logits, hidden

    def read(
        self,
        tokens_of: Mapping[int, Sequence[int]],
        lengths_B: Sequence[int],
        taps: tuple[int, ...],
    ) -> list[Tensor]:
        """Return the hidden states (N, C) of new tokens of some rows, in which N may differ."""
        new = [
            (token, row, slot)
            for row, tokens in tokens_of.items()
            for slot, token in enumerate(tokens, lengths_B[row])
        ]
        width, states = math.ceil(len(new) / math.ceil(len(new) / SLICE)), []
        for start in range(0, len(new), width):
            tokens, rows, slots = zip(*new[start : start + width], strict=True)
            states.append(self(torch.tensor(tokens)[:, None], None, slots, taps, False, rows)[1])
        sizes = [len(tokens) for tokens in tokens_of.values()]
        return list(torch.cat(states).squeeze(1).split(sizes))

    def block(self, tokens_BN: Tensor, lengths_B: Sequence[int], causal: bool) -> Tensor:
        """Return the states (B, N, C), after the final norm, of a block after committed tokens.

        causal: whether a token sees no later one of its block. Raises IndexError for a token
        outside the vocabulary.
        """
        (B, N), tokens_BN = tokens_BN.shape, tokens_BN.contiguous()
        hidden_BNC = torch.empty(B, N, self.weights.config.hidden_size, dtype=self.weights.dtype)
        forward = Forward(
            B, N, 1, torch.get_num_threads(), False, address(tokens_BN), None,
            (ctypes.c_int64 * B)(*lengths_B), self.columns((len(self.layers),)),
            address(hidden_BNC), None, None, None, not causal,
        )  # fmt: skip
        self.check(self.library.forward_step(self.model, forward), N)
        return hidden_BNC

    def join(
        self,
        tokens_BN: Tensor,
        states_BNC: Tensor,
        lengths_B: Sequence[int],
        nodes_B: Sequence[int] | None,
        before_norm: bool,
        parents_BM: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and states of tokens, each of which is read beside a state.

        It is for a first layer that joins the two (`Layer.state_norm_C`). nodes_B: the one token of
        each row whose logits are wanted, as (B, 1, V); None: all. The states (B, N, C) are those
        after the final norm, or with `before_norm` those before it. parents_BM: of the M nodes of a
        tree, the last N of which are these tokens; None: a chain. Raises IndexError for a token
        outside the vocabulary.
        """
        (B, N), tokens_BN = tokens_BN.shape, tokens_BN.contiguous()
        states_BNC, hidden_BNC = states_BNC.contiguous(), torch.empty_like(states_BNC)
        shape = (B, N if nodes_B is None else 1, self.weights.config.head_rows)
        logits, nodes = torch.empty(shape, dtype=self.sum_dtype), None
        if nodes_B is not None:
            nodes = ctypes.cast((ctypes.c_int32 * B)(*nodes_B), ctypes.c_void_p)
        grown = 0 if parents_BM is None else parents_BM.shape[1] - N
        self.check(max(lengths_B) + grown + N > self.model.S - self._first_slot, grown + N)
        parents_BM = None if parents_BM is None else parents_BM.contiguous()
        forward = Forward(
            B, N, 1, torch.get_num_threads(), False, address(tokens_BN), address(parents_BM),
            (ctypes.c_int64 * B)(*lengths_B), self.columns((len(self.layers),)),
            address(hidden_BNC), address(logits), nodes, None, False, address(states_BNC),
            grown, before_norm,
        )  # fmt: skip
        self.check(self.library.forward_step(self.model, forward), grown + N)
        return logits, hidden_BNC

    def write(self, states_BNC: Tensor, lengths_B: Sequence[int]) -> None:
        """Write keys and values of tokens after committed ones, from the states before the layers.

        Needs room for N tokens in every row.
        """
        B, N, _ = states_BNC.shape
        states_BNC = states_BNC.contiguous()
        forward = Forward(
            B, N, 0, torch.get_num_threads(), False, None, None,
            (ctypes.c_int64 * B)(*lengths_B), self.columns(()),
            None, None, None, None, False, address(states_BNC),
        )  # fmt: skip
        self.check(self.library.forward_step(self.model, forward), N)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states after the final norm."""
        weight_VC = self.weights.head_weight_VC
        assert weight_VC is not None
        return self.weights.spread(fused_linear(hidden, weight_VC, None))

    def choices(self, vocab_size: int) -> int:
        """Return the number of outputs for tokens below `vocab_size`, which come first."""
        if vocab_size not in self._choices_of:
            ids_N = self.weights.ids_N
            known = vocab_size if ids_N is None else int((ids_N < vocab_size).sum())
            self._choices_of[vocab_size] = min(known, self.weights.config.head_rows)
        return self._choices_of[vocab_size]

    def columns(self, taps: tuple[int, ...]) -> ctypes.Array[ctypes.c_int32]:
        """Return the place of each layer's hidden states among those of the taps, or -1."""
        if taps not in self._columns_of:
            columns = [-1] * (len(self.layers) + 1)
            for column, tap in enumerate(taps):
                columns[tap] = column
            self._columns_of[taps] = (ctypes.c_int32 * len(columns))(*columns)
        return self._columns_of[taps]

    def check(self, failed: int, num_tokens: int) -> None:
        """Raise IndexError if a call over `num_tokens` new tokens has failed."""
        if failed:
            raise IndexError(
                f"tokens, lengths or parents are out of range: expected tokens from 0 to "
                f"{len(self.weights.embedding_VC) - 1}, lengths of at most "
                f"{self.model.S - num_tokens}, and parents before their nodes."
            )

    def _layer_of(self, layer: Layer, attends: bool, feeds: bool) -> library.Layer:
        products = (layer.qkv, layer.out, layer.gate_up, layer.down)
        qkv, out, gate_up, down = (
            (self._hold(product.weight_OI), self._hold(product.bias_O))
            for product in products
            if isinstance(product, PlainLinear)  # all of them, as the weights are not packed
        )
        norms = layer.attention_norm_C, layer.state_norm_C, layer.query_key_norm_QHD
        before, state, heads = map(self._hold, norms)
        between = self._hold(layer.mlp_norm_C)
        empty = (None, None)  # the cache, until `bind`
        return library.Layer(
            before, state, *qkv, heads, *out, between, *gate_up, *down, *empty, attends, feeds
        )

    def _hold(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor's contiguous form, which stays alive with this object."""
        if tensor is None:
            return None
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's numbers, None without a tensor."""
    return None if tensor is None else tensor.data_ptr()
