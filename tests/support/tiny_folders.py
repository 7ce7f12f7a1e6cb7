"""Folders of a tiny random LLaMA with a tokenizer of characters, prompt files and evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.config import BenchmarkConfig, EvalConfig
from jobs.config import TargetConfig

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<u>{{ message['content'] }}{% "
    "else %}<a>{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% endif %}{% endfor "
    "%}{% if add_generation_prompt %}<a>{% endif %}"
)
GAMMAS = (1, 3)
SPECIAL = ["<unk>", "<s>", "</s>", "<u>", "<a>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per character; `<u>` starts a question, `<a>` an answer."""
    letters = SPECIAL + [chr(code) for code in range(32, 127)] + ["\n"]
    core = Tokenizer(
        models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<u>", "<a>"],
        chat_template=TEMPLATE,
    )
    return fast


def save(folder: Path, *, layers: int = 3, context: int = 256, seed: int = 0) -> Path:
    """Write a model folder with the first `layers` layers of a random four-layer model.

    Models of one seed differ only in their number of layers and their `context`.
    """
    words = tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # The scaled embeddings outweigh what the later layers add, so a model of the first layers
        # often agrees with this one.
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.mul_(1.0 if index == 0 else 2.0)
            layer.mlp.down_proj.weight.mul_(1.0 if index == 0 else 2.0)
        model.model.embed_tokens.weight.mul_(20.0)
        model.lm_head.weight.mul_(20.0)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def prompts(path: Path, count: int = 6, turns: int = 1) -> Path:
    """Write a file of `count` prompts of `turns` turns each, in two categories."""
    lines = [
        {
            "id": f"p{n}",
            "category": ("odd", "even")[n % 2],
            "turns": [f"Question {n}, part {k}?" for k in range(turns)],
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def config(home: Path, name: str, **changes: object) -> EvalConfig:
    """Return an evaluation of the drafter `shallow` in `home`, with the run folder `name`."""
    values = {
        "job": "eval.run",
        "output_dir": str(home / name),
        "target": TargetConfig(path=str(home / "target"), dtype="float64", device="cpu"),
        "benchmark": BenchmarkConfig(path=str(home / "prompts.jsonl")),
        "drafters": [str(home / "shallow")],
        "sweep": list(GAMMAS),
        "sweep_prompts": 2,
        "max_new_tokens": 12,
        "timing_repeats": 2,
        "bootstrap_resamples": 50,
        "stop_at_eos": False,
        "stopping": "fixed",  # counts then do not depend on the clock
    }
    return EvalConfig(**{**values, **changes})  # type: ignore[arg-type]
