"""Building and storing Hugging Face LLaMA models for training."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decoding.errors import UserError
from training.attention import PACKED
from training.config import StudentConfig, TargetConfig
from training.paths import resolve

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def dtype_of(name: str) -> torch.dtype:
    """torch dtype by its name in configurations."""
    if name not in DTYPES:
        raise UserError(f"dtype '{name}' is unknown; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def build_llama(shape: StudentConfig, dtype: torch.dtype, **base: Any) -> Any:
    """A LLaMA with random weights and packed attention. base: further LlamaConfig fields (vocabulary, context, rope, special ids)."""
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads or shape.num_attention_heads,
        head_dim=shape.head_dim or shape.hidden_size // shape.num_attention_heads,
        intermediate_size=shape.intermediate_size,
        **base,
    )
    return random_model(config, dtype)


def random_model(config: LlamaConfig | Qwen3Config, dtype: torch.dtype, empty: bool = False) -> Any:
    """A causal LM of `config` with random weights and packed attention. empty: on the meta device, for weights that follow."""
    config._attn_implementation = PACKED
    kind: Any = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else LlamaForCausalLM
    with torch.device("meta") if empty else contextlib.nullcontext():
        model: Any = kind(config)
    if empty:  # rope's frequencies are in no state dict
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.to(dtype)


def load_causal_lm(folder: Path, dtype: torch.dtype) -> Any:
    """A causal LM from a model folder (safetensors only) with packed attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=PACKED, use_safetensors=True, local_files_only=True
    )


def target_config(target: TargetConfig) -> Any:
    """The Hugging Face configuration of a target."""
    return AutoConfig.from_pretrained(resolve(target.path), local_files_only=True)
