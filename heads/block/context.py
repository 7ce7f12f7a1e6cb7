"""The stored keys and values of the texts that a block drafter continues.

Rows have lengths of their own. Numbers past a row's length are stale, and no block sees them.

Shapes: B rows, N new tokens, T slots, X channels of all taps, G key/value heads, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import devices
from heads.block.model import BlockHead, KeysValues
from heads.layers import Rope, rope_at


class StoredContext:
    """Keys and values of every layer, for the tokens of each row whose states are known."""

    def __init__(self, head: BlockHead, rows: int, capacity: int) -> None:
        """Start empty rows of at most `capacity` tokens, with room for a block after them."""
        config, weight = head.config, head.norm.weight
        slots = capacity + config.block_size
        shape = (config.num_layers, 2, rows, config.num_kv_heads, slots, config.head_dim)
        self._head = head
        # zeros, because 0 times NaN is NaN even for a hidden slot
        self._cache_L2BGTD = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.lengths_B = [0] * rows
        self.tables: Rope = head.rope_tables(slots)

    def extend(self, taps_BNX: Tensor | None, counts_B: Sequence[int]) -> None:
        """Add rows of counts_B[b] tokens, whose states these are; None if no row has any."""
        slots = self._cache_L2BGTD.shape[4] - self._head.config.block_size
        more = StoredContext(self._head, len(counts_B), slots)
        if taps_BNX is not None:
            more.append(taps_BNX, counts_B)
        self._cache_L2BGTD = torch.cat((self._cache_L2BGTD, more._cache_L2BGTD), 2)
        self.lengths_B = [*self.lengths_B, *more.lengths_B]

    def append(self, taps_BNX: Tensor, counts_B: Sequence[int]) -> None:
        """Add the first counts_B[b] tokens of each row, whose states these are."""
        N = max(counts_B)
        offsets_N = torch.arange(N, device=taps_BNX.device)
        slots_BN = devices.tensor(self.lengths_B, taps_BNX.device)[:, None] + offsets_N
        rope = rope_at(self.tables, slots_BN)
        B, G, D = len(slots_BN), self._head.config.num_kv_heads, self._head.config.head_dim
        index = slots_BN[:, None, :, None].expand(B, G, N, D)
        for layer, pair in enumerate(self._head.context(taps_BNX[:, :N], rope)):
            for part, values_BGND in enumerate(pair):
                self._cache_L2BGTD[layer, part].scatter_(2, index, values_BGND)
        self.lengths_B = [a + b for a, b in zip(self.lengths_B, counts_B, strict=True)]

    def visible(self) -> Tensor:
        """Return the tokens that blocks see, (B, 1, T): all slots up to the longest row's end."""
        T, device = max(self.lengths_B), self._cache_L2BGTD.device
        lengths_B11 = devices.tensor(self.lengths_B, device)[:, None, None]
        return torch.arange(T, device=device) < lengths_B11

    def join(self, layer: int, block: KeysValues) -> KeysValues:
        """Return views of a layer's keys and values up to a block, which is written after them.

        The block's slots are the same in all rows, and those of later tokens are written over it.
        """
        T, S = max(self.lengths_B), block[0].shape[2]
        for part, values_BGSD in enumerate(block):
            self._cache_L2BGTD[layer, part, :, :, T : T + S] = values_BGSD
        keys, values = self._cache_L2BGTD[layer, :, :, :, : T + S]
        return keys, values

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Shorten each row to at most lengths_B[b] tokens."""
        self.lengths_B = [min(pair) for pair in zip(self.lengths_B, lengths_B, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        # a list as an index would wait for the device
        places_B = devices.tensor(list(rows), self._cache_L2BGTD.device)
        self._cache_L2BGTD = self._cache_L2BGTD.index_select(2, places_B)
        self.lengths_B = [self.lengths_B[row] for row in rows]
