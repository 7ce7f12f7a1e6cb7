"""Cache slots: where each token is written, what it may attend to, how accepted paths are kept.

Rows of a batch have different lengths. A forward over N new tokens of row b writes slots `length_b
.. length_b + N - 1`. Nothing is committed until `commit`: a rejected token is dropped by not
counting it. Slots past the length hold stale numbers that every mask hides.

Shapes: B rows, N new tokens (nodes), L tokens of a path, T slots, H key/value heads, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import ChainCall, Chooser, VerifyCall, ancestors


@dataclass(slots=True)
class ForwardPlan:
    """Slots and mask of one forward, made once and used by every layer."""

    # slots read: the longest row's length + N
    end: int
    # first slot written, if it is equal in all rows
    start: int | None
    # slots written, if rows differ
    slots_BN: Tensor | None = None
    # rope positions, if they are not start .. start + N - 1
    positions_BN: Tensor | None = None
    # additive, (1 or B, 1, N, end); None: everything is visible, or `causal`
    mask: Tensor | None = None
    # plain causal attention over an empty cache
    causal: bool = False


class Slots:
    """The rows' lengths and the plans made from them, without keys or values."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.lengths_B: list[int] = []
        self.capacity = 0

    def open(self, batch_size: int, capacity: int) -> None:
        """Start `batch_size` empty rows of at most `capacity` slots."""
        self.lengths_B = [0] * batch_size
        self.capacity = capacity

    def end_of(self, num_tokens: int) -> int:
        """Return the number of slots that a forward over `num_tokens` new tokens reads.

        Raises ValueError if the cache has fewer.
        """
        end = max(self.lengths_B) + num_tokens
        self.check_end(end)
        return end

    def check_end(self, end: int) -> None:
        """Raise ValueError if the cache has fewer slots than `end`."""
        if end > self.capacity:
            raise ValueError(
                f"{end} slots are needed, but the cache was opened for {self.capacity}. Open it "
                f"with a larger capacity."
            )

    def plan(self, num_tokens: int, parents_BN: Tensor | None) -> ForwardPlan:
        """Return the plan of a forward over `num_tokens` new tokens per row.

        parents_BN: as in `Target.forward`.
        """
        end = self.end_of(num_tokens)
        start = self.lengths_B[0] if min(self.lengths_B) == max(self.lengths_B) else None
        lengths_B = self.lengths_B
        if parents_BN is None and start is not None:
            if num_tokens == 1 or start == 0:
                return ForwardPlan(end, start, causal=num_tokens > 1)
            lengths_B = lengths_B[:1]  # one mask for all rows
        positions_BN, slots_BN, visible_BNT = visible_slots(
            devices.tensor(lengths_B, self.device),
            torch.arange(num_tokens, device=self.device),
            torch.arange(end, device=self.device),
            parents_BN,
        )
        mask = torch.zeros(visible_BNT.shape, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(visible_BNT.logical_not(), float("-inf"))[:, None]
        if start is None:
            return ForwardPlan(end, None, slots_BN, positions_BN, mask)
        return ForwardPlan(end, start, None, None if parents_BN is None else positions_BN, mask)

    def commit(
        self,
        paths_BL: Sequence[Sequence[int]] | None,
        counts_B: Sequence[int],
        move: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Keep the first `counts_B` nodes of each row's path; None is the chain 0, 1, 2, ...

        A chain already lies in the right slots and only changes the lengths. For other paths
        `move(src_BL, dst_BL)` copies the kept slots into place; slots past a row's count map to
        themselves.
        """
        if paths_BL is not None:
            width = max(counts_B)
            moved = [
                list(path[:count]) + list(range(count, width))
                for path, count in zip(paths_BL, counts_B, strict=True)
            ]
            if any(path != list(range(width)) for path in moved):
                lengths_B1 = devices.tensor(self.lengths_B, self.device)[:, None]
                dst_BL = lengths_B1 + torch.arange(width, device=self.device)
                move(lengths_B1 + devices.tensor(moved, self.device), dst_BL)
        self.lengths_B = [
            length + count for length, count in zip(self.lengths_B, counts_B, strict=True)
        ]

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Shorten each row to at most lengths_B[b] committed tokens."""
        self.lengths_B = [min(old, new) for old, new in zip(self.lengths_B, lengths_B, strict=True)]

    def add_rows(self, count: int) -> None:
        """Add `count` empty rows."""
        self.lengths_B = [*self.lengths_B, *[0] * count]

    def select(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Keep `rows` in this order; return the (from, to) pairs of rows whose cache must move."""
        self.lengths_B = [self.lengths_B[row] for row in rows]
        return [(row, i) for i, row in enumerate(rows) if row != i]


class CachedTarget(ABC):
    """The methods of a target that concern only the lengths of its rows and their stored copies."""

    slots: Slots
    # name -> the copy of a row's cache that `keep` stored
    _kept: dict[int, Any]

    @property
    def lengths_B(self) -> list[int]:
        """Number of committed tokens in the cache of each row."""
        return self.slots.lengths_B

    def chain_call(self, num_tokens: int) -> ChainCall | None:
        """Return None: this backend drafts step by step (see `Target.chain_call`)."""
        return None

    def verify_call(self, chooser: Chooser) -> VerifyCall | None:
        """Return None: chains are verified in Python (see `Target.verify_call`)."""
        return None

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        """Commit the accepted nodes (see `Target.commit`)."""
        self.slots.commit(paths_BL, counts_B, self._move)

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Shorten each row to at most lengths_B[b] committed tokens."""
        self.slots.truncate(lengths_B)

    def forget(self) -> None:
        """Drop all caches that `keep` stored."""
        self._kept = {}

    @abstractmethod
    def _move(self, src_BL: Tensor, dst_BL: Tensor) -> None:
        """Copy keys and values from slots `src_BL` to slots `dst_BL`."""


def visible_slots(
    lengths_B: Tensor, offsets_N: Tensor, columns_T: Tensor, parents_BN: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rope positions and slots (B, N) of new tokens, and which slots (B, N, T) they see.

    lengths_B: committed tokens. offsets_N: 0 .. N - 1. columns_T: 0 .. T - 1. A token sees the
    committed tokens, its ancestors and itself.
    """
    slots_BN = lengths_B[:, None] + offsets_N
    if parents_BN is None:
        return slots_BN, slots_BN, columns_T <= slots_BN[:, :, None]
    B, N = slots_BN.shape
    ancestors_BNN = ancestors(parents_BN)
    visible_BNT = (columns_T < lengths_B[:, None, None]).repeat(1, N, 1)
    visible_BNT.scatter_(2, slots_BN[:, None].expand(B, N, N), ancestors_BNN)
    return lengths_B[:, None] + ancestors_BNN.sum(-1) - 1, slots_BN, visible_BNT
