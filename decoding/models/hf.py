"""The reference target: any decoder-only, full-attention causal LM of `transformers`.

`transformers` does the arithmetic; this module passes it a cache that writes each row's tokens to
that row's slots, an explicit 4-D mask and explicit positions. A model that ignores the mask or the
positions would be silently wrong, so `HFTarget` tests each model with a tree of two branches on
loading, and rejects it if the logits differ from the separate branches' logits.

`compiled` traces the model once for single tokens and once for all wider forwards with symbolic
sizes; slots are then a tensor, so that no length is compiled in. Prompts are read uncompiled.

Taps are read by hooks on the model's layers during one forward: the state at layer k is the input
of module k.

Shapes: B rows, N new tokens, V vocabulary, C hidden size, H key/value heads, D head size, T cache
slots.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from decoding import devices
from decoding.errors import UserError
from decoding.models.cache import CachedTarget, ForwardPlan, Slots
from decoding.models.draft_vocabulary import draft_vocab_size, load_restricted
from decoding.models.folder import (
    read_config,
    refuse_unsupported_attention,
    untrusted_code_error,
    weight_files,
)
from decoding.models.model_check import check_loaded
from decoding.models.taps import check_taps, join_taps
from decoding.values import check_choice

if TYPE_CHECKING:  # its import takes seconds, which only models of this backend need
    from transformers import PreTrainedModel

EXECUTIONS = ("eager", "compiled")  # operation by operation; traced by torch.compile
WIDEST = 64  # new tokens of a compiled forward; a wider one is a prompt
# share of the largest logit; a model that ignores mask or positions differs by far more
PROBE_TOLERANCE = 0.05
# raised by `transformers` for folders that it cannot load
_CANNOT_READ = (ValueError, OSError, KeyError, RuntimeError, StrictDataclassError)
_CANNOT_BUILD = (TypeError, AttributeError, ArithmeticError)


class RowLayer(CacheLayerMixin):
    """One layer of the cache; the owner's `plan` has the slots of the current forward."""

    def __init__(self, owner: "RowCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all slots in the shapes of the first forward's keys and values."""
        _, heads, _, key_size = key_states.shape
        B, T = self.owner.row_count, self.owner.slot_count
        with torch.inference_mode(False):
            self.keys = torch.zeros(
                B, heads, T, key_size, dtype=key_states.dtype, device=key_states.device
            )
            self.values = self.keys.new_zeros(B, heads, T, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (B, H, N, D) keys and values to their slots; return all slots that are read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None and self.owner.plan is not None
        plan = self.owner.plan
        B, _, N, _ = key_states.shape
        if plan.slots_BN is None:
            assert plan.start is not None
            self.keys[:B, :, plan.start : plan.start + N] = key_states
            self.values[:B, :, plan.start : plan.start + N] = value_states
        else:
            rows = torch.arange(B, device=key_states.device)[:, None]
            self.keys[rows, :, plan.slots_BN] = key_states.transpose(1, 2)
            self.values[rows, :, plan.slots_BN] = value_states.transpose(1, 2)
        return self.keys[:B, :, : plan.end], self.values[:B, :, : plan.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.owner.plan is not None
        return self.owner.plan.end, 0

    def get_seq_length(self) -> int:
        assert self.owner.plan is not None
        return self.owner.plan.start or 0

    def get_max_length(self) -> int:
        return self.owner.slot_count


class RowCache(Cache):
    """A `transformers` cache whose rows have different lengths."""

    def __init__(self, num_layers: int, batch_size: int, capacity: int) -> None:
        self.row_count, self.slot_count = batch_size, capacity
        self.plan: ForwardPlan | None = None
        self.rows = [RowLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.rows))

    def stores(self) -> list[Tensor]:
        """Return the key and value tensors (B, H, T, D) of all layers that have run."""
        pairs = [(layer.keys, layer.values) for layer in self.rows if layer.is_initialized]
        return [store for pair in pairs for store in pair if store is not None]


class HFTarget(CachedTarget):
    """A `Target` around a `transformers` model."""

    def __init__(
        self,
        model: "PreTrainedModel",
        name: str,
        max_length: int | None = None,
        execution: str | None = None,
    ) -> None:
        """Wrap a model.

        max_length: None is the model's context. execution: one of EXECUTIONS; None is eager. Raises
        UserError for another execution, and for a model that ignores the mask or the positions.
        """
        self.execution = execution or "eager"
        check_choice("execution", self.execution, EXECUTIONS)
        self.model = model.eval().requires_grad_(False)
        config = model.config
        self.name, self.device = name, model.device
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers = config.num_hidden_layers
        self.context = config.max_position_embeddings
        self.max_length = max_length or self.context
        self.num_parameters = model.num_parameters()
        self.slots = Slots(model.dtype, model.device)
        self.cache = RowCache(self.num_layers, 0, 0)
        self._hidden: Tensor | None = None
        self._states: dict[int, Tensor] = {}  # at the taps of the running forward
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        # name -> keys and values of every layer, (1, H, tokens, D)
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)
        self._refuse_unmasked_model()
        if self.execution == "compiled":
            self._compiled = devices.compiled(self._step, self.device, sizes_open=True)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        name: str,
        dtype: torch.dtype,
        device: str,
        max_length: int | None,
        trust_remote_code: bool,
        execution: str | None = None,
    ) -> "HFTarget":
        """Load a model folder.

        Raises UserError for a damaged folder, for code that is not trusted, and for a model that
        `transformers` cannot load or whose attention is not full and causal.
        """
        refuse_unsupported_attention(read_config(folder), str(folder))
        weight_files(folder)
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            if draft_vocab_size(folder):
                model = load_restricted(folder, config, dtype).to(device)
                return cls(model, name, max_length, execution)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (*_CANNOT_READ, *_CANNOT_BUILD) as error:
            reason = " ".join(str(error).split())
            if not trust_remote_code and "trust_remote_code" in reason:
                raise untrusted_code_error(folder) from error
            raise UserError(
                f"{folder}: transformers cannot load it as a causal LM ({reason}). Use another "
                f"model, or repair the folder."
            ) from error
        model, info = loaded
        check_loaded(folder, info)
        refuse_unsupported_attention(config.to_dict(), str(folder))
        torch.nn.Module.to(model, torch.device(device))
        return cls(model, name, max_length, execution)

    def _keep_hidden(self, _module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        """Store the output embedding's input: the state after the final norm in every model."""
        self._hidden = args[0]

    def _refuse_unmasked_model(self) -> None:
        """Reject a model in which node 2 of the tree 0 -> (1, 2) attends to node 1."""
        with torch.inference_mode():
            self.open(1, 8)
            ids = torch.tensor([[1, 2, 3]], device=self.device).remainder(self.vocab_size)
            tree, _ = self.forward(ids, torch.tensor([[-1, 0, 0]], device=self.device))
            plain = self.model(input_ids=ids[:, [0, 2]]).logits
            finite = plain.isfinite()  # a model with a draft vocabulary gives -inf to other tokens
            apart, plain = (one.where(finite, 0) for one in (tree[:, [0, 2]] - plain, plain))
            if apart.abs().max() > PROBE_TOLERANCE * plain.abs().max():
                raise UserError(
                    f"{self.name}: this {self.model.config.model_type} model ignores the 4-D "
                    f"attention mask or the position ids, so it cannot verify drafted tokens. Use "
                    f"another target."
                )

    @property
    def backend(self) -> str:
        """Name of the backend in results, with the execution unless it is eager."""
        return "hf" if self.execution == "eager" else f"hf {self.execution}"

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """Start `batch_size` empty rows with `capacity` cache slots each (default: max_length)."""
        capacity = capacity or self.max_length
        if self.cache.row_count < batch_size or self.cache.slot_count < capacity:
            rows = max(self.cache.row_count, batch_size)
            self.cache = RowCache(self.num_layers, rows, max(self.cache.slot_count, capacity))
        self.slots.open(batch_size, capacity)

    def _inputs(self, tokens_BN: Tensor, parents_BN: Tensor | None) -> dict[str, Any]:
        N = tokens_BN.shape[1]
        plan = self.cache.plan = self.slots.plan(N, parents_BN)
        positions_BN = plan.positions_BN
        if positions_BN is None:
            positions_BN = torch.arange(plan.end - N, plan.end, device=self.device)[None]
        # Only padding can lie past the context; a table of learned positions ends there.
        positions_BN = positions_BN.clamp(max=self.context - 1)
        mask = plan.mask
        if mask is None:
            mask = torch.zeros(1, 1, N, plan.end, dtype=self.slots.dtype, device=self.device)
        if plan.causal:
            mask = torch.full_like(mask, float("-inf")).triu_(1)
        return {
            "input_ids": tokens_BN,
            "attention_mask": mask.expand(len(tokens_BN), -1, -1, -1),
            "position_ids": positions_BN.expand(len(tokens_BN), -1),
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return (logits_BNV, hidden_BNC); see `Target.forward`."""
        B, N = tokens_BN.shape
        with self._tapped(taps):
            inputs = self._inputs(tokens_BN, parents_BN)
            if self._compiled is None or N > WIDEST or not self.cache.stores():
                return self._run(inputs, taps)
            plan = self.cache.plan
            assert plan is not None
            slots_BN = plan.slots_BN
            if slots_BN is None:
                slots_BN = torch.arange(plan.end - N, plan.end, device=self.device).expand(B, N)
            # a copy, since an expanded mask has other strides and would be traced again
            mask = inputs["attention_mask"].clone()
            return self._compiled(tokens_BN, mask, inputs["position_ids"], slots_BN, taps)

    def _run(self, inputs: dict[str, Any], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        logits_BNV = self.model(**inputs).logits
        assert self._hidden is not None
        return logits_BNV, self._read(self._hidden, taps)

    def _read(self, hidden_BNC: Tensor, taps: tuple[int, ...]) -> Tensor:
        """Return the hidden states at the taps, or after the final norm without taps."""
        if not taps:
            return hidden_BNC
        return join_taps({**self._states, self.num_layers: hidden_BNC}, taps)

    @contextmanager
    def _tapped(self, taps: tuple[int, ...]) -> Iterator[None]:
        """Make forwards within the block store the inputs of these layers in `_states`."""
        check_taps(self, taps)
        layers: Sequence[torch.nn.Module] = self._layers() if taps else []
        hooks = [
            layers[tap].register_forward_pre_hook(self._keep_input(tap), with_kwargs=True)
            for tap in taps
            if tap < self.num_layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._states = {}

    def _keep_input(self, tap: int) -> Callable[..., None]:
        def keep(_module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._states[tap] = args[0] if args else named["hidden_states"]

        return keep

    def _layers(self) -> Sequence[torch.nn.Module]:
        """Return the model's decoder layers; raise UserError for a model without a list of them."""
        for module in self.model.base_model.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == self.num_layers:
                return list(module)
        raise UserError(
            f"{self.name}: this {self.model.config.model_type} model has no list of "
            f"{self.num_layers} layers, so a drafter that reads hidden states between them cannot "
            f"be used with it. Use a drafter without taps."
        )

    def _step(
        self,
        tokens_BN: Tensor,
        mask: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Run the forward that is compiled, in which every length is the size of a tensor."""
        self.cache.plan = ForwardPlan(mask.shape[-1], None, slots_BN, positions_BN, mask)
        inputs = {"input_ids": tokens_BN, "attention_mask": mask, "position_ids": positions_BN}
        return self._run({**inputs, "past_key_values": self.cache, "use_cache": True}, taps)

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        """Return the hidden states of `forward` without computing logits."""
        with self._tapped(taps):
            found = self.model.base_model(**self._inputs(tokens_BN, parents_BN))
            return self._read(found.last_hidden_state, taps)

    def _move(self, src_BL: Tensor, dst_BL: Tensor) -> None:
        rows = torch.arange(len(src_BL), device=self.device)[:, None]
        for store in self.cache.stores():
            store[rows, :, dst_BL] = store[rows, :, src_BL]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        moves = self.slots.select(rows)
        if moves:
            src, dst = [m[0] for m in moves], [m[1] for m in moves]
            for store in self.cache.stores():
                store[dst] = store[src]

    def add_rows(self, count: int) -> None:
        """Add `count` empty rows after the running ones; a cache with too few rows is copied."""
        old, rows = self.cache, len(self.lengths_B) + count
        if old.row_count < rows:
            self.cache = RowCache(self.num_layers, rows, old.slot_count)
            for before, after in zip(old.rows, self.cache.rows, strict=True):
                if before.keys is None or before.values is None:
                    continue
                after.lazy_initialization(before.keys, before.values)
                assert after.keys is not None and after.values is not None
                after.keys[: old.row_count] = before.keys
                after.values[: old.row_count] = before.values
        self.slots.add_rows(count)

    def keep(self, row: int, name: int) -> None:
        """Store a copy of a row's committed cache (see `Target.keep`)."""
        length, stores = self.lengths_B[row], self.cache.stores()
        copies = [store[row : row + 1, :, :length].clone() for store in stores]
        self._kept[name] = list(zip(copies[::2], copies[1::2], strict=True))

    def begin(self, row: int, name: int, length: int) -> None:
        """Fill an empty row with the first `length` tokens that `keep` stored for this name."""
        for layer, (keys, values) in zip(self.cache.rows, self._kept[name], strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            assert layer.keys is not None and layer.values is not None
            layer.keys[row, :, :length] = keys[0, :, :length]
            layer.values[row, :, :length] = values[0, :, :length]
        self.slots.lengths_B[row] = length

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., C) of token ids."""
        return self.model.get_input_embeddings()(ids)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states after the final norm."""
        return self.model.get_output_embeddings()(hidden)
