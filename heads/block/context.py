"""The stored keys and values of the texts that a block drafter continues.

Rows have lengths of their own. Numbers past a row's length are stale, and no block sees them.
After rounds without a draft the states of new tokens may wait until a block is drafted, and are
then projected together, so such rounds cost nothing but memory.

Shapes: B rows, N new tokens, T slots, X channels of all taps, G key/value heads, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decoding import devices
from heads.block.model import BlockHead, KeysValues
from heads.layers import Rope, rope_at

MOST_WAITING = 64  # tokens of a row whose states wait


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
        self.lengths_B = [0] * rows  # with the tokens that wait
        self._waiting: list[tuple[Tensor, list[int]]] = []  # states (B, N, X), tokens of each row
        self.tables: Rope = head.rope_tables(slots)

    def extend(self, taps_BNX: Tensor | None, counts_B: Sequence[int]) -> None:
        """Add rows of counts_B[b] tokens, whose states these are; None if no row has any."""
        slots = self._cache_L2BGTD.shape[4] - self._head.config.block_size
        more = StoredContext(self._head, len(counts_B), slots)
        if taps_BNX is not None:
            more.append(taps_BNX, counts_B)
        self._store()
        self._cache_L2BGTD = torch.cat((self._cache_L2BGTD, more._cache_L2BGTD), 2)
        self.lengths_B = [*self.lengths_B, *more.lengths_B]

    def append(self, taps_BNX: Tensor, counts_B: Sequence[int], wait: bool = False) -> None:
        """Add the first counts_B[b] tokens of each row, whose states these are.

        wait: whether they may be projected later.
        """
        self.lengths_B = [a + b for a, b in zip(self.lengths_B, counts_B, strict=True)]
        # the target may reuse the memory of its states in the next forward
        self._waiting.append((taps_BNX.clone() if wait else taps_BNX, [*counts_B]))
        if not wait or max(self._counts_B()) >= MOST_WAITING:
            self._store()

    def _counts_B(self) -> list[int]:
        """Return the number of tokens of each row that wait."""
        return [sum(counts) for counts in zip(*(counts_B for _, counts_B in self._waiting))]

    def _store(self) -> None:
        """Project the states that wait."""
        if not self._waiting:
            return
        counts_B, last = self._counts_B(), self._cache_L2BGTD.shape[4] - 1
        taps_BNX = self._waiting[0][0][:, : max(counts_B)]
        if len(self._waiting) > 1:
            rows = range(len(counts_B))
            texts = [[taps[row, : counts[row]] for taps, counts in self._waiting] for row in rows]
            taps_BNX = pad_sequence([torch.cat(text) for text in texts], batch_first=True)
        self._waiting = []
        first_B = [a - b for a, b in zip(self.lengths_B, counts_B, strict=True)]
        offsets_N = torch.arange(taps_BNX.shape[1], device=taps_BNX.device)
        slots_BN = devices.tensor(first_B, taps_BNX.device)[:, None] + offsets_N
        slots_BN = slots_BN.clamp(max=last)  # padding may reach past the end
        rope = rope_at(self.tables, slots_BN)
        G, D = self._head.config.num_kv_heads, self._head.config.head_dim
        index = slots_BN[:, None, :, None].expand(-1, G, -1, D)
        for layer, pair in enumerate(self._head.context(taps_BNX, rope)):
            for part, values_BGND in enumerate(pair):
                self._cache_L2BGTD[layer, part].scatter_(2, index, values_BGND)

    def stored(self) -> Tensor:
        """Return the keys and values, with room for a block after each row's tokens."""
        self._store()
        return self._cache_L2BGTD

    def visible(self) -> Tensor:
        """Return the tokens that blocks see, (B, 1, T): all slots up to the longest row's end."""
        T, device = max(self.lengths_B), self._cache_L2BGTD.device
        lengths_B11 = devices.tensor(self.lengths_B, device)[:, None, None]
        return torch.arange(T, device=device) < lengths_B11

    def join(self, layer: int, block: KeysValues) -> KeysValues:
        """Return views of a layer's keys and values up to a block, which is written after them.

        The block's slots are the same in all rows, and those of later tokens are written over it.
        """
        self._store()
        T, S = max(self.lengths_B), block[0].shape[2]
        for part, values_BGSD in enumerate(block):
            self._cache_L2BGTD[layer, part, :, :, T : T + S] = values_BGSD
        keys, values = self._cache_L2BGTD[layer, :, :, :, : T + S]
        return keys, values

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Shorten each row to at most lengths_B[b] tokens."""
        shorter_B = [min(pair) for pair in zip(self.lengths_B, lengths_B, strict=True)]
        if shorter_B != self.lengths_B:
            self._store()
        self.lengths_B = shorter_B

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._store()
        # a list as an index would wait for the device
        places_B = devices.tensor(list(rows), self._cache_L2BGTD.device)
        self._cache_L2BGTD = self._cache_L2BGTD.index_select(2, places_B)
        self.lengths_B = [self.lengths_B[row] for row in rows]
