"""The page before a training: its sample with the mask, and what it warns of."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch import nn

from tests.support import tiny_folders
from training.config import DataConfig, LoopConfig
from training.data.packing import PackedData, Sample
from training.data.readers import Chat
from training.data.samples import ChatRules, chat_samples
from training.doctor import PAGE, Page, examine, show, write

QUESTIONS = ("one?", "two <b>?", "three?")


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


def page(
    tmp_path: Path, tokenizer: Any = None, found: list[Sample] | None = None, **data: Any
) -> Page:
    tokenizer = tokenizer or tiny_folders.tokenizer()
    found = found or samples(tokenizer)
    return examine(
        "a training",
        tokenizer,
        PackedData(found, 64, 1, 0),
        DataConfig(chats=["chats.json"], **data),
        LoopConfig(),
        nn.Linear(4, 4),
        [tokenizer.eos_token_id],
        tmp_path,
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
    assert "http" not in html


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


def test_checkpoints_that_do_not_fit_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type("Usage", (), {"free": 10})
    monkeypatch.setattr("training.doctor.shutil.disk_usage", lambda _: full)
    assert "checkpoints need" in page(tmp_path).warnings[0]


def test_plain_text_has_no_answers(tmp_path: Path) -> None:
    text = [Sample(np.arange(5, 20, dtype=np.int32), np.arange(15) > 0)]
    assert "ends" not in page(tmp_path, None, text).checks
