"""Random-weight LLaMAs and recurrent heads: speed depends on shapes and not on values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.models.native.model import NativeTarget
from decoding.models.native.weights import NativeConfig, Weights
from recurrent_drafting.head import HeadConfig, RecurrentHead

SPREAD = 0.02  # standard deviation of all matrices


@dataclass(frozen=True)
class Shape:
    """Shape of a LLaMA."""

    layers: int
    hidden_size: int
    heads: int
    intermediate_size: int
    kv_heads: int | None = None  # None: equal to heads
    head_dim: int = 128
    vocab_size: int = 32000

    def config(self, max_length: int) -> dict[str, object]:
        """Return the fields of a config.json."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": max_length,
        }

    @property
    def parameters(self) -> int:
        """Number of elements of all matrices, embedding and output layer included."""
        C, queries, keys = (
            self.hidden_size,
            self.heads * self.head_dim,
            (self.kv_heads or self.heads) * self.head_dim,
        )
        return 2 * self.vocab_size * C + self.layers * (
            2 * C * (queries + keys) + 3 * C * self.intermediate_size
        )


def random_state(
    shape: Shape, dtype: torch.dtype, device: str, spread: float = SPREAD
) -> dict[str, Tensor]:
    """Return a Hugging Face state dict, equal for equal shapes and spreads."""
    C, F = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.heads * shape.head_dim, (shape.kv_heads or shape.heads) * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (shape.vocab_size, C),
        "lm_head": (shape.vocab_size, C),
        "model.norm": (C,),
    }
    for layer in range(shape.layers):
        before = f"model.layers.{layer}."
        sizes |= {f"{before}input_layernorm": (C,), f"{before}post_attention_layernorm": (C,)}
        sizes |= {
            f"{before}self_attn.q_proj": (queries, C),
            f"{before}self_attn.o_proj": (C, queries),
        }
        sizes |= {f"{before}self_attn.{name}_proj": (keys, C) for name in "kv"}
        sizes |= {
            f"{before}mlp.gate_proj": (F, C),
            f"{before}mlp.up_proj": (F, C),
            f"{before}mlp.down_proj": (C, F),
        }
    generator = torch.Generator(device).manual_seed(0)
    return {
        f"{name}.weight": torch.empty(size, dtype=dtype, device=device).normal_(
            0, spread, generator=generator
        )
        if len(size) == 2
        else torch.ones(size, dtype=dtype, device=device)
        for name, size in sizes.items()
    }


def random_weights(
    shape: Shape, dtype: torch.dtype, device: str, max_length: int, spread: float = SPREAD
) -> Weights:
    """Return unpacked weights of this shape, which targets of every execution share."""
    config = NativeConfig.from_dict(shape.config(max_length))
    return Weights(
        config,
        random_state(shape, dtype, device, spread),
        dtype,
        torch.device(device),
        packed=False,
    )


def random_target(shape: Shape, dtype: torch.dtype, device: str, max_length: int) -> NativeTarget:
    """Return a target of this shape."""
    state = random_state(shape, dtype, device)
    return NativeTarget.from_state(
        shape.config(max_length), state, dtype=dtype, device=device, name="random-weights"
    )


def random_head(target: Shape, blocks: int, dtype: torch.dtype, device: str) -> RecurrentHead:
    """Return a head of the published form with `blocks` residual blocks, equal for equal shapes."""
    torch.manual_seed(0)
    C = target.hidden_size
    with torch.device(device):
        head = RecurrentHead(HeadConfig(target.vocab_size, C, 2 * C, blocks))
    return head.to(dtype)
