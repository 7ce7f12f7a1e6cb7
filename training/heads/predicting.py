"""How a head predicts, as its objective and its looks ask it; free of the packages that compose
configurations, so that a training step can be had without them.

Shapes: M drafts, N predictions of all depths, P positions, K drafted tokens, C channels of the
states that a head reads, E features, V drafted vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.heads.positions import Positions


@dataclass(frozen=True)
class Tips:
    """Where drafts begin: behind tokens of a batch, on the states before them."""

    tokens_M: Tensor  # ids of the tips
    states_MC: Tensor  # the target's states of the token before each; zeros where there is none


class PredictingHead(Protocol):
    """How heads of a kind predict. A head is an nn.Module with the attribute `token_ids_V`: the ids
    [V] of its draft vocabulary, rising, or None (training/heads/draft_vocabulary.py).
    """

    label: str  # of a depth's figures: `{label}0_loss`

    def outputs(self, head: Any, states: TargetStates) -> Sequence[Tensor]:
        """Return the output layer [V, E] that all depths share, or one a depth."""
        ...

    def features(
        self,
        head: Any,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return what the output layers read for all predictions of a batch, [N, E]; states_PC: the
        target's states at where.kept_P.
        """
        ...

    def draft(self, head: Any, states: TargetStates, tips: Tips, count: int) -> Tensor:
        """Return the head's likeliest chain of `count` tokens behind every tip, ids [M, K]."""
        ...
