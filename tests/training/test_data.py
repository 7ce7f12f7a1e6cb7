"""Test the readers: bad records are counted by file and line, and files with many are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.errors import UserError
from training.config import DataConfig
from training.data.from_config import read_samples
from training.data.readers import Chat, read_chats, read_prompts, read_texts, render_chats

GOOD = {
    "id": "a",
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
}
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


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n"
    )
    return path


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


def test_arrays_give_the_line_of_each_record(tmp_path: Path) -> None:
    text = json.dumps([GOOD, {"id": "x"}, GOOD], indent=1)
    file = write(tmp_path / "chats.json", "\ufeff" + text)
    chats, counts = read_chats(file, max_bad=0.5)
    lines = text.split("\n")
    begins = [number for number, line in enumerate(lines, 1) if line == " {"]
    assert [chat.source for chat in chats] == [f"{file}:{begins[0]}", f"{file}:{begins[2]}"]
    assert list(counts.bad.values()) == [[f"{file}:{begins[1]}"]]


def test_a_broken_array_names_the_line(tmp_path: Path) -> None:
    whole = json.dumps([GOOD, GOOD], indent=1)
    cut = write(tmp_path / "cut.json", whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut\.json:\d+: broken JSON array"):
        read_chats(cut)
    with pytest.raises(UserError, match=r"more\.json:\d+: broken JSON array: text after the end"):
        read_chats(write(tmp_path / "more.json", whole, "{}"))


def test_messages_are_read_with_their_roles(tmp_path: Path) -> None:
    record = {
        "messages": [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    }
    [chat], _ = read_chats(write(tmp_path / "chats.jsonl", json.dumps(record)))
    assert chat.messages == record["messages"]


@pytest.mark.parametrize("read", [read_chats, read_prompts, read_texts])
def test_missing_empty_and_unknown_files_are_refused(tmp_path: Path, read) -> None:
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="empty"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match=r"unknown kind of file '\.csv'"):
        read(write(tmp_path / "table.csv", "a,b"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder holds no"):
        read(tmp_path / "folder")
    with pytest.raises(UserError, match="no records"):
        read(write(tmp_path / "blank.jsonl", "", ""))


def test_prompts_are_read_from_turns_and_chats(tmp_path: Path) -> None:
    with_system = {
        "id": "s",
        "conversations": [{"from": "system", "value": "Be brief."}, *GOOD["conversations"]],
    }
    turns = {"id": "t", "category": "c", "turns": ["one", "two"]}
    prompts = read_prompts(
        write(tmp_path / "prompts.jsonl", *map(json.dumps, (turns, GOOD, with_system)))
    )
    assert [prompt.turns for prompt in prompts] == [["one", "two"], ["Hi"], ["Be brief.\n\nHi"]]
    assert prompts[0].category == "c"
    with pytest.raises(UserError, match=r"turns is not a list of strings .*bad\.jsonl:1"):
        read_prompts(write(tmp_path / "bad.jsonl", json.dumps({"turns": []})))


@pytest.mark.parametrize(
    ("record", "turns", "named"),
    [
        (
            {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "test": "assert"},
            ["def f(x):\n"],
            "HumanEval/0",
        ),
        ({"prompt": "A man holds a sax. he"}, ["A man holds a sax. he"], "place"),
        ({"question": "How many eggs?", "answer": "#### 18"}, ["How many eggs?"], "place"),
        (
            {"prompt_id": 81, "category": "writing", "prompt": ["Write.", "Again."]},
            ["Write.", "Again."],
            "81",
        ),
        ({"question_id": 7, "turns": ["One", "Two"], "prompt": "not this"}, ["One", "Two"], "7"),
        ({"prompt": "not this", **GOOD}, ["Hi"], "a"),
    ],
)
def test_published_prompt_formats_are_read(
    tmp_path: Path, record: dict[str, Any], turns: list[str], named: str
) -> None:
    file = write(tmp_path / "prompts.json", json.dumps(record))
    [prompt] = read_prompts(file)
    assert prompt.turns == turns
    assert prompt.id == (f"{file}:1" if named == "place" else named)


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


def test_every_sharegpt_role_is_known(tmp_path: Path) -> None:
    """Check that every product's role for answers is read as the assistant's."""
    for answers in ("gpt", "chatgpt", "bing", "bard", "assistant"):
        for asks in ("human", "user"):
            turns = [("system", "Be brief."), (asks, "Hi"), (answers, "Hello")]
            record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
            [chat], counts = read_chats(write(tmp_path / "chats.jsonl", json.dumps(record)))
            assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
            assert (counts.read, counts.used) == (1, 1)


def test_answers_before_the_first_request_are_cut_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that answers before the first request are cut and counted, and that the rest is used.

    ShareGPT's long chats were split anywhere. Counted as bad records, such chats would exceed the
    limit in some files.
    """
    turns = [
        ("system", "Be brief."),
        ("gpt", "and so on."),
        ("human", "Thanks. Why?"),
        ("gpt", "Because."),
    ]
    late = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    chats, counts = read_chats(write(tmp_path / "chats.jsonl", json.dumps(late)), max_bad=0.0)
    assert [message["content"] for message in chats[0].messages] == [
        "Be brief.",
        "Thanks. Why?",
        "Because.",
    ]
    assert (counts.used, counts.skipped) == (1, 0)
    assert counts.cut == {"answers before the first request": [chats[0].source]}
    assert "1 cut: answers before the first request" in capsys.readouterr().err


