"""Small GGUF files: a random Llama model and a tokenizer, written as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from sentencepiece import sentencepiece_model_pb2
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

Q8_0 = gguf.GGMLQuantizationType.Q8_0
SPECIAL, USER = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<tab>",)
MERGES = ("h e", "Ġ t", "Ġt he", "Ġ Ġ", "1 2")
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
# tensors of a layer: Hugging Face's name -> GGUF's
LAYER = {
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
Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def tiny_llama(tied: bool = False, vocab_size: int | None = None) -> LlamaForCausalLM:
    """Return a random model of two layers, with the vocabulary of `byte_level` by default."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size or len(byte_level()["tokenizer.ggml.tokens"]),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def byte_level(pre: str = "smollm") -> dict[str, Any]:
    """Return the metadata of a byte-level BPE tokenizer with a few merges."""
    symbols = list(bytes_to_unicode().values())
    tokens = [*SPECIAL, *symbols, *(merge.replace(" ", "") for merge in MERGES), *USER]
    types = [3] * len(SPECIAL) + [1] * (len(symbols) + len(MERGES)) + [4] * len(USER)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def sentence_piece(model: Path) -> dict[str, Any]:
    """Return the metadata of the tokenizer in a tokenizer.model."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())  # type: ignore[attr-defined]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in proto.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def metadata_of(model: LlamaForCausalLM) -> dict[str, Any]:
    """Return the metadata of a model's shape."""
    config = model.config
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": 100000.0,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return query or key rows in the order of llama.cpp's converter."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def tensors_of(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """Return a model's tensors by their GGUF names, in GGUF's order of rows."""
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    found = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        found["output.weight"] = state["lm_head.weight"]
    for layer in range(model.config.num_hidden_layers):
        for theirs, ours in LAYER.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours == "attn_q":
                weight = permute(weight, model.config.num_attention_heads)
            elif ours == "attn_k":
                weight = permute(weight, model.config.num_key_value_heads)
            found[f"blk.{layer}.{ours}.weight"] = weight
    return found


def write(
    path: Path,
    model: LlamaForCausalLM,
    tokenizer: dict[str, Any] | None = None,
    change: Change | None = None,
    architecture: str = "llama",
    quantized: tuple[str, ...] = (),
) -> Path:
    """Write a GGUF file and return its path.

    change: edits the metadata and the tensors before they are written; a value of None removes a
    key. quantized: the tensors that are stored in Q8_0.
    """
    metadata = metadata_of(model) | (byte_level() if tokenizer is None else tokenizer)
    tensors = tensors_of(model)
    if change is not None:
        change(metadata, tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, weight in tensors.items():
        if name in quantized:
            writer.add_tensor(name, gguf.quantize(weight, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
