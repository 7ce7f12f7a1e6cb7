"""Drafts from many positions of packed texts at once: EAGLE-3's training-time test.

Element p of a text joins the token at p and the target's states at p - 1; that of its first token
has no states. A draft from tip p attends to elements 1 to p - 1 of its text, whose states are the
target's, and to its own elements, the first of which is p. So the attention of a step is one
softmax over the text's keys and the few keys of each draft (arXiv 2503.01840, section 3.2).

Shapes: R rows, T tokens of a row, F = R T places, M drafts, J elements of a draft, Q query heads, K
key/value heads, D head size, H hidden size, C channels of the taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.eagle.model import EagleHead
from heads.layers import rope_at
from training.data.packing import PackedBatch


class Drafts:
    """Drafts of a batch, which advance by one token together."""

    def __init__(
        self,
        head: EagleHead,
        batch: PackedBatch,
        embedded_RTH: Tensor,
        states_RTC: Tensor,
        tips_M: Tensor,
        depth: int,
    ) -> None:
        """Compute the keys and values of all texts.

        embedded_RTH: embeddings of the batch's tokens. states_RTC: the target's states at the taps.
        tips_M: places of the tips in the flattened batch, all different. depth: maximum number of
        steps.
        """
        self.head, self.tips_M = head, tips_M
        positions_RT, T = batch.positions_RT, batch.ids_RT.shape[1]
        before_RTH = F.pad(head.fuse(states_RTC), (0, 0, 1, 0))[:, :-1]
        before_RTH = before_RTH * (positions_RT > 0)[:, :, None]
        self.hidden_MH = before_RTH.flatten(0, 1)[tips_M]
        self._rope = head.rope_tables(T + depth)
        self._columns_M = tips_M.remainder(T)
        layer, rope = head.midlayer, (self._rope[0][:T], self._rope[1][:T])
        inputs, _ = head.join(embedded_RTH, before_RTH)
        keys_RTKD, values_RTKD = layer.self_attn.keys_values(inputs, rope)
        self._keys_RQTD, self._values_RQTD = (
            self._per_query(each).transpose(1, 2) for each in (keys_RTKD, values_RTKD)
        )
        same_RTT = batch.documents_RT[:, :, None] == batch.documents_RT[:, None]
        seen_RTT = (same_RTT & (positions_RT > 0)[:, None]).tril_(-1)
        mask_RTT = torch.zeros(seen_RTT.shape, dtype=before_RTH.dtype, device=before_RTH.device)
        self._mask_R1TT = mask_RTT.masked_fill_(~seen_RTT, float("-inf"))[:, None]
        self._drafted: list[tuple[Tensor, Tensor]] = []

    def advance(self, embedded_MH: Tensor) -> Tensor:
        """Add an element with this token to each draft; return the lm_head's inputs [M, H]."""
        layer, places_M = self.head.midlayer, self._columns_M + len(self._drafted)
        rope = rope_at(self._rope, places_M)
        inputs, residual_MH = self.head.join(embedded_MH, self.hidden_MH)
        keys_MKD, values_MKD = layer.self_attn.keys_values(inputs, rope)
        self._drafted.append((self._per_query(keys_MKD), self._per_query(values_MKD)))
        mixed_MQD = self._attend(layer.self_attn.queries(inputs, rope))
        features_MH, self.hidden_MH = self.head.step(residual_MH, mixed_MQD)
        return features_MH

    def advance_masked(self, embedded_H: Tensor) -> Tensor:
        """Add a mask element to each draft; return the lm_head's inputs [M, H].

        embedded_H: embedding of the mask token.
        """
        state_H = self.head.mask_states(len(self._drafted))[-1]
        self.hidden_MH = state_H.expand_as(self.hidden_MH)
        return self.advance(embedded_H.expand_as(self.hidden_MH))

    def _attend(self, q_MQD: Tensor) -> Tensor:
        """Return the mixed values [M, Q, D] of the texts' elements and the drafts' own."""
        drafted_keys, drafted_values = (torch.stack(each, 2) for each in zip(*self._drafted))
        q_MQD = q_MQD * q_MQD.shape[-1] ** -0.5
        drafted_MQJ = torch.einsum("mqd,mqjd->mqj", q_MQD, drafted_keys)
        scores_RQTT = self._placed(q_MQD) @ self._keys_RQTD.transpose(2, 3) + self._mask_R1TT
        shares = torch.cat((scores_RQTT, self._placed(drafted_MQJ)), -1).softmax(-1)
        shares_RQTT, drafted_RQTJ = shares.split((scores_RQTT.shape[-1], len(self._drafted)), -1)
        mixed_MQD = self._taken(shares_RQTT @ self._values_RQTD)
        return mixed_MQD + torch.einsum("mqj,mqjd->mqd", self._taken(drafted_RQTJ), drafted_values)

    def _per_query(self, x: Tensor) -> Tensor:
        """Repeat keys or values (..., K, D) for their query heads, (..., Q, D)."""
        return x.repeat_interleave(self.head.config.num_heads // x.shape[-2], -2)

    def _placed(self, values_MQx: Tensor) -> Tensor:
        """Return the drafts' values [R, Q, T, ...] at the places of their tips, zero elsewhere."""
        rows = self._mask_R1TT.shape[0], self._mask_R1TT.shape[-1]
        full_FQx = values_MQx.new_zeros(rows[0] * rows[1], *values_MQx.shape[1:])
        return full_FQx.index_copy(0, self.tips_M, values_MQx).unflatten(0, rows).transpose(1, 2)

    def _taken(self, values_RQTx: Tensor) -> Tensor:
        """Return the values [M, Q, ...] at the places of the tips."""
        return values_RQTx.transpose(1, 2).flatten(0, 1)[self.tips_M]
