"""Test held-out prompts: their rendering, and experiments refused before their first stage."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from decoding.errors import UserError
from distill.config import TrainConfig
from jobs.config import TargetConfig
from training.config import DataConfig, HeldOutConfig
from training.data.chat import render_prompt, render_text
from training.held_out.answers import check_stages, target_answers

QUESTION = "A man holds a sax.\nThe man"


def make_config(target: Path, prompts: Path, template: str = "auto", **fields: Any) -> TrainConfig:
    prompts.write_text(json.dumps({"prompt": QUESTION}))
    held_out = HeldOutConfig(str(prompts), max_new_tokens=4, **fields)
    data = DataConfig(max_length=128, template=template)
    return TrainConfig(
        job="distill.train",
        target=TargetConfig(str(target), device="cpu"),
        data=data,
        held_out=held_out,
    )


@pytest.mark.parametrize(
    ("template", "fields", "plain"),
    [("auto", {}, True), ("vicuna", {}, False), ("vicuna", {"render": "text"}, True)],
)
def test_base_models_receive_prompts_as_plain_text(
    base_target: Path, tmp_path: Path, template: str, fields: dict[str, str], plain: bool
):
    tokenizer = AutoTokenizer.from_pretrained(base_target)
    config = make_config(base_target, tmp_path / "prompts.jsonl", template, **fields)
    [sample] = target_answers(base_target, tokenizer, config)
    chat = [{"role": "user", "content": QUESTION}]
    expected = (
        render_text(tokenizer, QUESTION)
        if plain
        else render_prompt(tokenizer, chat, template="vicuna")
    )
    assert sample.ids[: int(np.argmax(sample.mask))].tolist() == expected
    assert sample.mask.sum() <= 4


def test_control_targets_with_a_template_receive_rendered_prompts(
    tiny_target: Path, tmp_path: Path
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    [sample] = target_answers(
        tiny_target, tokenizer, make_config(tiny_target, tmp_path / "prompts.jsonl")
    )
    expected = render_prompt(tokenizer, [{"role": "user", "content": QUESTION}])
    assert sample.ids[: int(np.argmax(sample.mask))].tolist() == expected


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        ({"texts": ["a.txt"]}, {}, ""),
        ({"chats": ["a.json"]}, {}, "has no chat template. Choose one of ours"),
        ({"chats": ["a.json"], "template": "vicuna"}, {}, ""),
        ({"template": "vicuna"}, {"benchmark_render": "chat"}, ""),
        (
            {},
            {"benchmark_render": "chat"},
            "benchmark_render=text to leave prompts .* data.template=vicuna",
        ),
        ({}, {"held_out": HeldOutConfig(render="chat")}, "held_out.render=text to leave prompts"),
        (
            {},
            {"benchmark_render": "plain"},
            "benchmark_render 'plain' is unknown, expected one of auto, chat, text",
        ),
        ({}, {"benchmark_prompts": "/nowhere.jsonl"}, "/nowhere.jsonl"),
    ],
)
def test_an_experiment_with_unusable_prompts_is_refused_at_once(
    base_target: Path, tmp_path: Path, data: dict[str, Any], changes: dict[str, Any], message: str
):
    config = make_config(base_target, tmp_path / "prompts.jsonl")
    given = {
        "benchmark_prompts": config.held_out.prompts,
        "data": dataclasses.replace(config.data, **data),
        **changes,
    }
    config = dataclasses.replace(config, **given)
    if not message:
        check_stages(config)
        return
    with pytest.raises(UserError, match=message):
        check_stages(config)
