"""The configuration and weights of a Llama model in a GGUF file, as Hugging Face stores them."""

from typing import Any

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.gguf.file import COUNT, SIZES, TEXT, TOKEN, GgufFile, token_id
from decoding.models.model_check import expected_tensors
from decoding.values import number_where

ARCHITECTURE = "llama"
_POSITIVE = number_where(lambda value: value > 0, "more than 0")
# Hugging Face module -> GGUF tensor
_MODEL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the fields of a Hugging Face config.json, without dtype.

    Raises UserError for another architecture, experts, scaled rotary positions, and a missing or
    invalid value.
    """
    found = file.value("general.architecture", TEXT)
    if found != ARCHITECTURE:
        raise UserError(
            f"{file.path}: the architecture is '{found}', expected '{ARCHITECTURE}' (Llama and "
            f"models of its form). Use the model's own Hugging Face folder."
        )
    _refuse_variants(file)
    sizes = {field: file.value(f"{ARCHITECTURE}.{key}", COUNT) for field, key in SIZES.items()}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    head_dim = file.value(f"{ARCHITECTURE}.attention.key_length", COUNT, hidden // heads)
    rope_dim = file.value(f"{ARCHITECTURE}.rope.dimension_count", COUNT, head_dim)
    if rope_dim != head_dim:
        raise UserError(
            f"{file.path}: rotary positions cover {rope_dim} of {head_dim} channels of a head, "
            f"expected all of them. Use the model's own Hugging Face folder."
        )
    shapes = file.shapes()
    tokens = {f"{role}_token_id": token_id(file, role) for role in ("bos", "eos", "pad")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes.get("token_embd.weight", [0])[0],
        **sizes,
        "num_key_value_heads": file.value(f"{ARCHITECTURE}.attention.head_count_kv", COUNT, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": file.value(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", _POSITIVE),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": file.value(f"{ARCHITECTURE}.rope.freq_base", _POSITIVE, 10000.0),
        },
        "tie_word_embeddings": "output.weight" not in shapes,
        **tokens,
    }


def weights_of(
    file: GgufFile, config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the weights by their Hugging Face names, dequantized.

    config: what `config_of` returns. Raises UserError for a missing tensor, a shape that differs
    from the configuration, and a tensor without a place in the model.
    """
    shapes, weights = file.shapes(), {}
    expected = list(expected_tensors(config))
    names = {tensor.name: _gguf_name(tensor.name) for tensor in expected}
    unknown = sorted(shapes.keys() - set(names.values()))
    if unknown:
        raise UserError(
            f"{file.path}: tensor '{unknown[0]}' has no place in a Llama model without biases and "
            f"rope factors ({len(unknown)} such tensors). Use the model's own Hugging Face folder."
        )
    for tensor in expected:
        name = names[tensor.name]
        if shapes.get(name) != tensor.shape:
            raise UserError(
                f"{file.path}: tensor '{name}' is {shapes.get(name, 'missing')}, expected shape "
                f"{tensor.shape} according to the file's metadata ({tensor.why}). Copy the file "
                f"again."
            )
        weight = file.tensor(name)
        if tensor.name.endswith("q_proj.weight"):
            weight = _halves(weight, config["num_attention_heads"])
        elif tensor.name.endswith("k_proj.weight"):
            weight = _halves(weight, config["num_key_value_heads"])
        weights[tensor.name] = weight.to(dtype).contiguous()
    return weights


def _refuse_variants(file: GgufFile) -> None:
    """Raise UserError for experts and for rotary positions that are scaled."""
    experts = file.value(f"{ARCHITECTURE}.expert_count", TOKEN, 0)
    if experts:
        raise UserError(
            f"{file.path}: the model is a mixture of {experts} experts, expected a dense Llama. "
            f"Use another model."
        )
    for key, kind, plain in (
        ("scaling.type", TEXT, "none"),
        ("scaling.factor", _POSITIVE, 1.0),
        ("scale_linear", _POSITIVE, 1.0),  # the factor of older files, which llama.cpp reads too
    ):
        found = file.value(f"{ARCHITECTURE}.rope.{key}", kind, plain)
        if found != plain:
            raise UserError(
                f"{file.path}: {ARCHITECTURE}.rope.{key} is '{found}', expected '{plain}'. Use the "
                f"model's own Hugging Face folder."
            )


def _gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor, such as blk.0.attn_q.weight."""
    module, kind = name.rsplit(".", 1)
    if module in _MODEL:
        return f"{_MODEL[module]}.{kind}"
    _, _, index, inner = module.split(".", 3)
    return f"blk.{index}.{_LAYER[inner]}.{kind}"


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Return query or key rows in Hugging Face's order.

    GGUF stores the two channels of a rotated pair in adjacent rows; Hugging Face stores the first
    channels of all pairs of a head, then the second ones.
    """
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
