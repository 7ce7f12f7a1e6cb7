"""The model that verifies drafts, and its calls outside Python.

Shapes: B rows, N new tokens (nodes), L tokens of an accepted path, V vocabulary, C hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from decoding.interfaces.chooser import Chooser, Draws
from decoding.interfaces.proposal import Outcome, Proposal

Tokens = Sequence[Sequence[int]]  # token ids of every row

# maps a depth, the probabilities of the rows' tokens there and the draft lengths to new lengths
Shorten = Callable[[int, Sequence[float], list[int]], list[int]]


@dataclass(frozen=True, slots=True)
class ChainChoice:
    """How the tokens of a chain are chosen, and where the chain ends (see `Target.chain_call`)."""

    vocab_size: int  # tokens below it may be drafted
    draws: Draws = field(default_factory=Draws)
    shorten: Shorten | None = None  # called after every step; None: the lengths are fixed


# drafts chains, see `Target.chain_call`
ChainCall = Callable[
    [Tokens, Sequence[int], list[int], ChainChoice], tuple[Tensor, Tensor | None, list[int]]
]

# verifies chains, see `Target.verify_call`
VerifyCall = Callable[[Tensor, Proposal | None, Chooser], tuple[Outcome, tuple[float, float]]]


# dtypes in which forwards of different widths give the same tokens but at near ties
EXACT = ("float64", "float32")


def rounds_coarsely(dtype: str, backend: str) -> bool:
    """Return whether drafted text may differ from plain text at more than near ties.

    It may where a coarse dtype's roundings depend on the width of a forward. In the fused step they
    do not: there even bfloat16 gives the same tokens. backend: as in `Target`.
    """
    return dtype not in EXACT and not backend.endswith(" fused")


def precision(target: "Target") -> str:
    """Return the name of the coarsest numbers that a target computes with.

    It is its dtype, or for quantised weights their type, such as "q4_1".
    """
    return getattr(target, "precision", target.dtype)


class Target(Protocol):
    """A causal LM with a KV cache whose rows have separate lengths.

    `forward` changes no row's committed tokens; `commit` then keeps the tip and the accepted nodes.
    """

    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a row, prompt and output together."""

    @property
    def lengths_B(self) -> list[int]:
        """Number of committed tokens in the cache of each row."""

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """Start `batch_size` empty rows of `capacity` cache slots each (default: max_length)."""

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return (logits_BNV, hidden_BNC) of new tokens after each row's committed ones.

        parents_BN[b, n] is the index of node n's parent among the new tokens, -1 for the last
        committed token, and always less than n; None is a chain. Rows with fewer tokens are padded
        on the right with any id, and commit fewer.

        hidden_BNC is the state after the final norm. With taps it is (B, N, len(taps) * C): the
        hidden states at these layers, concatenated in this order. Layers are numbered as in
        Hugging Face's `hidden_states`: 0 is the output of the embedding, k the state after k
        layers, and k = num_layers the state after the final norm. Raises UserError for a layer
        that does not exist or is named twice.
        """

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        """Return the hidden states of `forward` without computing logits, for prefill."""

    def chain_call(self, num_tokens: int) -> ChainCall | None:
        """Return a function that drafts chains outside Python, None if there is none.

        num_tokens: new tokens of its first step in all rows, padding included. The function takes
        (unseen_B, tips_B, counts_B, choice). It reads each row's unseen tokens, drafts counts_B[b]
        tokens, or as many as `choice.shorten` leaves, and commits all tokens but the last drafted
        one. It returns the tips and the drafted tokens (B, 1 + N), padded on the right, the
        distributions (B, N, V) that they were sampled from, None at temperature 0, and the draft
        lengths. Greedy tokens and the cache have the same bits as with a `forward` for each step.
        """

    def verify_call(self, chooser: Chooser) -> VerifyCall | None:
        """Return a function that verifies chains outside Python by the chooser's rule, or None.

        The function takes (logits_BNV, proposal, chooser). It returns the outcome, and the largest
        of the tested logits and the largest probability under the drafter of a tested token, each
        NaN if one is.
        """

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        """Commit the first counts_B[b] nodes of the path paths_BL[b], and drop the others.

        paths_BL: indices of the last forward's tokens; None is the chain 0, 1, 2, ...
        """

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Shorten each row to at most lengths_B[b] committed tokens."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""

    def add_rows(self, count: int) -> None:
        """Add `count` empty rows after the running ones, with as many slots each."""

    def keep(self, row: int, name: int) -> None:
        """Store a copy of a row's committed cache under a name."""

    def begin(self, row: int, name: int, length: int) -> None:
        """Fill an empty row with the first `length` tokens that `keep` stored under this name."""

    def forget(self) -> None:
        """Drop all caches that `keep` stored."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., C) of token ids."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states after the final norm."""
