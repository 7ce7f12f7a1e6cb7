"""A drafter folder that is complete and servable: weights, configuration, the target's tokenizer files, card, README, launch lines."""

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from decoding.folder import WEIGHTS, read_json
from training.checkpoint import disk_error, write_text
from training.run_folder import git_revision, hash_input, versions

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
CARD = "drafter_card.json"
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def write_model(
    model: Any, tokenizer_folder: Path, folder: Path, dtype: torch.dtype, draft_tokens: int | None = None
) -> None:
    """Weights (safetensors), configuration, generation settings and the tokenizer files of `tokenizer_folder`, copied byte for byte.

    draft_tokens: pins assisted generation to a constant draft length, as a drafter's folder does. Raises UserError when a write fails.
    """
    stored = model.to(dtype)
    stored.config.dtype = dtype
    stored.generation_config = _generation_config(stored.config, draft_tokens)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stored.save_pretrained(folder)
        _copy_tokenizer(tokenizer_folder, folder)
    except (OSError, SafetensorError) as error:
        raise disk_error(folder, error) from error


def write_untrained(model: Any, tokenizer_folder: Path, folder: Path, dtype: torch.dtype, draft_tokens: int) -> None:
    """What `write_model` writes, with every weight zero in a sparse file, from a model whose tensors are on the meta device."""
    config = model.config
    config.dtype, config.architectures = dtype, [type(model).__name__]
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        _generation_config(config, draft_tokens).save_pretrained(folder)
        _write_zeros(folder / WEIGHTS, shapes, dtype)
        _copy_tokenizer(tokenizer_folder, folder)
    except OSError as error:
        raise disk_error(folder, error) from error


def _write_zeros(path: Path, shapes: dict[str, list[int]], dtype: torch.dtype) -> None:
    """A safetensors file of zeros: the header is written, the rest is a hole that takes no room on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source.resolve() != folder.resolve():
            shutil.copyfile(source / name, folder / name)


def _generation_config(config: Any, draft_tokens: int | None) -> GenerationConfig:
    assisted = {} if draft_tokens is None else _assistant_settings(draft_tokens)
    special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**special, **assisted)


def _assistant_settings(draft_tokens: int) -> dict[str, Any]:
    return {
        "num_assistant_tokens": draft_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def pruning_on_card(folder: Path) -> dict[str, Any] | None:
    """How the model in a folder was cut out of its target, by its card; None where the card, or that, is missing."""
    card = folder / CARD
    return read_json(card).get("pruning") if card.is_file() else None


def write_card(
    folder: Path,
    name: str,
    model: Any,
    target: str,
    target_folder: Path,
    data: dict[str, Any],
    loss: dict[str, Any],
    acceptance: dict[str, Any],
    pruning: dict[str, Any] | None = None,
) -> None:
    """drafter_card.json (where the drafter comes from and what it was measured to do), README.md in Hub form and launch lines.

    pruning: how it was cut out of the target; None where it was not.
    """
    config = model.config
    shape = {
        key: getattr(config, key)
        for key in (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
        )
    }
    card = {
        "name": name,
        "target": target,
        "target_hash": hash_input(target_folder),
        "drafter_hash": hash_input(folder),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shape": shape,
        "data": data,
        "loss": loss,
        "acceptance": acceptance,
        "pruning": pruning,
        "cost_ratio": None,  # eval.run measures it on the machine that will serve
        "git_revision": git_revision(),
        "versions": versions(),
    }
    write_text(folder / CARD, json.dumps(card, indent=1))
    write_text(folder / "README.md", readme(card))


def launch_lines(target: str, drafter: str, draft_tokens: int) -> dict[str, str]:
    """Ready lines for the engines that load the folder."""
    target = target.replace("embedded:", "assets/")  # what ships with the project
    vllm = json.dumps({"method": "draft_model", "model": drafter, "num_speculative_tokens": draft_tokens})
    return {
        "Hugging Face": (
            f"target.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained('{drafter}'))"
            "  # the draft length is pinned in generation_config.json"
        ),
        "vLLM": f"vllm serve {target} --speculative-config '{vllm}'",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm STANDALONE "
            f"--speculative-draft-model-path {drafter} --speculative-num-steps {draft_tokens} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {draft_tokens + 1}"
        ),
    }


def readme(card: dict[str, Any]) -> str:
    """The README of a drafter folder: front matter of the Hugging Face Hub, then what it is and how to start it."""
    lines = "\n\n".join(
        f"**{engine}**\n\n```\n{line}\n```" for engine, line in launch_lines(card["target"], ".", 4).items()
    )
    acceptance = ", ".join(
        f"{key.replace('_', ' ')} {value:.3f}" for key, value in card["acceptance"].items() if isinstance(value, float)
    )
    shape = card["shape"]
    layers = "1 layer" if shape["num_hidden_layers"] == 1 else f"{shape['num_hidden_layers']} layers"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, drafter]
---
# {card["name"]}

A drafter for `{card["target"]}`: {layers}, width {shape["hidden_size"]}, {card["parameters"] / 1e6:.1f} M parameters,
distilled with {card["loss"].get("name", "no loss")}. Held-out: {acceptance or "not measured"}.
It only proposes tokens; the target decides every one of them, so the output is the target's own.

{lines}

`drafter_card.json` says from which target, data and code it comes. Made with Shallow Draft.
"""
