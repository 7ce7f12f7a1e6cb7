"""Sub-layers that a view of a native target leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decoding.models.native.weights import Layer

# (index in the cache, weights, whether attention runs, whether the MLP runs) of a layer
KeptLayer = tuple[int, "Layer", bool, bool]


@dataclass(frozen=True)
class Skips:
    """Sub-layers to skip, given by their layers' numbers from 0."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def steps(self, layers: Sequence[Layer]) -> list[KeptLayer]:
        """Return what is left of the layers, without those that are skipped whole."""
        return [
            (i, layer, i not in self.attention, i not in self.mlp)
            for i, layer in enumerate(layers)
            if i not in self.attention or i not in self.mlp
        ]
