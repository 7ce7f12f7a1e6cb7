"""Fusion of the target's states at some layers into the vectors that block layers attend to.

fc         c = norm(W [s_1; ...; s_n]), the same for all layers (DFlash, arXiv 2602.06036)
per_layer  c_i = norm(sum of softmax(w_i)_j s_j) in layer i, which also has projections of its own
           from c_i to keys and values (DFlare, arXiv 2606.02091)
both       c_i = norm(W [s_1; ...; s_n] + sum of softmax(w_i)_j s_j) (DFly, arXiv 2607.25852)

New weights w are zero, so every layer begins with the mean of the states.

Shapes: B rows, T tokens of a text, n taps, X = n H, L layers, H hidden size.
"""

import torch
from torch import Tensor, nn

from heads.block.shape import FC, PER_LAYER, BlockConfig


class Fusion(nn.Module):
    """Weights of each layer's mixture of states."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.layer_fusion_weights = nn.Parameter(torch.zeros(config.num_layers, len(config.taps)))

    def forward(self, taps_BTX: Tensor) -> Tensor:
        """Return each layer's mixture (L, B, T, H)."""
        shares_Ln = self.layer_fusion_weights.softmax(-1)
        states_BTnH = taps_BTX.unflatten(-1, (shares_Ln.shape[1], -1))
        return torch.einsum("ln,btnh->lbth", shares_Ln, states_BTnH)


def make_fc(config: BlockConfig) -> nn.Linear | None:
    """Return a new projection of all states, None if the head has none."""
    H = config.hidden_size
    return None if config.fusion == PER_LAYER else nn.Linear(len(config.taps) * H, H, bias=False)


def make_fusion(config: BlockConfig) -> Fusion | None:
    """Return new mixtures of a head's shape, None if it has none."""
    return None if config.fusion == FC else Fusion(config)
