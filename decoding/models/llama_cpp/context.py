"""A context of llama.cpp: its cache of keys and values, and the forward over a batch of tokens.

Shapes: T tokens of a batch, V vocabulary, C hidden size.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.llama_cpp.library import Library
from decoding.models.llama_cpp.sequences import MOST

# tokens of one call, which a tree must fit into, and of one graph of operations
BATCH, GRAPH = 4096, 512
CELLS = 256  # llama.cpp rounds the cells of a cache up to a multiple
# dtype of the cache -> ggml's number for it
CACHE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
_NO_CELL = 1  # what llama_decode returns if the cache is full


class Model:
    """The loaded weights, which are freed with this object."""

    def __init__(self, library: Library, pointer: Any) -> None:
        self.pointer = pointer
        weakref.finalize(self, library.functions.llama_model_free, pointer)


@dataclass(slots=True)
class NewToken:
    """One token of a batch."""

    token: int
    position: int
    sequences: Sequence[int]


class Context:
    """The cache of one model, of `cells` tokens in all sequences together."""

    def __init__(self, library: Library, model: Model, cells: int, cache_type: int) -> None:
        """Allocate the cache and the graphs. Raises UserError if the memory does not suffice."""
        functions = library.functions
        threads = torch.get_num_threads()
        settings = functions.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = cells, BATCH, GRAPH
        settings.n_seq_max, settings.kv_unified = MOST, True
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = cache_type
        if cache_type == CACHE_TYPES["float32"]:  # flash attention sums values in float16
            settings.flash_attn_type = functions.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.embeddings, settings.pooling_type = True, functions.LLAMA_POOLING_TYPE_NONE
        library.errors.clear()
        pointer = functions.llama_init_from_model(model.pointer, settings)
        if not pointer:
            raise UserError(
                f"llama.cpp cannot make a cache of {cells} tokens ({library.reason()}). Use fewer "
                f"rows, a smaller max_length, or dtype=float16."
            )
        self.cells = cells
        self._model = model  # kept, since its weights must outlive this cache
        self._library, self._functions, self._pointer = library, functions, pointer
        self._memory = functions.llama_get_memory(pointer)
        self._vocab_size = functions.llama_vocab_n_tokens(
            functions.llama_model_get_vocab(model.pointer)
        )
        self._hidden_size = functions.llama_model_n_embd(model.pointer)
        self._threads, self._states = threads, True
        self._batch = _BatchArrays(functions)
        weakref.finalize(self, functions.llama_free, pointer)

    def clear(self) -> None:
        """Drop all tokens."""
        self._functions.llama_memory_clear(self._memory, False)

    def remove(self, sequence: int, start: int) -> None:
        """Drop a sequence's tokens from this position on."""
        self._functions.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def copy(self, source: int, destination: int, start: int, end: int) -> None:
        """Let a sequence hold another one's tokens at positions start .. end - 1 too."""
        self._functions.llama_memory_seq_cp(self._memory, source, destination, start, end)

    def store(self, sequence: int) -> ctypes.Array[ctypes.c_uint8]:
        """Return a copy of a sequence's cache."""
        size = self._functions.llama_state_seq_get_size(self._pointer, sequence)
        held = (ctypes.c_uint8 * size)()
        self._functions.llama_state_seq_get_data(self._pointer, held, size, sequence)
        return held

    def restore(self, held: ctypes.Array[ctypes.c_uint8], sequence: int) -> None:
        """Fill an empty sequence with what `store` returned."""
        done = self._functions.llama_state_seq_set_data(self._pointer, held, len(held), sequence)
        if not done:
            raise UserError(
                f"llama.cpp cannot restore a stored cache ({self._library.reason()}). Open the "
                f"target with a larger max_length."
            )

    def forward(self, tokens_T: Sequence[NewToken]) -> tuple[Tensor, Tensor]:
        """Return logits (T, V) and hidden states (T, C) after the final norm, in float32.

        The tokens are at most BATCH, in an order in which no sequence's positions decrease.
        """
        states_TC = self.states(tokens_T)
        logits = self._functions.llama_get_logits(self._pointer)
        return _copied(logits, len(tokens_T), self._vocab_size), states_TC

    def states(self, tokens_T: Sequence[NewToken]) -> Tensor:
        """Return the hidden states of `forward` alone; llama.cpp computes the logits too."""
        self._decode(tokens_T, True)
        states = self._functions.llama_get_embeddings(self._pointer)
        return _copied(states, len(tokens_T), self._hidden_size)

    def read(self, tokens_T: Sequence[NewToken]) -> None:
        """Read tokens into the cache without computing logits or states."""
        self._decode(tokens_T, False)

    def _decode(self, tokens_T: Sequence[NewToken], states: bool) -> None:
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._functions.llama_set_n_threads(self._pointer, threads, threads)
            self._threads = threads
        if states != self._states:
            self._functions.llama_set_embeddings(self._pointer, states)
            self._states = states
        batch = self._batch.fill(tokens_T, states)
        self._library.errors.clear()
        code = self._functions.llama_decode(self._pointer, batch)
        if code == _NO_CELL:
            raise UserError(
                f"llama.cpp's cache of {self.cells} tokens is full. Open the target with fewer "
                f"rows, or with a larger capacity."
            )
        if code:
            raise UserError(
                f"llama.cpp cannot run a forward over {len(tokens_T)} tokens (code {code}: "
                f"{self._library.reason()}). Use another model or a newer llama-cpp-python."
            )


class _BatchArrays:
    """The arrays of one `llama_batch`, allocated once."""

    def __init__(self, functions: Any) -> None:
        self._tokens_T = np.zeros(BATCH, np.int32)
        self._positions_T = np.zeros(BATCH, np.int32)
        self._counts_T = np.zeros(BATCH, np.int32)
        self._outputs_T = np.zeros(BATCH, np.int8)
        self._ids = np.zeros(BATCH, np.int32)  # of all tokens' sequences, one after another
        self._pointers_T = np.zeros(BATCH + 1, np.uint64)
        batch = functions.llama_batch()
        kinds = dict(functions.llama_batch._fields_)
        for name, array in (
            ("token", self._tokens_T),
            ("pos", self._positions_T),
            ("n_seq_id", self._counts_T),
            ("seq_id", self._pointers_T),
            ("logits", self._outputs_T),
        ):
            setattr(batch, name, ctypes.cast(array.ctypes.data, kinds[name]))
        self._batch = batch

    def fill(self, tokens_T: Sequence[NewToken], outputs: bool) -> Any:
        """Return the batch of these tokens. outputs: whether logits and states are wanted."""
        T = len(tokens_T)
        ids = [number for one in tokens_T for number in one.sequences]
        if len(ids) > len(self._ids):
            self._ids = np.zeros(2 * len(ids), np.int32)
        counts = [len(one.sequences) for one in tokens_T]
        self._ids[: len(ids)] = ids
        self._tokens_T[:T] = [one.token for one in tokens_T]
        self._positions_T[:T] = [one.position for one in tokens_T]
        self._counts_T[:T] = counts
        self._outputs_T[:T] = outputs
        starts_T = np.cumsum([0, *counts[:-1]])
        self._pointers_T[:T] = self._ids.ctypes.data + self._ids.itemsize * starts_T
        self._pointers_T[T] = 0
        self._batch.n_tokens = T
        return self._batch


def _copied(pointer: Any, rows: int, columns: int) -> Tensor:
    """Return a copy of llama.cpp's numbers, which its next forward overwrites."""
    values = np.ctypeslib.as_array(pointer, (rows, columns))
    return torch.from_numpy(values).clone()