def test_texts_are_read_and_bad_ones_counted(tmp_path: Path) -> None:
    write(
        tmp_path / "a.jsonl",
        json.dumps({"text": "one"}),
        json.dumps({"txt": "two"}),
        json.dumps({"text": "three"}),
        json.dumps({"text": " "}),
    )
    write(tmp_path / "b.py", "x = 1")
    write(tmp_path / "c.txt", b"\xff\xfe")
    (tmp_path / "d.md").touch()
    documents, counts = read_texts(tmp_path, max_bad=0.6)
    assert documents == ["one", "three", "x = 1\n"]
    assert (counts.read, counts.used, counts.skipped) == (7, 3, 4)
    assert counts.bad == {
        'no "text"': [f"{tmp_path}/a.jsonl:2"],
        "an empty text": [f"{tmp_path}/a.jsonl:4", f"{tmp_path}/d.md"],
        "not UTF-8": [f"{tmp_path}/c.txt"],
    }
    with pytest.raises(UserError, match="3 of 7 used"):
        read_texts(tmp_path)


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


def test_published_files_are_read_completely(shared_data: Path) -> None:
    chats, counts = read_chats(
        [shared_data / "chat" / "mt_bench_101.json", shared_data / "fixtures"]
    )
    assert counts.read == counts.used == len(chats) == 1346 + 500 + 1
    assert len(read_prompts(shared_data / "eval" / "spec_bench.jsonl")) == 480
    published = read_prompts(shared_data / "eval" / "raw" / "HumanEval.jsonl")
    ours = read_prompts(shared_data / "eval" / "humaneval.jsonl")
    assert [(one.id, one.turns) for one in published] == [(one.id, one.turns) for one in ours]
    documents, counts = read_texts(shared_data / "text" / "redpajama_sample", max_bad=0.001)
    assert len(documents) == counts.used == counts.read - 1, "one arXiv record has no text"


def test_embedded_prompts_and_answers_are_held_out(embedded_target: Path) -> None:
    folder = embedded_target.parent
    prompts = read_prompts(folder / "prompts.jsonl")
    held_out, _ = read_chats(folder / "held_out_chats.json")
    chats, _ = read_chats(folder / "chats.json")
    assert len(prompts) >= 120
    requests = {prompt.turns[0] for prompt in prompts}
    assert not requests & {message["content"] for chat in held_out for message in chat.messages}
    bodies = {
        message["content"]
        for chat in chats
        for message in chat.messages
        if message["role"] == "assistant"
    }
    assert not bodies & {
        message["content"]
        for chat in held_out
        for message in chat.messages
        if message["role"] == "assistant"
    }


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved"])
def test_tables_are_read_like_lines(tmp_path: Path, kind: str) -> None:
    import datasets

    rows = [
        GOOD,
        {
            "id": "b",
            "conversations": [{"from": "human", "value": "Two"}, {"from": "gpt", "value": "2"}],
        },
    ]
    table = datasets.Dataset.from_list(rows)
    saved = tmp_path / "saved"
    table.save_to_disk(str(saved))
    (arrow,) = saved.glob("*.arrow")
    table.to_parquet(str(tmp_path / "chats.parquet"))
    path = {"parquet": tmp_path / "chats.parquet", "arrow": arrow, "saved": saved}[kind]
    chats, counts = read_chats(path)
    lines, _ = read_chats(write(tmp_path / "chats.jsonl", *(json.dumps(row) for row in rows)))
    assert [(chat.id, chat.messages) for chat in chats] == [
        (chat.id, chat.messages) for chat in lines
    ]
    assert [chat.source for chat in chats] == [f"{path}:1", f"{path}:2"]
    assert (counts.read, counts.used) == (2, 2)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "chats.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"chats\.parquet is not a readable table"):
        read_chats(broken)


def test_prompts_have_unique_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    ids: list[Any] = ["a", "b", "a", "a (2)", "a", None, None]
    path.write_text(
        "".join(json.dumps({"id": id, "prompt": f"p{n}"}) + "\n" for n, id in enumerate(ids))
    )
    prompts = read_prompts(path)
    assert [prompt.id for prompt in prompts] == [
        *("a", "b", "a (2)", "a (2) (2)", "a (3)", f"{path}:6", f"{path}:7")
    ]
    assert [prompt.turns for prompt in prompts] == [[f"p{n}"] for n in range(7)]
    assert "3 have the id of an earlier one and were numbered, such as 'a (2)'" in (
        capsys.readouterr().err
    )
    path.write_text("".join(json.dumps({"id": n, "prompt": "p"}) + "\n" for n in range(3)))
    assert [prompt.id for prompt in read_prompts(path)] == ["0", "1", "2"]
    assert capsys.readouterr().err == ""


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


def test_chats_for_a_tokenizer_without_a_template_are_refused_at_once(
    embedded_target: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_target)
    tokenizer.chat_template = None
    [chat], _ = read_chats(write(tmp_path / "chats.jsonl", json.dumps(GOOD)))
    with pytest.raises(
        UserError, match=r"has no chat template. Choose one of ours .data.template="
    ) as error:
        render_chats(tokenizer, [chat], max_bad=1.0)
    assert "used" not in str(error.value)
    assert len(render_chats(tokenizer, [chat], template="qwen")[0]) == 1
