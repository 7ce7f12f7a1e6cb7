"""What heads read of the frozen target: its embedding, its lm_head, and at the positions that are
asked for its hidden states, and what it goes on with where that is asked for too.

The target is the same at every epoch, so what it says may be kept (training/features/stores.py).
With a cache the target reads one row a forward, so that a row's states do not depend on its
neighbours and a resumed run equals a straight one bit for bit.

Shapes: P positions, H hidden size, C channels: those of all layers that are read, K tokens that the
target goes on with, V vocabulary.
"""

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.data.packing import PackedBatch
from training.features.continuations import continue_greedily
from training.features.stores import RowStates, Store
from training.features.taps import Layers, check_layers, read_layers
from training.objectives import hidden_states


class ReadPositions(Protocol):
    """Positions of a batch at which the target is read."""

    kept_P: Tensor  # of the flattened batch, rising
    kept_R: list[int]  # of kept_P, in each row


def layers_read(taps: Layers, num_layers: int, final: bool) -> Layers:
    """Return the layers that are read of a target of so many decoder layers. No taps: the last.

    final: the state after the final norm is wanted beside the taps, for the target's own
    distribution.
    """
    check_layers(taps, num_layers)
    layers = taps or (num_layers,)
    return (*layers, num_layers) if final and num_layers not in layers else layers


class TargetStates:
    """The frozen target as a head sees it. No submodule of an objective, and the same one in every
    copy of it.
    """

    def __init__(
        self, target: Any, store: Store | None = None, taps: Layers = (), final: bool = True
    ) -> None:
        """target: a Hugging Face causal LM with packed attention, before ranks cut it. taps, final:
        see `layers_read`.
        """
        self.target = target
        self.store = store
        self._last = target.config.num_hidden_layers
        self.layers = layers_read(taps, self._last, final)
        self._taps = len(taps or (self._last,))
        self._embedding_VH: Tensor = target.get_input_embeddings().weight.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TargetStates":
        return self

    @property
    def lm_head(self) -> Tensor:
        """[V, H]."""
        weight = self.target.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    @property
    def vocab_size(self) -> int:
        return self._embedding_VH.shape[0]

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

    def tapped(self, states_PC: Tensor) -> Tensor:
        """Of what was read, the states that the head takes in."""
        return states_PC[:, : self._taps * self._hidden_size]

    def final(self, states_PC: Tensor) -> Tensor:
        """Of what was read, the states after the final norm, [P, H]."""
        first = self.layers.index(self._last) * self._hidden_size
        return states_PC[:, first : first + self._hidden_size]

    @torch.no_grad()
    def read(self, batch: PackedBatch, where: ReadPositions) -> Tensor:
        """The hidden states at where.kept_P, [P, C], by a forward."""
        return self._forward(batch).flatten(0, 1)[where.kept_P]

    @torch.no_grad()
    def __call__(self, batch: PackedBatch, where: ReadPositions) -> Tensor:
        """The same for training data: from the store where they are kept, and kept there."""
        if self.store is None:
            return self.read(batch, where)
        return torch.cat([row.states_PC for row in self._rows(batch, where, 0)])

    @torch.no_grad()
    def continue_greedily(
        self, batch: PackedBatch, where: ReadPositions, count: int
    ) -> tuple[Tensor, Tensor]:
        """(the hidden states at where.kept_P, the target's `count` likeliest tokens behind each [P,
        K]), as kept as states are.
        """
        rows = self._rows(batch, where, count)
        said = [row.tokens_PK for row in rows if row.tokens_PK is not None]
        return torch.cat([row.states_PC for row in rows]), torch.cat(said)

    @property
    def _hidden_size(self) -> int:
        return self._embedding_VH.shape[1]

    def _forward(self, batch: PackedBatch) -> Tensor:
        """[R, T, C]."""
        return read_layers(self.target, self.layers, lambda: hidden_states(self.target, batch))

    def _rows(self, batch: PackedBatch, where: ReadPositions, count: int) -> list[RowStates]:
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
        states_PC = self._embedding_VH.new_zeros(0, len(self.layers) * self._hidden_size)
        return RowStates(states_PC, kept_P.new_zeros(0, count) if count else None)

    def _row(self, batch: PackedBatch, index: int, kept_P: Tensor, count: int) -> RowStates:
        found = None if self.store is None else self.store.get(batch.rows[index])
        if found is not None:
            return found.sent(kept_P.device)
        if count:
            states_MC, said_MK = continue_greedily(
                self.target, batch.row(index), kept_P, count, self.layers
            )
            made = RowStates(states_MC, said_MK)
        else:
            made = RowStates(self._forward(batch.row(index))[0][kept_P])
        if self.store is not None:
            self.store.put(batch.rows[index], made)
        return made
