"""Test tokenizing in several processes: the same tokens, counts and notes, and a killed process."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.errors import UserError
from training.config import DataConfig
from training.data import samples
from training.data.from_config import read_samples
from training.data.workers import map_batches


@pytest.fixture(scope="module")
def tokenizer(embedded_target: Path) -> Any:
    return AutoTokenizer.from_pretrained(embedded_target)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Return chats and texts of several files, a few of them broken, in a dozen small batches."""
    monkeypatch.setattr(samples, "BATCH", 20_000)
    texts, chats = tmp_path / "texts.jsonl", [tmp_path / "chats.json", tmp_path / "more.json"]
    lines = [json.dumps({"text": f"number {n} " * (500 + n)}) for n in range(20)]
    texts.write_text("\n".join([*lines, '{"text": ""}']))
    for name, path in enumerate(chats):
        turns = [
            {"from": who, "value": f"{name} {who} {n} " * (n % 50)}
            for n in range(400)
            for who in ("human", "gpt")
        ]
        records = [{"conversations": turns[n : n + 2]} for n in range(0, len(turns), 2)]
        path.write_text(json.dumps(records))
    return DataConfig(
        chats=list(map(str, chats)), texts=[str(texts)], max_length=256, max_bad=0.1, cache="none"
    )


def read(tokenizer: Any, data: DataConfig, workers: int) -> list[Any]:
    found = read_samples(tokenizer, dataclasses.replace(data, workers=workers), "train")
    return [(sample.ids.tobytes(), sample.mask.tobytes()) for sample in found]


def test_tokens_counts_and_notes_do_not_depend_on_the_number_of_processes(
    tokenizer: Any, data: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = read(tokenizer, data, 1)
    printed = capsys.readouterr()
    assert "texts: 20 of 21 used" in printed.out and "of 800 used" in printed.out
    assert "dropped: an empty" in printed.out and "texts.jsonl" in printed.err
    assert read(tokenizer, data, 3) == alone
    assert capsys.readouterr() == printed
    assert read(tokenizer, dataclasses.replace(data, max_length=128), 3) != alone, "control"


def pid_of(tokenizer: Any, batch: int, ending: int) -> int:
    """Return this process's id; batch `ending` kills the process."""
    if batch == ending:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_batches_of_several_processes_leave_this_one_but_for_the_first() -> None:
    found = list(map_batches(pid_of, None, range(40), (-1,), 2))
    assert len(found) == 40 and found[0] == os.getpid() and os.getpid() not in found[1:]
    assert list(map_batches(pid_of, None, range(40), (-1,), 1)) == [os.getpid()] * 40
    assert list(map_batches(pid_of, None, [], (-1,), 2)) == []


def test_a_killed_process_is_an_error_that_names_the_key() -> None:
    with pytest.raises(UserError, match=r"one of 2 processes .* killed.*data\.workers"):
        list(map_batches(pid_of, None, range(40), (20,), 2))


def test_an_error_of_the_template_is_raised_once_with_its_places(
    tokenizer: Any, data: DataConfig
) -> None:
    """More bad chats than data.max_bad allows end the job in the same words."""
    found = []
    for workers in (1, 3):
        strict = dataclasses.replace(data, texts=[], max_bad=0.0, workers=workers)
        with pytest.raises(UserError) as error:
            read_samples(tokenizer, strict, "train")
        found.append(str(error.value))
    assert found[0] == found[1] and "chats.json:1" in found[0]


def test_a_negative_number_of_processes_is_refused(tokenizer: Any, data: DataConfig) -> None:
    with pytest.raises(UserError, match=r"data\.workers is -1"):
        read(tokenizer, data, -1)
