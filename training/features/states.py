"""What the head reads of the frozen target: its embedding, its lm_head, and at the positions that
are asked for its hidden states, and what it goes on with where that is asked for too.

The target is the same at every epoch, so what it says may be kept (training/features/stores.py).
With a cache the target reads one row a forward, so that a row's states do not hang on its
neighbours and a resumed run equals a straight one bit for bit.

Shapes: P positions, H hidden size, K tokens that the target goes on with, V vocabulary.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.data.packing import Batch
from training.features.continuations import go_on
from training.features.stores import RowStates, Store
from training.heads.positions import Positions
from training.objectives import hidden_states


class TargetStates:
    """The frozen target as the head sees it. No submodule of an objective, and the same one in
    every copy of it.
    """

    def __init__(self, target: Any, store: Store | None = None) -> None:
        """target: a Hugging Face causal LM with packed attention, before ranks cut it."""
        self.target = target
        self.store = store
        self._embedding_VH: Tensor = target.get_input_embeddings().weight.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TargetStates":
        return self

    @property
    def lm_head(self) -> Tensor:
        """[V, H]."""
        weight = self.target.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    def placed(self, device: torch.device) -> None:
        """To be called when the target has its place: ranks that cut it keep the
        embedding whole.
        """
        weight = self.target.get_input_embeddings().weight
        self._embedding_VH = (
            self._embedding_VH.to(device) if isinstance(weight, DTensor) else weight.detach()
        )

    def embed(self, ids: Tensor) -> Tensor:
        """The target's own embeddings of tokens, [..., H]."""
        return F.embedding(ids, self._embedding_VH)

    @torch.no_grad()
    def read(self, batch: Batch, where: Positions) -> Tensor:
        """The hidden states at where.kept_P, [P, H], by a forward."""
        return hidden_states(self.target, batch).flatten(0, 1)[where.kept_P]

    @torch.no_grad()
    def __call__(self, batch: Batch, where: Positions) -> Tensor:
        """The same for training data: from the store where they are kept, and kept there."""
        if self.store is None:
            return self.read(batch, where)
        return torch.cat([row.states_PH for row in self._rows(batch, where, 0)])

    @torch.no_grad()
    def go_on(self, batch: Batch, where: Positions, count: int) -> tuple[Tensor, Tensor]:
        """(the hidden states at where.kept_P, the target's `count` likeliest tokens behind each [P,
        K]), as kept as states are.
        """
        rows = self._rows(batch, where, count)
        said = [row.tokens_PK for row in rows if row.tokens_PK is not None]
        return torch.cat([row.states_PH for row in rows]), torch.cat(said)

    def _rows(self, batch: Batch, where: Positions, count: int) -> list[RowStates]:
        """What is kept of each row of a batch; count: tokens that the target goes on with, 0 for
        none.
        """
        ends = np.cumsum(where.kept_R).tolist()
        length = batch.ids_RT.shape[1]
        rows = []
        for index, (end, kept) in enumerate(zip(ends, where.kept_R, strict=True)):
            kept_P = where.kept_P[end - kept : end] - index * length
            rows.append(
                self._row(batch, index, kept_P, count) if kept else self._none(kept_P, count)
            )
        return rows

    def _none(self, kept_P: Tensor, count: int) -> RowStates:
        """Of a rank that a step left without a row."""
        states_PH = self._embedding_VH.new_zeros(0, self._embedding_VH.shape[1])
        return RowStates(states_PH, kept_P.new_zeros(0, count) if count else None)

    def _row(self, batch: Batch, index: int, kept_P: Tensor, count: int) -> RowStates:
        found = None if self.store is None else self.store.get(batch.rows[index])
        if found is not None:
            return found.sent(kept_P.device)
        if count:
            made = RowStates(*go_on(self.target, batch.row(index), kept_P, count))
        else:
            made = RowStates(hidden_states(self.target, batch.row(index))[0][kept_P])
        if self.store is not None:
            self.store.put(batch.rows[index], made)
        return made
