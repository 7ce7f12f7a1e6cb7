"""A drafter folder that is complete and servable: weights, configuration, the target's tokenizer files, card, README, launch lines."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

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


def write_model(
    model: Any, tokenizer_folder: Path, folder: Path, dtype: torch.dtype, draft_tokens: int | None = None
) -> None:
    """Weights (safetensors), configuration, generation settings and the tokenizer files of `tokenizer_folder`, copied byte for byte.

    draft_tokens: pins assisted generation to a constant draft length, as a drafter's folder does. Raises UserError when a write fails.
    """
    assisted = {} if draft_tokens is None else _assistant_settings(draft_tokens)
    stored = model.to(dtype)
    stored.config.dtype = dtype
    special = {
        "bos_token_id": stored.config.bos_token_id,
        "eos_token_id": stored.config.eos_token_id,
        "pad_token_id": stored.config.pad_token_id,
    }
    stored.generation_config = GenerationConfig(**special, **assisted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stored.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            source = tokenizer_folder / name
            if source.is_file() and tokenizer_folder.resolve() != folder.resolve():
                shutil.copyfile(source, folder / name)
    except Exception as error:  # safetensors raises its own type for a failed write
        raise disk_error(folder, error) from error


def _assistant_settings(draft_tokens: int) -> dict[str, Any]:
    return {
        "num_assistant_tokens": draft_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def write_card(
    folder: Path,
    name: str,
    model: Any,
    target: str,
    target_folder: Path,
    data: dict[str, Any],
    loss: dict[str, Any],
    acceptance: dict[str, Any],
) -> None:
    """drafter_card.json (where the drafter comes from and what it was measured to do), README.md in Hub form and launch lines."""
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
        "cost_ratio": None,  # eval.run measures it on the machine that will serve
        "git_revision": git_revision(),
        "versions": versions(),
    }
    write_text(folder / CARD, json.dumps(card, indent=1))
    write_text(folder / "README.md", readme(card))


def launch_lines(target: str, drafter: str, draft_tokens: int) -> dict[str, str]:
    """Ready lines for the engines that load the folder."""
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
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, drafter]
---
# {card["name"]}

A drafter for `{card["target"]}`: {shape["num_hidden_layers"]} layers, width {shape["hidden_size"]}, {card["parameters"] / 1e6:.1f} M parameters,
distilled with {card["loss"].get("name", "no loss")}. Held-out: {acceptance or "not measured"}.
It only proposes tokens; the target decides every one of them, so the output is the target's own.

{lines}

`drafter_card.json` says from which target, data and code it comes. Made with Shallow Draft.
"""
