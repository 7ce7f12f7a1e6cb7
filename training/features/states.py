"""Features of the frozen target for heads: embedding, lm_head, hidden states, continuations.

The target is the same in every epoch, so its states may be stored (training/features/stores.py).
With a store the target reads one row at a time, so a row's states do not depend on other rows and a
resumed run equals an uninterrupted one bit for bit.

Shapes: P positions, H hidden size, C channels of all layers that are read, K tokens of a
continuation, V vocabulary.
"""

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from decoding import devices
from training.data.packing import PackedBatch
from training.features.continuations import continue_greedily
from training.features.layer_stores import LayerStores
from training.features.stores import RowStates, Store
from training.features.taps import Layers, check_layers, read_layers
from training.objectives import hidden_states


class ReadPositions(Protocol):
    """Positions of a batch at which the target is read."""

    # indices into the flattened batch, rising
    kept_P: Tensor
    # number of indices in each row
    kept_R: list[int]


def layers_read(taps: Layers, num_layers: int, final: bool) -> Layers:
    """Return the layers whose states are read from a target with `num_layers` decoder layers.

    Without taps, only the state after the final norm is read. final: read this state in any case,
    as the target's distribution follows from it. Raises UserError for a tap outside the target.
    """
    check_layers(taps, num_layers)
    layers = taps or (num_layers,)
    return (*layers, num_layers) if final and num_layers not in layers else layers


class TargetStates:
    """Features of the frozen target, shared by all copies of an objective."""

    def __init__(
        self,
        target: Any,
        store: Store | LayerStores | None = None,
        taps: Layers = (),
        final: bool = True,
    ) -> None:
        """Wrap a Hugging Face causal LM with packed attention, before it is sharded.

        taps, final: see `layers_read`.
        """
        self.target = target
        self.store = store
        self.tokens_read = 0  # by the target on this rank, of rows that the store lacked
        self._last = target.config.num_hidden_layers
        self.layers = layers_read(taps, self._last, final)
        self._taps = len(taps or (self._last,))
        self._embedding_VH: Tensor = target.get_input_embeddings().weight.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TargetStates":
        return self

    @property
    def lm_head(self) -> Tensor:
        """Return the target's output weights [V, H]."""
        weight = self.target.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    @property
    def vocab_size(self) -> int:
        return self._embedding_VH.shape[0]

    def move_to(self, device: torch.device) -> None:
        """Provide the embedding on `device`, once the target has been placed there.

        A sharded target's embedding is kept as a full copy.
        """
        weight = self.target.get_input_embeddings().weight
        self._embedding_VH = (
            self._embedding_VH.to(device) if isinstance(weight, DTensor) else weight.detach()
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Return the target's embeddings of tokens, [..., H]."""
        return F.embedding(ids, self._embedding_VH)

    def select_taps(self, states_PC: Tensor) -> Tensor:
        """Return the channels of the tapped layers, which the head reads, [P, taps H]."""
        return states_PC[:, : self._taps * self._hidden_size]

    def select_final(self, states_PC: Tensor) -> Tensor:
        """Return the states after the final norm, [P, H]."""
        first = self.layers.index(self._last) * self._hidden_size
        return states_PC[:, first : first + self._hidden_size]

    @torch.no_grad()
    def read(self, batch: PackedBatch, where: ReadPositions) -> Tensor:
        """Compute the hidden states at where.kept_P, [P, C], in one forward without the store."""
        return self._forward(batch).flatten(0, 1)[where.kept_P]

    @torch.no_grad()
    def read_all(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Compute the tapped states [R T, C] and those after the final norm [R T, H], at once."""
        final_RTH = torch.empty(0)

        def forward() -> Tensor:
            nonlocal final_RTH
            final_RTH = hidden_states(self.target, batch)
            return final_RTH

        states_RTC = read_layers(self.target, self.layers, forward)
        return self.select_taps(states_RTC.flatten(0, 1)), final_RTH.flatten(0, 1)

    @torch.no_grad()
    def __call__(self, batch: PackedBatch, where: ReadPositions) -> Tensor:
        """Return the hidden states at where.kept_P, [P, C], from the store if there is one.

        States that the store lacks are computed and stored.
        """
        if self.store is None:
            return self.read(batch, where)
        return torch.cat([row.states_PC for row in self._rows(batch, where, 0)])

    @torch.no_grad()
    def continue_greedily(
        self, batch: PackedBatch, where: ReadPositions, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return the states [P, C] at where.kept_P and greedy continuations [P, K] by the target.

        count: K. Both come from the store if there is one; what it lacks is computed and stored.
        """
        rows = self._rows(batch, where, count)
        tokens = [row.tokens_PK for row in rows if row.tokens_PK is not None]
        return torch.cat([row.states_PC for row in rows]), torch.cat(tokens)

    @property
    def _hidden_size(self) -> int:
        return self._embedding_VH.shape[1]

    def _forward(self, batch: PackedBatch) -> Tensor:
        """Return the states of all positions, [R, T, C]."""
        return read_layers(self.target, self.layers, lambda: hidden_states(self.target, batch))

    def _rows(self, batch: PackedBatch, where: ReadPositions, count: int) -> list[RowStates]:
        """Return the features of each row; count: tokens of a continuation, 0 for none."""
        ends = np.cumsum(where.kept_R).tolist()
        length = batch.ids_RT.shape[1]
        rows = []
        for index, (end, kept) in enumerate(zip(ends, where.kept_R, strict=True)):
            kept_P = where.kept_P[end - kept : end] - index * length
            rows.append(
                self._row(batch, index, kept_P, count) if kept else self._no_features(kept_P, count)
            )
        return rows

    def _no_features(self, kept_P: Tensor, count: int) -> RowStates:
        """Return the empty features of a rank without a row in this step."""
        states_PC = self._embedding_VH.new_zeros(0, len(self.layers) * self._hidden_size)
        return RowStates(states_PC, kept_P.new_zeros(0, count) if count else None)

    def _row(self, batch: PackedBatch, index: int, kept_P: Tensor, count: int) -> RowStates:
        if isinstance(self.store, LayerStores):
            return self._shared_row(self.store, batch, index, kept_P)
        found = None if self.store is None else self.store.get(batch.rows[index])
        if found is not None:
            return found.copy_to(kept_P.device)
        row = batch.row(index)
        self.tokens_read += row.tokens
        if count:
            states_MC, tokens_MK = continue_greedily(self.target, row, kept_P, count, self.layers)
            made = RowStates(states_MC, tokens_MK)
        else:
            made = RowStates(self._forward(row)[0][kept_P])
        if self.store is not None:
            self.store.put(batch.rows[index], made)
        return made

    def _shared_row(
        self, store: LayerStores, batch: PackedBatch, index: int, kept_P: Tensor
    ) -> RowStates:
        """Return a row's features, from its states at all layers that the store keeps."""
        key = batch.rows[index]
        if (states_TC := store.get(key, self.layers)) is None:
            row = batch.row(index)
            made = read_layers(self.target, store.layers, lambda: hidden_states(self.target, row))
            # documents fill a row from its first token on
            store.put(key, made[0, : row.tokens])
            self.tokens_read += row.tokens
            states_TC = store.get(key, self.layers)
            assert states_TC is not None
        return RowStates(devices.copy_to_device(states_TC, kept_P.device)[kept_P])
