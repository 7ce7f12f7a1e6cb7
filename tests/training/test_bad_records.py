"""Bad records are skipped and counted by file and line, and files with many are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.errors import UserError
from tests.support.chat_files import GOOD, write
from training.config import DataConfig
from training.data.from_config import read_samples
from training.data.readers import Chat, read_chats, read_prompts, read_texts, render_chats

BAD_LINES = {
    "not JSON": '{"id": "b", "conversations": [{"from": "human", "val',
    "found a list, expected a JSON object": "[1, 2]",
    "no turns": json.dumps({"id": "c", "conversations": []}),
    "unknown role 'tool'": json.dumps(
        {"id": "d", "conversations": [{"from": "tool", "value": "x"}]}
    ),
    "a turn of gpt without text": json.dumps(
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": " "}]}
    ),
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_is_skipped_counted_and_named(
    tmp_path: Path, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(
        tmp_path / "chats.jsonl", json.dumps(GOOD), "", BAD_LINES[reason], json.dumps(GOOD)
    )
    chats, counts = read_chats(file, max_bad=0.4)
    assert (counts.read, counts.used, counts.skipped) == (3, 2, 1)
    assert [chat.source for chat in chats] == [f"{file}:1", f"{file}:4"]
    [(named, places)] = counts.bad.items()
    assert named.startswith(reason)
    assert places == [f"{file}:3"]
    assert f"{file}:3" in capsys.readouterr().err


@pytest.mark.parametrize("reason", BAD_LINES)
def test_too_many_bad_lines_are_an_error(tmp_path: Path, reason: str) -> None:
    file = write(tmp_path / "chats.jsonl", json.dumps(GOOD), BAD_LINES[reason])
    with pytest.raises(UserError, match=r"1 of 2 used; 1 skipped") as error:
        read_chats(file)
    assert f"{file}:2" in str(error.value)
    assert reason in str(error.value)
    assert "max_bad" in str(error.value)


def test_an_invalid_byte_is_a_bad_line(tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", json.dumps(GOOD), b'{"id": "\xff"}')
    assert read_chats(file, max_bad=0.5)[1].bad == {"not UTF-8": [f"{file}:2"]}


def test_a_broken_array_names_the_line(tmp_path: Path) -> None:
    whole = json.dumps([GOOD, GOOD], indent=1)
    cut = write(tmp_path / "cut.json", whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut\.json:\d+: broken JSON array"):
        read_chats(cut)
    with pytest.raises(UserError, match=r"more\.json:\d+: broken JSON array: text after the end"):
        read_chats(write(tmp_path / "more.json", whole, "{}"))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "x"}, r"no prompt \(turns, prompt, question"),
        ({"prompt": 3}, "prompt is not a string"),
        ({"question": " "}, "a turn is empty"),
        ({"turns": "one text"}, "turns is not a list of strings"),
    ],
)
def test_records_without_a_prompt_are_refused(
    tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        read_prompts(write(tmp_path / "prompts.jsonl", json.dumps(record)))


def test_chats_that_the_template_refuses_are_counted(embedded_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_target)
    turn = {"role": "user", "content": "Hi"}
    chats = [
        Chat("a", [turn, {"role": "assistant", "content": "Hello"}], "f:1"),
        Chat("b", [turn], "f:2"),
    ]
    rendered, counts = render_chats(tokenizer, chats, max_bad=0.5)
    assert len(rendered) == counts.used == 1
    assert list(counts.bad.values()) == [["f:2"]]
    with pytest.raises(UserError, match=r"no answer .*f:2"):
        render_chats(tokenizer, chats)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "chats.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"chats\.parquet is not a readable table"):
        read_chats(broken)


CUT = json.dumps(
    {"conversations": [{"from": "human", "value": "\ud83d"}, {"from": "gpt", "value": "x"}]}
)
MALFORMED_RECORDS = {
    "half a character": CUT,
    "values nested too deeply": '{"conversations": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a number of too many digits": '{"id": ' + "9" * 10_000 + "}",
    "a role is a list, expected a string": json.dumps(
        {"conversations": [{"from": ["gpt"], "value": "x"}]}
    ),
    "a role is an object, expected a string": json.dumps(
        {"messages": [{"role": {}, "content": "x"}]}
    ),
    "a turn of user without text": json.dumps(
        {"messages": [{"role": "user", "content": {"text": "x"}}]}
    ),
    "a turn of human without text": json.dumps({"instruction": ["x"], "input": "y", "output": "z"}),
    "unknown role None": json.dumps({"conversations": ["x"]}),
    "no turns": json.dumps({"conversations": {"from": "human"}}),
    "found null, expected a JSON object": "null",
}


@pytest.mark.parametrize("reason", MALFORMED_RECORDS)
@pytest.mark.parametrize("array", [False, True])
def test_a_malformed_record_is_skipped_and_counted(
    tmp_path: Path, reason: str, array: bool
) -> None:
    """Check that a malformed record between two valid ones is counted with its reason and line.

    In an array, the record's brackets show where it ends.
    """
    lines = [json.dumps(GOOD), MALFORMED_RECORDS[reason], json.dumps(GOOD)]
    file = tmp_path / ("chats.json" if array else "chats.jsonl")
    file.write_text("[" + ",\n".join(lines) + "]" if array else "\n".join(lines))
    chats, counts = read_chats(file, max_bad=0.4)
    assert (len(chats), counts.read) == (2, 3)
    [(named, places)] = counts.bad.items()
    assert named.startswith(reason) and places == [f"{file}:2"]
    prompts = read_prompts(file, max_bad=0.4)
    assert [prompt.turns for prompt in prompts] == [["Hi"], ["Hi"]]


@pytest.mark.parametrize(
    "text", ['"\\ud83d"', "[" * 100_000, '["a"]', "{}", "7", "null", '"\\udc00 after"']
)
def test_a_malformed_text_is_skipped_and_counted(tmp_path: Path, text: str) -> None:
    file = write(
        tmp_path / "texts.jsonl",
        '{"text": "one"}',
        f'{{"text": {text}}}',
        '{"text": "two \\ud83d\\ude00"}',
    )
    documents, counts = read_texts(file, max_bad=0.4)
    assert documents == ["one", "two \U0001f600"] and counts.skipped == 1


@pytest.mark.parametrize("key", ["id", "category", "turns"])
def test_half_a_character_in_a_prompt_is_counted(tmp_path: Path, key: str) -> None:
    """Check that half a character in a prompt's turns, id or category makes it a bad record.

    Ids and categories are written to reports and records.
    """
    whole = {"id": "a", "category": "b", "turns": ["c"]}
    lines = [
        json.dumps(one)
        for one in (whole, {**whole, key: ["\ud83d"] if key == "turns" else "\ud83d"}, whole)
    ]
    assert len(read_prompts(write(tmp_path / "prompts.jsonl", *lines), max_bad=0.4)) == 2


def test_the_summary_of_a_split_counts_every_record_of_the_file(
    embedded_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that skipped records and those over the limit count as read."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_target)
    half = json.dumps(
        {"conversations": [{"from": "human", "value": "\ud83d"}, {"from": "gpt", "value": "Hello"}]}
    )
    chats = write(tmp_path / "chats.jsonl", *[json.dumps(GOOD)] * 5, half)
    texts = write(tmp_path / "texts.jsonl", *['{"text": "one two three"}'] * 3, '{"text": ""}')
    data = DataConfig(chats=[str(chats)], texts=[str(texts)], max_length=64, max_bad=0.5)
    read_samples(tokenizer, data, "train")
    shown = capsys.readouterr()
    assert "train chats: 5 of 6 used" in shown.out and "1 dropped: half a character" in shown.out
    assert "train texts: 3 of 4 used" in shown.out and "1 dropped: an empty text" in shown.out
    assert (
        "note: chats: 5 of 6 used; 1 skipped: half a character" in shown.err
        and f"({chats}:6)" in shown.err
    )
    data.max_samples = 2
    read_samples(tokenizer, data, "train")
    shown = capsys.readouterr()
    assert (
        "train chats: 2 of 6 used" in shown.out and "3 dropped: over data.max_samples" in shown.out
    )


def test_skipped_prompts_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "prompts.jsonl", '{"prompt": "Hi"}', '{"prompt": 3}')
    assert len(read_prompts(file, max_bad=0.5)) == 1
    assert (
        f"note: prompts: 1 of 2 used; 1 skipped: prompt is not a string ({file}:2)"
        in capsys.readouterr().err
    )


def test_only_the_first_rank_prints_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    read_prompts(
        write(tmp_path / "prompts.jsonl", '{"prompt": "Hi"}', '{"prompt": 3}'), max_bad=0.5
    )
    assert capsys.readouterr().err == ""
