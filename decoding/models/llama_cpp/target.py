"""The llama.cpp target: a model in a GGUF file, its weights in the file's own quantization.

llama.cpp does the arithmetic. Branches of a tree are sequences of one cache that all rows share
(sequences.py), so a row's attention also passes over the other rows' cells, which are masked.

Shapes: B rows, N new tokens, T tokens of a batch, V vocabulary, C hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import NO_NODE, ChainCall, Chooser, VerifyCall
from decoding.models.gguf.file import GgufFile
from decoding.models.llama_cpp.context import (
    BATCH,
    CACHE_TYPES,
    CELLS,
    GRAPH,
    Context,
    Model,
    NewToken,
)
from decoding.models.llama_cpp.library import Library
from decoding.models.llama_cpp.sequences import Sequences, depths_of, leaves_below
from decoding.models.taps import check_taps

# of the tensors' types -> of the numbers
_PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class LlamaCppTarget:
    """A `Target` in llama.cpp, made by `decoding.models.llama_cpp.load.load_gguf`."""

    backend = "llama_cpp"
    dtype = "float32"  # of logits, hidden states and embeddings
    only_final_state = True  # see `check_taps`

    def __init__(
        self,
        library: Library,
        model: Model,
        file: GgufFile,
        *,
        name: str,
        max_length: int,
        cache_dtype: str = "float32",
    ) -> None:
        """Wrap a loaded model.

        file: its GGUF file, for embeddings. cache_dtype: float32, float16 or bfloat16.
        """
        functions, pointer = library.functions, model.pointer
        self.name, self.max_length = name, max_length
        self.device = torch.device("cpu")
        self.vocab_size = functions.llama_vocab_n_tokens(functions.llama_model_get_vocab(pointer))
        self.hidden_size = functions.llama_model_n_embd(pointer)
        self.num_layers = functions.llama_model_n_layer(pointer)
        self.num_parameters = functions.llama_model_n_params(pointer)
        self.precision = coarsest(file.types(), cache_dtype)
        self._library, self._model, self._file = library, model, file
        self._cache_type = CACHE_TYPES[cache_dtype]
        self._context: Context | None = None
        self._capacity = 0
        self._sequences = Sequences(self._remove, self._copy)
        self._kept: dict[int, Any] = {}

    @property
    def lengths_B(self) -> list[int]:
        """Number of committed tokens in the cache of each row."""
        return self._sequences.lengths_B

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """Start `batch_size` empty rows with `capacity` cache slots each (default: max_length).

        The cache grows as needed and is reused. Raises UserError for more rows than llama.cpp has
        sequences, and if the memory does not suffice.
        """
        capacity = capacity or self.max_length
        self._sequences.open(batch_size)
        cells = -(-batch_size * capacity // CELLS) * CELLS
        if self._context is None or self._context.cells < cells:
            self._context = None  # free the old one first
            self._context = Context(self._library, self._model, cells, self._cache_type)
        else:
            self._context.clear()
        self._capacity = capacity

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return (logits_BNV, hidden_BNC) of new tokens after the committed ones.

        See `Target.forward`. Raises UserError for a tap other than the state after the final norm,
        and for trees with more leaves than llama.cpp has sequences. Logits of padding are 0.
        """
        check_taps(self, taps)
        B, N = tokens_BN.shape
        parents_of = None if parents_BN is None else dict(enumerate(parents_BN.tolist()))
        batch, places_T = self._begin(dict(enumerate(tokens_BN.tolist())), parents_of)
        found = [self._opened.forward(part) for part in _parts(batch, BATCH)]
        logits_TV, hidden_TC = (torch.cat(side) for side in zip(*found, strict=True))
        if len(batch) < B * N:  # padding nodes of trees
            index_T = torch.tensor([row * N + node for row, node in places_T])
            logits_TV, hidden_TC = (
                side.new_zeros(B * N, side.shape[1]).index_copy_(0, index_T, side)
                for side in (logits_TV, hidden_TC)
            )
        return logits_TV.view(B, N, -1), hidden_TC.view(B, N, -1)

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        """Return the hidden states of `forward`; llama.cpp computes logits with them."""
        if parents_BN is not None:
            return self.forward(tokens_BN, parents_BN, taps)[1]
        return torch.stack(self.features_of_rows(dict(enumerate(tokens_BN.tolist())), taps))

    def features_of_rows(
        self, tokens_of: Mapping[int, Sequence[int]], taps: tuple[int, ...] = ()
    ) -> list[Tensor]:
        """Return the hidden states (N, C) of new tokens of some rows, in which N may differ.

        tokens_of: row -> its new tokens, at least one. Otherwise like `features`.
        """
        check_taps(self, taps)
        batch, _ = self._begin(tokens_of, None)
        # in parts of one graph, since llama.cpp keeps the logits of all tokens of a call
        found = [self._opened.states(part) for part in _parts(batch, GRAPH)]
        return list(torch.cat(found).split([len(tokens) for tokens in tokens_of.values()]))

    def read_rows(self, tokens_of: Mapping[int, Sequence[int]]) -> None:
        """Read new tokens of some rows without computing states or logits, for prefill."""
        batch, _ = self._begin(tokens_of, None)
        for part in _parts(batch, BATCH):
            self._opened.read(part)

    def chain_call(self, num_tokens: int) -> ChainCall | None:
        """Return None: this backend drafts step by step (see `Target.chain_call`)."""
        return None

    def verify_call(self, chooser: Chooser) -> VerifyCall | None:
        """Return None: chains are verified in Python (see `Target.verify_call`)."""
        return None

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        """Commit the accepted nodes (see `Target.commit`)."""
        for row, count in enumerate(counts_B):
            path = range(count) if paths_BL is None else paths_BL[row][:count]
            self._sequences.commit(row, path)

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Shorten each row to at most lengths_B[b] committed tokens."""
        for row, length in enumerate(lengths_B):
            self._sequences.truncate(row, length)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        self._sequences.select(rows)

    def add_rows(self, count: int) -> None:
        """Add `count` empty rows after the running ones.

        Raises ValueError if the cache was never open for so many, as llama.cpp cannot enlarge it.
        """
        assert self._context is not None, "open() comes before add_rows()"
        rows = len(self.lengths_B) + count
        if rows * self._capacity > self._context.cells:
            raise ValueError(
                f"{rows} rows of {self._capacity} slots are needed, but the cache has "
                f"{self._context.cells} slots. Open it for all rows first."
            )
        self._sequences.add(count)

    def keep(self, row: int, name: int) -> None:
        """Store a copy of a row's committed cache (see `Target.keep`)."""
        self._sequences.truncate(row, self.lengths_B[row])
        self._kept[name] = self._opened.store(self._sequences.rows[row].ids[0])

    def begin(self, row: int, name: int, length: int) -> None:
        """Fill an empty row with the first `length` tokens that `keep` stored for this name."""
        sequence = self._sequences.rows[row].ids[0]
        self._opened.restore(self._kept[name], sequence)
        self._opened.remove(sequence, length)
        self._sequences.fill(row, length)

    def forget(self) -> None:
        """Drop all caches that `keep` stored."""
        self._kept = {}

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., C) of token ids."""
        return F.embedding(ids, self._embedding_VC)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states, with the file's weights in float32."""
        return F.linear(hidden, self._head_VC)

    @cached_property
    def _embedding_VC(self) -> Tensor:
        return self._file.tensor("token_embd.weight")

    @cached_property
    def _head_VC(self) -> Tensor:
        tied = "output.weight" not in self._file.shapes()
        return self._embedding_VC if tied else self._file.tensor("output.weight")

    def _begin(
        self,
        tokens_of: Mapping[int, Sequence[int]],
        parents_of: Mapping[int, Sequence[int]] | None,
    ) -> tuple[list[NewToken], list[tuple[int, int]]]:
        """Return the batch of some rows' new tokens, and the row and node of each of its tokens.

        Raises ValueError if the cache has fewer slots than the rows need, and UserError for a tree
        that exceeds what llama.cpp takes.
        """
        lengths_B = self.lengths_B
        for row, tokens in tokens_of.items():
            if lengths_B[row] + len(tokens) > self._capacity:
                raise ValueError(
                    f"{lengths_B[row] + len(tokens)} slots are needed, but the cache was opened "
                    f"for {self._capacity}. Open it with a larger capacity."
                )
        chain = [[0]]
        below_of = {
            row: chain * len(tokens) if parents_of is None else leaves_below(parents_of[row])
            for row, tokens in tokens_of.items()
        }
        if parents_of is not None and (wide := sum(map(len, below_of.values()))) > BATCH:
            raise UserError(
                f"the trees of a round have {wide} nodes together, and this backend takes at most "
                f"{BATCH}. Use a smaller batch, or trees of fewer nodes."
            )
        sequences_of = self._sequences.begin(below_of)
        batch, places = [], []
        for row, tokens in tokens_of.items():
            nodes = range(len(tokens)) if parents_of is None else depths_of(parents_of[row])
            for node, (token, depth) in enumerate(zip(tokens, nodes, strict=True)):
                if parents_of is not None and parents_of[row][node] == NO_NODE:
                    continue
                sequences = sequences_of[row][node]
                batch.append(NewToken(token, lengths_B[row] + depth, sequences))
                places.append((row, node))
        return batch, places

    @property
    def _opened(self) -> Context:
        assert self._context is not None, "open() comes first"
        return self._context

    def _remove(self, sequence: int, start: int) -> None:
        self._opened.remove(sequence, start)

    def _copy(self, source: int, destination: int, start: int, end: int) -> None:
        self._opened.copy(source, destination, start, end)


def _parts(batch: Sequence[NewToken], size: int) -> Iterator[Sequence[NewToken]]:
    """Yield a batch in parts of at most `size` tokens."""
    for start in range(0, len(batch), size):
        yield batch[start : start + size]


def coarsest(types: Sequence[str], cache_dtype: str) -> str:
    """Return the name of the coarsest numbers that a model computes with.

    types: of the weights' matrices, such as Q4_1, the most common first. It is that type for
    quantised weights, such as "q4_1", and otherwise the coarser of weights and cache.
    """
    quantised = [kind for kind in types if kind not in _PLAIN]
    if quantised:
        return quantised[0].lower()
    halves = [_PLAIN[kind] for kind in types if kind in ("F16", "BF16")]
    return halves[0] if halves else cache_dtype
