"""Medusa heads: each predicts a different later token from the target's last hidden state.

Head k (from 0) reads z_t, the state after the final norm that the target's lm_head reads, and
predicts the token at t + 2 + k; the target itself predicts the one at t + 1. A head is a stack of
residual blocks x + SiLU(W x + b) and a projection to the vocabulary (arXiv 2401.10774, section
2.1). W and b start at zero, so a head starts as its projection, which starts as the target's
lm_head. With one block, each head has H^2 + H + V H parameters; `shared` gives all heads
one projection, and `draft_vocab_size` selects a shortlist of the vocabulary.

Shapes: M positions, K heads, H the target's hidden size, V drafted vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.base import Head


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of the heads; sizes are the target's."""

    vocab_size: int
    hidden_size: int
    num_heads: int = 4
    num_layers: int = 1  # residual blocks of a head
    shared: bool = False  # one projection to the vocabulary for all heads
    draft_vocab_size: int = 0  # tokens of the shortlist; 0: all
    # by head, the share of held-out positions whose token has rank 0, 1, ...; empty: not measured
    accuracy: tuple[tuple[float, ...], ...] = ()

    @property
    def num_drafted(self) -> int:
        """Number of tokens that the heads can draft."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def rounded_accuracy(self) -> list[list[float]]:
        """The accuracy, as config.json has it."""
        return [[round(share, 6) for share in row] for row in self.accuracy]


class MedusaBlock(nn.Module):
    """The residual block x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_RH: Tensor) -> Tensor:
        return x_RH + F.silu(self.linear(x_RH))


class MedusaHeads(Head):
    """All Medusa heads of a target."""

    token_ids_V: Tensor | None  # ids of the shortlist, rising; None: the full vocabulary

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        H, V = config.hidden_size, config.num_drafted
        self.blocks = nn.ModuleList(
            nn.Sequential(*(MedusaBlock(H) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        count = 1 if config.shared else config.num_heads
        self.projections = nn.ModuleList(nn.Linear(H, V, bias=False) for _ in range(count))
        ids_V = torch.arange(V) if config.draft_vocab_size else None
        self.register_buffer("token_ids_V", ids_V)

    def projection(self, head: int) -> Tensor:
        """Return the weight [V, H] of a head's projection to the vocabulary."""
        weight = self.projections[0 if self.config.shared else head].weight
        assert isinstance(weight, Tensor)
        return weight

    def features(self, hidden_RH: Tensor, head: int) -> Tensor:
        """Return the inputs (..., H) of a head's projection."""
        found = self.blocks[head](hidden_RH)
        assert isinstance(found, Tensor)
        return found

    def forward(self, hidden_RH: Tensor, heads: int | None = None) -> Tensor:
        """Return the logits (..., K, V) of the first `heads` heads, by default of all."""
        count = self.config.num_heads if heads is None else heads
        logits = [
            self.projections[0 if self.config.shared else head](self.features(hidden_RH, head))
            for head in range(count)
        ]
        return torch.stack(logits, -2)

    @torch.no_grad()
    def start_from(self, lm_head_VH: Tensor) -> None:
        """Initialize every projection with its tokens' rows of the target's lm_head."""
        rows_VH = lm_head_VH if self.token_ids_V is None else lm_head_VH[self.token_ids_V]
        for projection in self.projections:
            assert isinstance(projection, nn.Linear)
            projection.weight.copy_(rows_VH)
