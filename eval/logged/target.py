"""A target that repeats logged outputs, for the decoding loop.

At every accepted token its likeliest token is the logged one, so greedy verification accepts and
emits as the target did that wrote the log. Rows are the texts in their order. Logits past the end
of a text, and of rejected drafts, belong to tokens that are never emitted.

Shapes: B rows, N new tokens, L tokens of a path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.interfaces import ChainCall, Chooser, VerifyCall, ancestors


class LoggedTarget:
    """Target of a batch of texts, without a model.

    texts: prompt and output of each row. vocab_size: size of the target's vocabulary. width:
    maximum number of drafted tokens in a round.
    """

    backend, dtype = "log", "float32"
    hidden_size, num_layers, num_parameters = 1, 0, 0

    def __init__(
        self, texts: Sequence[Sequence[int]], vocab_size: int, width: int, name: str = "log"
    ) -> None:
        self.name, self.vocab_size, self.device = name, vocab_size, torch.device("cpu")
        self.max_length = max(map(len, texts)) + 2 * (width + 1)
        self._texts = texts
        self._rows: list[int] = []
        self.lengths_B: list[int] = []

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """Start the first `batch_size` texts; the log has no cache that could be full."""
        self._rows, self.lengths_B = list(range(batch_size)), [0] * batch_size

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return logits that are 1 at the logged token after each node, and states of zeros."""
        B, N = tokens_BN.shape
        if parents_BN is None:
            depths = [list(range(N))] * B
        else:
            depths = (ancestors(parents_BN).sum(-1) - 1).tolist()
        next_BN = [
            [self._token(row, length + 1 + depth) for depth in depths_N]
            for row, length, depths_N in zip(self._rows, self.lengths_B, depths, strict=True)
        ]
        logits_BNV = torch.zeros(B, N, self.vocab_size)
        logits_BNV.scatter_(2, torch.tensor(next_BN)[:, :, None], 1.0)
        return logits_BNV, torch.zeros(B, N, 1)

    def _token(self, row: int, position: int) -> int:
        text = self._texts[row]
        return text[position] if position < len(text) else 0

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        """Return states of zeros."""
        return torch.zeros(*tokens_BN.shape, 1)

    def chain_call(self, num_tokens: int) -> ChainCall | None:
        """Return None."""
        return None

    def verify_call(self, chooser: Chooser) -> VerifyCall | None:
        """Return None."""
        return None

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        """Count the committed tokens."""
        self.lengths_B = [old + new for old, new in zip(self.lengths_B, counts_B, strict=True)]

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Shorten each row to at most lengths_B[b] committed tokens."""
        self.lengths_B = [min(old, new) for old, new in zip(self.lengths_B, lengths_B, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._rows = [self._rows[row] for row in rows]
        self.lengths_B = [self.lengths_B[row] for row in rows]

    def add_rows(self, count: int) -> None:
        """Start the next `count` texts after the running ones."""
        first = 1 + max(self._rows, default=-1)
        self._rows = [*self._rows, *range(first, first + count)]
        self.lengths_B = [*self.lengths_B, *[0] * count]

    def keep(self, row: int, name: int) -> None:
        """Store nothing, as a log has no cache."""

    def begin(self, row: int, name: int, length: int) -> None:
        """Set the length of a row."""
        self.lengths_B[row] = length

    def forget(self) -> None:
        """Do nothing, as a log has no cache."""

    def embed(self, ids: Tensor) -> Tensor:
        """Raise ValueError: a log has no model."""
        raise ValueError("a log of a target has no embedding")

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Raise ValueError: a log has no model."""
        raise ValueError("a log of a target has no lm_head")
