"""Small random targets of every family that students are cut from."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from training.models.attention import PACKED

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 6,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_mha": {"model_type": "llama", "num_key_value_heads": 6, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
}


def family(name: str, **changed: Any) -> Any:
    """Return a random float32 target of a family in FAMILIES, with packed attention.

    Norms and biases are random too, so that forgetting one changes the output. changed: fields of
    the configuration that replace those of SIZES and FAMILIES.
    """
    torch.manual_seed(3)
    fields = {**SIZES, **FAMILIES[name], **changed}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=PACKED, dtype=torch.float32
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
    return model.eval()
