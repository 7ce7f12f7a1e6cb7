"""Stores of the target's states with a file for each layer, which heads of several kinds share.

Each layer is kept at all tokens of the documents, so that a head finds its layers and positions
whatever other heads read. The target reads the data once for all layers.

Shapes: T tokens of a row's documents, C channels of several layers, H hidden size.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from jobs.amounts import size as amount
from training.data.packing import PackedData
from training.features.stores import (
    DiskStore,
    Key,
    RowStates,
    StoreLayout,
    free_bytes,
    states_on_disk,
)
from training.features.taps import Layers


class LayerStores:
    """A store on disk for each of several layers."""

    def __init__(self, stores: Mapping[int, DiskStore]) -> None:
        self._stores = dict(stores)

    @property
    def layers(self) -> Layers:
        """Return the layers that are kept, rising."""
        return tuple(sorted(self._stores))

    def get(self, key: Key, layers: Layers) -> Tensor | None:
        """Return a row's states at these layers, [T, C] in their order; None: not all known."""
        found = []
        for layer in layers:
            row = self._stores[layer].get(key)
            if row is None:
                return None
            found.append(row.states_PC)
        return torch.cat(found, dim=1)

    def put(self, key: Key, states_TC: Tensor) -> None:
        """Keep the states of a row at all of `layers`, in their order."""
        parts = states_TC.chunk(len(self._stores), dim=1)
        for layer, part in zip(self.layers, parts, strict=True):
            store = self._stores[layer]
            # another process may be reading the files of a layer that is complete
            if store.get(key) is None:
                store.put(key, RowStates(part))


def layers_on_disk(
    root: Path,
    target_hash: str,
    data: PackedData,
    layers: Sequence[int],
    hidden_size: int,
    dtype: torch.dtype,
    show: bool,
) -> LayerStores:
    """Return the stores under `root` of these layers of a target, and allocate their files.

    target_hash: the hash of the target's folder. show: print the size of all files. Raises
    UserError if the disk is too small.
    """
    kept = sorted(set(layers))
    if show:
        held = data.tokens * hidden_size * dtype.itemsize * len(kept)
        print(
            f"states: layers {', '.join(map(str, kept))} at {data.tokens:,} tokens, {amount(held)} "
            f"on disk in {root} ({amount(free_bytes(root))} free); all heads that train on this "
            f"data read them from there"
        )

    def layout(layer: int) -> StoreLayout:
        return StoreLayout(0, False, hidden_size, dtype, taps=(layer,), context=True)

    return LayerStores(
        {
            layer: states_on_disk(root, target_hash, data, layout(layer), len, show=False)
            for layer in kept
        }
    )
