"""Random-weight LLaMAs and recurrent heads: speed depends on shapes and not on values."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decoding.models.load import native_execution
from decoding.models.native.model import NativeTarget
from decoding.models.native.weights import NativeConfig, Weights
from recurrent_drafting.head import HeadConfig, RecurrentHead
from training.models.attention import PACKED


def llama(
    layers: int,
    hidden_size: int,
    heads: int,
    intermediate_size: int,
    kv_heads: int | None = None,
    head_dim: int = 128,
    vocab_size: int = 32000,
    spread: float = 0.02,
) -> LlamaConfig:
    """Return the configuration of a LLaMA.

    kv_heads: None means as many as `heads`. spread: standard deviation of all matrices.
    """
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
        num_key_value_heads=kv_heads or heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        initializer_range=spread,
        max_position_embeddings=1 << 16,
    )


LLAMA_7B = llama(32, 4096, 32, 11008)
TOY_TARGET = llama(2, 32, 4, 48, 2, 8, 64)
TOY_DRAFTER = llama(1, 32, 4, 48, 4, 8, 64)


def random_model(config: LlamaConfig, dtype: torch.dtype, device: str) -> Any:
    """Return a Hugging Face model with packed attention, equal for equal configurations."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, dtype=dtype, attn_implementation=PACKED
        )


def random_weights(config: LlamaConfig, dtype: torch.dtype, device: str) -> Weights:
    """Return unpacked weights, which targets of every execution can share."""
    state = random_model(config, dtype, device).state_dict()
    shape = NativeConfig.from_dict(config.to_dict())
    return Weights(shape, state, dtype, torch.device(device), packed=False)


def random_target(
    config: LlamaConfig, dtype: torch.dtype, device: str, max_length: int
) -> NativeTarget:
    """Return a target whose context has `max_length` tokens, with the execution of `auto`."""
    state = random_model(config, dtype, device).state_dict()
    weight_bytes = sum(weight.nbytes for weight in state.values())
    return NativeTarget.from_state(
        config.to_dict(),
        state,
        name="random-weights",
        dtype=dtype,
        device=device,
        max_length=max_length,
        execution=native_execution(weight_bytes, dtype, torch.device(device)),
    )


def random_head(target: LlamaConfig, blocks: int, dtype: torch.dtype, device: str) -> RecurrentHead:
    """Return a head of the published form with `blocks` residual blocks, equal for equal shapes."""
    torch.manual_seed(0)
    C = target.hidden_size
    with torch.device(device):
        head = RecurrentHead(HeadConfig(target.vocab_size, C, 2 * C, blocks))
    return head.to(dtype)
