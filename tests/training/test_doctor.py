"""The page before a training: its sample with the mask, and what it warns of."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from decoding.errors import UserError
from tests.support import tiny_folders
from training.config import DataConfig, LoopConfig, TrainingJobConfig
from training.data.from_config import training_data
from training.data.packing import PackedData, Sample
from training.data.readers import Chat
from training.data.samples import ChatRules, chat_samples
from training.doctor import PAGE, Page, begin, examine, show, write

QUESTIONS = ("one?", "two <b>?", "three?")
FLOPS = 1e12  # of a token


def samples(tokenizer: Any, train_on: str = "answers", length: int = 64) -> list[Sample]:
    chats = [
        Chat(
            question,
            [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"an answer\nto {question}"},
            ],
            "file:1",
        )
        for question in QUESTIONS
    ]
    return [*chat_samples(tokenizer, chats, ChatRules("auto", length, train_on))[0]]


def configured(doctor: bool = True, **data: Any) -> TrainingJobConfig:
    """Return the settings of a training of 10 steps of 64 tokens."""
    return TrainingJobConfig(
        job="a training",
        output_dir="run",
        doctor=doctor,
        assumed_tflops=0.5,
        data=DataConfig(chats=["chats.json"], **data),
        loop=LoopConfig(max_steps=10, tokens_per_step=64),
    )


def page(
    tmp_path: Path,
    tokenizer: Any = None,
    found: list[Sample] | None = None,
    model: nn.Module | None = None,
    **data: Any,
) -> Page:
    tokenizer = tokenizer or tiny_folders.tokenizer()
    found = found or samples(tokenizer)
    return examine(
        configured(**data),
        tokenizer,
        PackedData(found, 64, 1, 0),
        model or nn.Linear(4, 4),
        [tokenizer.eos_token_id],
        tmp_path,
        FLOPS,
        ["train chats: 3 of 4 used; 1 dropped: no turns"],
    )


def printed(found: Page, **terminal: Any) -> str:
    console = Console(file=io.StringIO(), width=100, **terminal)
    show(found, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_answer_is_marked_and_nothing_else(tmp_path: Path) -> None:
    found = page(tmp_path)
    assert found.warnings == []
    text = printed(found)
    assert "<u>three?<a>[[an answer\\nto three?</s>]]" in text
    assert "3 of 3 answers end with an end token" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "\x1b[" not in text
    assert "\x1b[32m" in printed(found, force_terminal=True, color_system="standard")


def test_the_page_of_the_run_has_all_of_it_escaped(tmp_path: Path) -> None:
    html = write(page(tmp_path), tmp_path).read_text()
    assert (tmp_path / PAGE).is_file()
    assert "<mark>an answer\nto three?&lt;/s&gt;</mark>" in html
    assert "1 dropped: no turns" in html
    assert 'name="viewport"' in html and "http" not in html


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("the user's turns", {"train_on": "all"}),
        ("never learns where the target stops", {"length": 12}),
    ],
)
def test_what_lowers_acceptance_is_a_warning(
    words: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = tiny_folders.tokenizer()
    data = {"train_on": changed["train_on"]} if "train_on" in changed else {}
    found = page(tmp_path, tokenizer, samples(tokenizer, **changed), **data)
    assert len(found.warnings) == 1 and words in found.warnings[0]
    assert words in printed(found).replace("\n", " ")


def test_a_template_that_begins_twice_is_a_warning(tmp_path: Path) -> None:
    tokenizer = tiny_folders.tokenizer()
    tokenizer.chat_template = "<s><s>" + tiny_folders.TEMPLATE
    assert "two start tokens" in page(tmp_path, tokenizer, samples(tokenizer)).warnings[0]


def test_a_mark_that_is_no_token_is_plain_text(tmp_path: Path) -> None:
    tokenizer = tiny_folders.tokenizer()
    tokenizer.chat_template = tiny_folders.TEMPLATE.replace("<u>", "<|user|>")
    found = page(tmp_path, tokenizer, samples(tokenizer))
    assert "<|user|> are plain text" in found.checks["template"]


def test_a_template_that_rejects_all_chats_ends_the_training_with_its_reason(
    tmp_path: Path,
) -> None:
    tokenizer = tiny_folders.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no chats today') }}"
    chat = {
        "messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}]
    }
    (tmp_path / "chats.json").write_text(json.dumps([chat] * 3))
    data = DataConfig(chats=[str(tmp_path / "chats.json")], max_length=64)
    with pytest.raises(UserError, match="no chats today"):
        training_data(tokenizer, data, configured().loop, seed=0)


def test_a_template_that_rejects_the_doctors_own_chat_is_not_checked(tmp_path: Path) -> None:
    tokenizer = tiny_folders.tokenizer()
    found = samples(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('begin with a system prompt') }}"
    assert "template" not in page(tmp_path, tokenizer, found).checks


def test_checkpoints_that_do_not_fit_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type("Usage", (), {"free": 10})
    monkeypatch.setattr("training.doctor.shutil.disk_usage", lambda _: full)
    assert "checkpoints need" in page(tmp_path).warnings[0]


def test_plain_text_has_no_answers(tmp_path: Path) -> None:
    text = [Sample(np.arange(5, 20, dtype=np.int32), np.arange(15) > 0)]
    assert "ends" not in page(tmp_path, None, text).checks


def test_the_cost_of_the_run_is_that_of_its_plan(tmp_path: Path) -> None:
    """Check 10 steps of 64 tokens, of 1 TFLOP each, at 0.5 TFLOP/s."""
    words = "640 tokens in 10 steps, 640.0 TFLOP, 0.36 hours at 0.5 TFLOP/s (assumed_tflops)"
    assert page(tmp_path).checks["cost"] == words


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 12), (torch.bfloat16, 14)])
def test_a_checkpoint_has_weights_moments_and_masters(
    dtype: torch.dtype, bytes_each: int, tmp_path: Path
) -> None:
    model = nn.Linear(1000, 1000, bias=False, dtype=dtype)
    assert page(tmp_path, model=model).checks["disk"].startswith(f"{bytes_each} MB a checkpoint")
    model.requires_grad_(False)
    stored = bytes_each - 8 - 4 * (dtype == torch.bfloat16)
    assert page(tmp_path, model=model).checks["disk"].startswith(f"{stored:.1f} MB a checkpoint")


@pytest.mark.parametrize("doctor", [True, False])
def test_the_page_can_be_switched_off(
    doctor: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_folders.tokenizer()
    data = PackedData(samples(tokenizer), 64, 1, 0)
    config, model = configured(doctor), nn.Linear(4, 4)
    begin(config, tokenizer, data, model, [tokenizer.eos_token_id], tmp_path, FLOPS, [])
    assert (tmp_path / PAGE).exists() == doctor
    assert bool(capsys.readouterr().out) == doctor
