"""A target, a fair drafter of it and a broken copy, in folders that engines load."""

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import tiny_folders as tiny


def write_target(folder: Path) -> Path:
    """Write a random model in which attention decides the next token, with `tiny`'s tokenizer."""
    words = tiny.tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def write_drafter(target: Path, folder: Path, noise: float) -> Path:
    """Write the target with noise on its weights, a drafter that is often right.

    noise: standard deviation, as a share of that of each weight.
    """
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in layer.parameters():
                if weight.dim() == 2:
                    weight.add_(torch.randn_like(weight) * weight.std() * noise)
    return _save(model, target, folder)


def write_broken(drafter: Path, folder: Path) -> Path:
    """Write a drafter whose q and k rows are in the order of interleaved rope, as GGUF files have.

    A loader that takes the one order for the other makes this fault.
    """
    model = LlamaForCausalLM.from_pretrained(drafter, dtype=torch.float32)
    config = model.config
    with torch.no_grad():
        for layer in model.model.layers:
            for weight, heads in (
                (layer.self_attn.q_proj.weight, config.num_attention_heads),
                (layer.self_attn.k_proj.weight, config.num_key_value_heads),
            ):
                halves = weight.view(heads, 2, -1, weight.shape[1])
                weight.copy_(halves.transpose(1, 2).reshape(weight.shape))
    return _save(model, drafter, folder)


def _save(model: LlamaForCausalLM, tokenizer_from: Path, folder: Path) -> Path:
    model.save_pretrained(folder)
    for file in tokenizer_from.iterdir():
        if not file.name.startswith(("model", "config")):
            shutil.copy(file, folder)
    return folder
