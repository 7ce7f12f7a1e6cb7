"""SDSAT's slots: trained embeddings that the target reads after a text, to predict further tokens.

The tip predicts the next token, as always, and slot j, at j positions after the tip, the token
after that position (arXiv 2403.18647). The target stays frozen, so verification is lossless. With a
rank, the target's products also get a low-rank change (LoRA, arXiv 2106.09685), at the slots' rows
alone: the rows of text keep the target's keys and values.

Shapes: S slots, C hidden size, I input size, N rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from decoding.models.native.linear import Linear
from decoding.models.native.weights import Layer, NativeConfig
from heads.base import Head

# maps a product's input (B, N, I) to a mask, (N,) or (B, N), of the rows of slots
IsSlot = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SdsatConfig:
    """Shape of the slots, and of the target that reads them."""

    vocab_size: int
    hidden_size: int
    target_layers: int
    query_size: int  # of all query heads
    key_size: int  # of all key heads
    intermediate_size: int
    num_slots: int
    rank: int = 0
    draft_vocab_size: ClassVar[int] = 0  # the target's lm_head predicts

    @classmethod
    def of_target(cls, target: Mapping[str, Any], num_slots: int, rank: int = 0) -> "SdsatConfig":
        """Return the shape of slots for a target, given the fields of its config.json.

        Raises UserError for a target that the native backend does not support.
        """
        return cls(**sizes_of(NativeConfig.from_dict(target)), num_slots=num_slots, rank=rank)

    @property
    def num_drafted(self) -> int:
        """Number of tokens that can be drafted."""
        return self.vocab_size

    @property
    def num_drafts(self) -> int:
        """Length of the longest draft: the target's next token, and one of each slot."""
        return self.num_slots + 1


def sizes_of(target: NativeConfig) -> dict[str, int]:
    """Return the fields of `SdsatConfig` that are the target's."""
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_layers": target.num_layers,
        "query_size": target.num_heads * target.head_dim,
        "key_size": target.num_kv_heads * target.head_dim,
        "intermediate_size": target.intermediate_size,
    }


class LowRank(nn.Module):
    """A product of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x_NI: Tensor) -> Tensor:
        found = self.up(self.down(x_NI))
        assert isinstance(found, Tensor)
        return found


class LowRankLayer(nn.Module):
    """The changes of a layer's products, fused as in the native backend."""

    def __init__(self, config: SdsatConfig) -> None:
        super().__init__()
        C, F, rank = config.hidden_size, config.intermediate_size, config.rank
        self.qkv = LowRank(C, config.query_size + 2 * config.key_size, rank)
        self.out = LowRank(config.query_size, C, rank)
        self.gate_up = LowRank(C, 2 * F, rank)
        self.down = LowRank(F, C, rank)


class SdsatHead(Head):
    """The slots' embeddings, and the changes of the target's layers at their rows."""

    token_ids_V: Tensor | None = None  # the drafted vocabulary is the target's

    def __init__(self, config: SdsatConfig) -> None:
        super().__init__()
        self.config = config
        self.slots = nn.Parameter(torch.zeros(config.num_slots, config.hidden_size))
        changed = config.target_layers if config.rank else 0
        self.layers = nn.ModuleList(LowRankLayer(config) for _ in range(changed))

    def change(self, layer: Layer, index: int, is_slot: IsSlot) -> Layer:
        """Return the target's layer `index` (from 0) with the change at the slots' rows."""
        if not self.config.rank:
            return layer
        changes = dict(self.layers[index].named_children())
        products: Any = {
            name: SlotRows(getattr(layer, name), change, is_slot)
            for name, change in changes.items()
        }
        return replace(layer, **products)


class SlotRows:
    """A linear layer with a change at the slots' rows."""

    def __init__(self, product: Linear, change: nn.Module, is_slot: IsSlot) -> None:
        self.product, self.change, self.is_slot = product, change, is_slot

    def __call__(self, x_BNI: Tensor) -> Tensor:
        return self.product(x_BNI) + self.change(x_BNI) * self.is_slot(x_BNI)[..., None]
