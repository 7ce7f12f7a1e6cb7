"""A row that the frozen target has read, and whose cache further tokens attend to.

Shapes: C channels of all layers that are read, D tokens of a draft, H hidden size, L tokens in the
cache, M drafts, N further tokens, T tokens of the row.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from training.data.packing import PackedBatch
from training.features.taps import Layers, read_layers
from training.models.attention import document_mask

SCORED_AT_ONCE = 512  # drafted tokens in one forward, which bounds the mask's memory


class CachedText:
    """The states of one packed row, and forwards over tokens that continue it."""

    @torch.no_grad()
    def __init__(self, target: Any, row: PackedBatch, layers: Layers) -> None:
        """Read the row.

        target: a Hugging Face causal LM built with packed attention. row: a batch of one row.
        layers: the layers of `states_TC`; the state after the final norm is kept in any case.
        """
        self._target, self._cache = target, DynamicCache()
        self.positions_1T = row.positions_RT
        self.bias_11TT = document_mask(row.documents_RT, target.dtype)
        last, H = target.config.num_hidden_layers, target.config.hidden_size
        read = layers if last in layers else (*layers, last)
        states_1TC = read_layers(
            target, read, lambda: self.read(row.ids_RT, row.positions_RT, self.bias_11TT)
        )
        first = read.index(last) * H
        self.states_TC = states_1TC[0, :, : len(layers) * H]
        self.final_TH = states_1TC[0, :, first : first + H]

    def read(self, ids_1N: Tensor, positions_1N: Tensor, bias_11NL: Tensor) -> Tensor:
        """Append tokens to the cache, and return their states after the final norm, [1, N, H].

        bias_11NL: 0 where a token attends to one of the cache or of the new ones, else -inf.
        """
        given = {
            "position_ids": positions_1N,
            "attention_bias": bias_11NL,
            "past_key_values": self._cache,
            "use_cache": True,
        }
        states_1NH: Tensor = self._target.model(ids_1N, **given).last_hidden_state
        return states_1NH

    @torch.no_grad()
    def score(self, tips_M: Tensor, drafted_MD: Tensor) -> Tensor:
        """Return the states [M, D, H] after the final norm at the tokens of drafts.

        tips_M: positions of the tokens before the drafts. A drafted token attends to the text up to
        its tip and to its own draft. The cache is as before afterwards.
        """
        M, D = drafted_MD.shape
        if not M * D:
            return self.final_TH.new_zeros(M, D, self.final_TH.shape[-1])
        ahead_D = torch.arange(1, D + 1, device=tips_M.device)
        within_DD = self.bias_11TT.new_full((D, D), float("-inf")).triu(1)
        count, parts = max(1, SCORED_AT_ONCE // D), []
        for start in range(0, M, count):
            tips_m, drafted_mD = tips_M[start : start + count], drafted_MD[start : start + count]
            m = len(tips_m)
            text_NT = self.bias_11TT[0, 0, tips_m].repeat_interleave(D, dim=0)
            drafts_mDmD = text_NT.new_full((m, D, m, D), float("-inf"))
            drafts_mDmD.diagonal(dim1=0, dim2=2).copy_(within_DD[..., None].expand(D, D, m))
            bias_NL = torch.cat((text_NT, drafts_mDmD.view(m * D, m * D)), dim=1)
            positions_mD = self.positions_1T[0, tips_m, None] + ahead_D
            states_1NH = self.read(
                drafted_mD.reshape(1, -1), positions_mD.view(1, -1), bias_NL[None, None]
            )
            parts.append(states_1NH[0].unflatten(0, (m, D)))
            self._cache.crop(-m * D)
        return torch.cat(parts)
