"""An EAGLE head with the keys and values of the verified text, and of a draft.

Slot t of a row holds element t: the token at t, and the state before it, which is the target's at t
- 1. The elements before the tip's are computed once, from states of the target. A draft begins with
the tip's element and writes its nodes to the slots after the verified ones; the state that a node
gives to its children is stored one slot further. So a chain can be continued before its tokens are
verified: the states that it computed stand until those of the target replace them. The first token
of a text has no state before it but zeros, and only drafts from a text of one token see its
element.

Shapes: B rows, W elements, P new nodes of a draft, N nodes of a draft, T slots, H hidden size, Q
query heads, K key/value heads, D head size, I inputs of the attention, V vocabulary of the target.
A cache has 1 layer, with 2 parts, its keys and values.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Tokens
from decoding.models.cache import visible_slots
from decoding.models.draft_vocabulary import spread
from decoding.models.native.attention import grouped_attention
from heads.eagle.model import EagleHead
from heads.layers import Rope, rope_at


class HeldRows(NamedTuple):
    """Rows of a cache that others are opened beside: states, keys and values, and three counts."""

    tensors: tuple[Tensor, Tensor]
    counts: tuple[list[int], list[int], list[int]]


class HeadCache:
    """An EAGLE head over rows of different lengths."""

    num_layers = 1

    def __init__(self, head: EagleHead, name: str) -> None:
        self.head, self.name = head, name
        self.num_parameters, self.vocab_size = head.num_parameters, head.config.vocab_size
        self.device, self.dtype = head.fc.weight.device, head.fc.weight.dtype
        self.embed: Callable[[Tensor], Tensor] = lambda ids: torch.empty(0)  # the target's
        self.lm_head: Callable[[Tensor], Tensor] = self.embed  # the head's, or the target's
        if not head.config.predicts_states:
            self.lm_head = head.lm_head
        self.lengths_B: list[int] = []  # slots of verified text, that of the first token included
        self._known_B: list[int] = []  # states of the target
        self._starts_B: list[int] = []  # slots before the draft
        self._states_BTH = self._cache_12BKTD = torch.empty(0)
        self._rope: Rope = (torch.empty(0), torch.empty(0))
        # of the draft: parents of its nodes, -1 for the first; `_starts_B`; whether its text has no
        # states, so that it sees its first token's element
        self._parents_BN = self._starts_B1 = self._sees_first_B1 = torch.empty(0)

    def open(self, rows: int, capacity: int) -> None:
        """Start empty rows with `capacity` slots each."""
        config = self.head.config
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        # Zeros, not empty: masked slots are multiplied by weight 0, and 0 x NaN is NaN. One more
        # slot takes the padding.
        shape = (1, 2, rows, config.num_kv_heads, capacity + 1, config.head_dim)
        self._cache_12BKTD = empty.new_zeros(shape)
        self._states_BTH = empty.new_zeros(rows, capacity + 1, config.hidden_size)
        self._rope = self.head.rope_tables(capacity + 1)
        self.lengths_B, self._known_B = [1] * rows, [0] * rows
        self._begin([0] * rows)

    def open_more(self, rows: int) -> HeldRows:
        """Start empty rows alone, with as many slots; return the running ones for `put_before`."""
        held = HeldRows(
            (self._states_BTH, self._cache_12BKTD),
            (self.lengths_B, self._known_B, self._starts_B),
        )
        self.open(rows, self._states_BTH.shape[1] - 1)
        return held

    def put_before(self, held: HeldRows) -> None:
        """Place rows that `open_more` returned before the others; no draft is open then."""
        states_BTH, cache_12BKTD = held.tensors
        self._states_BTH = torch.cat((states_BTH, self._states_BTH))
        self._cache_12BKTD = torch.cat((cache_12BKTD, self._cache_12BKTD), 2)
        counts = self.lengths_B, self._known_B, self._starts_B
        self.lengths_B, self._known_B, starts_B = (
            [*old, *new] for old, new in zip(held.counts, counts, strict=True)
        )
        self._begin(starts_B)

    def add_states(self, taps_BWC: Tensor, counts_B: Sequence[int]) -> None:
        """Store the target's states at the next counts_B[b] tokens of each row."""
        states_BWH = self.head.fuse(taps_BWC.to(self.device, self.dtype))
        firsts_B = [known + 1 for known in self._known_B]
        self._write(self._states_BTH, states_BWH, self._slots(firsts_B, counts_B))
        self._known_B = [known + new for known, new in zip(self._known_B, counts_B, strict=True)]

    def read(self, sequences_B: Tokens) -> None:
        """Compute the missing elements before the tips' of these texts.

        These are the elements that have states of the target.
        """
        lengths_B = self.lengths_B
        ends_B = [
            max(min(len(text) - 1, known + 1), length)
            for text, known, length in zip(sequences_B, self._known_B, lengths_B, strict=True)
        ]
        counts_B = [end - length for end, length in zip(ends_B, lengths_B)]
        width = max(counts_B)
        if width == 0:
            return
        new_B = [text[a:b] for text, a, b in zip(sequences_B, lengths_B, ends_B)]
        padded = [[*new, *[0] * (width - len(new))] for new in new_B]
        slots_BW = self._slots(lengths_B, counts_B)
        states_BWH = self._at(self._states_BTH, slots_BW)
        self._store(devices.tensor(padded, self.device), states_BWH, slots_BW, slots_BW)
        self.lengths_B = ends_B

    def start(self, sequences_B: Tokens) -> Tensor:
        """Begin drafts after these texts; return the logits (B, V) of their next tokens.

        Tokens after the text's tip, whose states the target has not computed, must be those of the
        row's last draft, a chain, which then continues from the state that it computed.
        """
        return self.extend(self._begin_after(sequences_B))[:, 0]

    def extend(self, tokens_B1: Tensor) -> Tensor:
        """Add a node after the draft's last one; return the logits (B, 1, V) of its next token."""
        return self.run(tokens_B1, torch.full_like(tokens_B1, self.num_nodes - 1))

    def draft_in_one_pass(self, sequences_B: Tokens, count: int) -> Tensor:
        """Draft `count` tokens after these texts; return their logits (B, count, V)."""
        return self._run_masked(self._begin_after(sequences_B), count)

    def run(self, tokens_BP: Tensor, parents_BP: Tensor) -> Tensor:
        """Add nodes to the draft; return the logits (B, P, V) of their next tokens.

        parents_BP: indices of nodes of the draft, of which the first, 0, is the tip; -1 for it.
        """
        hidden_BPH = self._at(self._states_BTH, self._starts_B1 + parents_BP + 1)
        return self._run(tokens_BP, hidden_BPH, parents_BP)

    def _run(self, tokens_BP: Tensor, hidden_BPH: Tensor, parents_BP: Tensor) -> Tensor:
        """Return `run` for nodes with these states."""
        P, config = tokens_BP.shape[1], self.head.config
        self._parents_BN = torch.cat((self._parents_BN, parents_BP), 1)
        N = self._parents_BN.shape[1]
        end = max(self._starts_B) + N
        positions_BN, slots_BN, visible_BNT = visible_slots(
            self._starts_B1[:, 0],
            torch.arange(N, device=self.device),
            torch.arange(end, device=self.device),
            self._parents_BN,
        )
        visible_BNT[:, :, 0] &= self._sees_first_B1
        slots_BP = slots_BN[:, -P:]
        inputs, residual_BPH, rope = self._store(
            tokens_BP, hidden_BPH, positions_BN[:, -P:], slots_BP
        )
        q_BPQD = self.head.midlayer.self_attn.queries(inputs, rope)
        mask = torch.zeros(1, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill(visible_BNT[:, None, -P:].logical_not(), float("-inf"))
        mask = mask.repeat(1, 1, config.num_heads // config.num_kv_heads, 1)
        keys_BKTD, values_BKTD = self._cache_12BKTD[0, :, :, :, :end]
        mixed_BPQD = grouped_attention(q_BPQD, keys_BKTD, values_BKTD, mask)
        features_BPH, outputs_BPH = self.head.step(residual_BPH, mixed_BPQD)
        self._write(self._states_BTH, outputs_BPH, slots_BP + 1)
        return self._spread(self.lm_head(features_BPH))

    def _spread(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary."""
        return spread(logits, self.head.token_ids_V, self.vocab_size, float("-inf"))

    def time_nodes(self, count: int) -> None:
        """Run `count` nodes for timing, after which no draft is open."""
        ids = torch.zeros(len(self.lengths_B), count, dtype=torch.long, device=self.device)
        self._begin(self._starts_B)
        if count == 1:
            self.extend(ids)
        else:
            self.run(ids, ids - 1)
        self._begin(self._starts_B)

    def time_pass(self, count: int) -> None:
        """Run a pass for timing, after which no draft is open."""
        tips_B1 = torch.zeros(len(self.lengths_B), 1, dtype=torch.long, device=self.device)
        self._begin(self._starts_B)
        self._run_masked(tips_B1, count)
        self._begin(self._starts_B)

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Keep the states of at most lengths_B[b] tokens, and the elements before the last one."""
        pairs = list(zip(self._known_B, lengths_B, strict=True))
        self._known_B = [min(known, length) for known, length in pairs]
        self.lengths_B = [
            min(length, max(known, 1)) for length, known in zip(self.lengths_B, self._known_B)
        ]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.lengths_B = [self.lengths_B[row] for row in rows]
        self._known_B = [self._known_B[row] for row in rows]
        kept_B = devices.tensor(list(rows), self.device)
        self._states_BTH = self._states_BTH[kept_B]
        self._cache_12BKTD = self._cache_12BKTD[:, :, kept_B]
        self._begin([self._starts_B[row] for row in rows])

    def chain_call(self, num_tokens: int) -> None:
        """Return None: chains are drafted step by step."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the draft."""
        return self._parents_BN.shape[1]

    def _run_masked(self, tips_B1: Tensor, count: int) -> Tensor:
        """Add the tips and mask elements to the draft; return the logits (B, count, V)."""
        masks_BM = tips_B1.new_full((1, 1), self.head.config.mask_token_id)
        masks_BM = masks_BM.expand(len(tips_B1), count - 1)
        parents_BN = torch.arange(-1, count - 1, device=self.device).expand(len(tips_B1), count)
        states_BMH = self.head.mask_states(count - 1).expand(*masks_BM.shape, -1)
        hidden_BNH = torch.cat((self._at(self._states_BTH, self._starts_B1), states_BMH), 1)
        return self._run(torch.cat((tips_B1, masks_BM), 1), hidden_BNH, parents_BN)

    def _begin_after(self, sequences_B: Tokens) -> Tensor:
        """Begin drafts after these texts; return the tips (B, 1)."""
        self.read(sequences_B)
        self._begin([len(text) - 1 for text in sequences_B])
        return devices.tensor([text[-1:] for text in sequences_B], self.device)

    def _begin(self, starts_B: list[int]) -> None:
        """Begin drafts without nodes after these numbers of slots."""
        self._starts_B = starts_B
        self._starts_B1 = devices.tensor(starts_B, self.device)[:, None]
        self._sees_first_B1 = devices.tensor([[n == 0] for n in self._known_B], self.device)
        self._parents_BN = torch.empty(len(starts_B), 0, dtype=torch.long, device=self.device)

    def _store(
        self, tokens_BW: Tensor, hidden_BWH: Tensor, positions_BW: Tensor, slots_BW: Tensor
    ) -> tuple[Tensor, Tensor, Rope]:
        """Write keys and values of elements to their slots.

        Returns the inputs (B, W, I) of their projections, their residuals (B, W, H) and rotations.
        """
        layer, rope = self.head.midlayer, rope_at(self._rope, positions_BW)
        embedded_BWH = self.embed(tokens_BW).to(self.device, self.dtype)
        inputs, residual_BWH = self.head.join(embedded_BWH, hidden_BWH)
        keys_BWKD, values_BWKD = layer.self_attn.keys_values(inputs, rope)
        rows_B1 = torch.arange(len(slots_BW), device=self.device)[:, None]
        for cached_BKTD, new_BWKD in zip(self._cache_12BKTD[0], (keys_BWKD, values_BWKD)):
            cached_BKTD[rows_B1, :, slots_BW] = new_BWKD
        return inputs, residual_BWH, rope

    def _slots(self, firsts_B: Sequence[int], counts_B: Sequence[int]) -> Tensor:
        """Return counts_B[b] slots (B, W) from each row's first on; padding is the last slot."""
        # Other padding would be written over the states of a draft that continues.
        last, width = self._states_BTH.shape[1] - 1, max(counts_B)
        slots = [
            [*range(first, first + count), *[last] * (width - count)]
            for first, count in zip(firsts_B, counts_B, strict=True)
        ]
        return devices.tensor(slots, self.device, torch.long)

    def _write(self, states_BTH: Tensor, new_BWH: Tensor, slots_BW: Tensor) -> None:
        rows_B1 = torch.arange(len(slots_BW), device=self.device)[:, None]
        states_BTH[rows_B1, slots_BW] = new_BWH

    def _at(self, values_BTH: Tensor, places_BP: Tensor) -> Tensor:
        """Return the values (B, P, H) at these places of each row."""
        return values_BTH.gather(1, places_BP[:, :, None].expand(-1, -1, values_BTH.shape[2]))
