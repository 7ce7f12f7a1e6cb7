"""Cache slots: where each token is written, what it may attend to, how accepted paths are kept.

Rows of a batch have different lengths. A forward over N new tokens of row b writes slots `length_b
.. length_b + N - 1`. Nothing is committed until `commit`: a rejected token is dropped by not
counting it. Slots past the length hold stale numbers that every mask hides.

Shapes: B rows, N new tokens (nodes), L tokens of a path, T slots, H key/value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import ancestors

BAND_ROWS = 64  # widest chain forward whose mask is a view of one table instead of a fresh tensor


@dataclass(slots=True)
class ForwardPlan:
    """Slots and mask of one forward, made once and used by every layer."""

    # slots read: the longest row's length + N
    end: int
    # first slot written, if it is equal in all rows
    start: int | None
    # slots written, if rows differ
    slots_BN: Tensor | None
    # rope positions, if they are not start .. start + N - 1
    positions_BN: Tensor | None
    # additive, (1 or B, 1, N, end); None: everything is visible, or `causal`
    mask: Tensor | None
    # plain causal attention over an empty cache
    causal: bool


class Slots:
    """The rows' lengths and the plans made from them, without keys or values."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.lengths_B: list[int] = []
        self.capacity = 0
        self._band: Tensor | None = None
        self._band_base = 0  # longest start that the band supports

    def open(self, batch_size: int, capacity: int) -> None:
        """Start `batch_size` empty rows of at most `capacity` slots."""
        self.lengths_B = [0] * batch_size
        self.capacity = capacity

    def end_of(self, num_tokens: int) -> int:
        """Return the slots that a forward over `num_tokens` reads.

        Raises ValueError if the cache has fewer.
        """
        end = max(self.lengths_B) + num_tokens
        if end > self.capacity:
            raise ValueError(
                f"{end} slots are needed, but the cache was opened for {self.capacity}"
            )
        return end

    def plan(self, num_tokens: int, parents_BN: Tensor | None) -> ForwardPlan:
        """Return the plan of a forward over `num_tokens` new tokens a row.

        parents_BN: index of each node's parent among the new tokens, -1 for the committed tip;
        parents precede their children. None is a chain.
        """
        lengths_B, N = self.lengths_B, num_tokens
        end = self.end_of(num_tokens)
        start = lengths_B[0] if min(lengths_B) == max(lengths_B) else None
        if parents_BN is not None:
            return self._tree_plan(parents_BN, start, end)
        if start is not None:
            if N == 1:
                return ForwardPlan(end, start, None, None, None, False)
            if start == 0:
                return ForwardPlan(end, 0, None, None, None, True)
            if N <= BAND_ROWS:
                return ForwardPlan(end, start, None, None, self._band_mask(start, N), False)
        lengths = devices.tensor(lengths_B, self.device)
        slots_BN = lengths[:, None] + torch.arange(N, device=self.device)
        visible_BNT = torch.arange(end, device=self.device) <= slots_BN[:, :, None]
        if start is not None:
            return ForwardPlan(end, start, None, None, self._additive(visible_BNT[:1]), False)
        return ForwardPlan(end, None, slots_BN, slots_BN, self._additive(visible_BNT), False)

    def _tree_plan(self, parents_BN: Tensor, start: int | None, end: int) -> ForwardPlan:
        B, N = parents_BN.shape
        lengths_B = devices.tensor(self.lengths_B, self.device)
        slots_BN = lengths_B[:, None] + torch.arange(N, device=self.device)
        ancestors_BNN = ancestors(parents_BN)
        visible_BNT = (torch.arange(end, device=self.device) < lengths_B[:, None, None]).repeat(
            1, N, 1
        )
        visible_BNT.scatter_(2, slots_BN[:, None, :].expand(B, N, N), ancestors_BNN)
        positions_BN = lengths_B[:, None] + ancestors_BNN.sum(-1) - 1
        return ForwardPlan(
            end,
            start,
            None if start is not None else slots_BN,
            positions_BN,
            self._additive(visible_BNT),
            False,
        )

    def _additive(self, visible_BNT: Tensor) -> Tensor:
        return torch.zeros(visible_BNT.shape, dtype=self.dtype, device=self.device).masked_fill_(
            visible_BNT.logical_not(), float("-inf")
        )[:, None]

    def _band_mask(self, start: int, num_tokens: int) -> Tensor:
        """Return a mask in which row i attends to columns <= start + i.

        It is a shifted view of a table whose row i attends to columns <= base + i.
        """
        if self._band is None or self._band_base < start:
            self._band_base = max(self.capacity, start)
            rows = torch.arange(BAND_ROWS, device=self.device)[:, None]
            columns = torch.arange(
                self._band_base + self._band_base + BAND_ROWS, device=self.device
            )
            with torch.inference_mode(False):
                band = torch.zeros(BAND_ROWS, len(columns), dtype=self.dtype, device=self.device)
                self._band = band.masked_fill_(columns > rows + self._band_base, float("-inf"))
        shift = self._band_base - start
        return self._band[None, None, :num_tokens, shift : shift + start + num_tokens]

    def commit(
        self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int], move: "Move"
    ) -> None:
        """Keep the first `counts_B` nodes of each row's path; None is the chain 0, 1, 2, ...

        A chain already lies in the right slots and only changes the lengths. Other paths move cache
        rows by `move(src_BL, dst_BL)`, where slots past a row's count map to themselves.
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
        """Shorten rows to at most `lengths_B`."""
        self.lengths_B = [min(old, new) for old, new in zip(self.lengths_B, lengths_B, strict=True)]

    def select(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Keep `rows` in this order; return the (from, to) pairs of rows whose cache must move."""
        self.lengths_B = [self.lengths_B[row] for row in rows]
        return [(row, i) for i, row in enumerate(rows) if row != i]


Move = Callable[[Tensor, Tensor], None]
