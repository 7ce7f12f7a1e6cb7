"""Chats, prompts and texts are read from every form of file."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.errors import UserError
from tests.support.chat_files import GOOD, write
from training.data.readers import read_chats, read_prompts, read_texts, render_chats


def test_arrays_give_the_line_of_each_record(tmp_path: Path) -> None:
    text = json.dumps([GOOD, {"id": "x"}, GOOD], indent=1)
    file = write(tmp_path / "chats.json", "\ufeff" + text)
    chats, counts = read_chats(file, max_bad=0.5)
    lines = text.split("\n")
    begins = [number for number, line in enumerate(lines, 1) if line == " {"]
    assert [chat.source for chat in chats] == [f"{file}:{begins[0]}", f"{file}:{begins[2]}"]
    assert list(counts.bad.values()) == [[f"{file}:{begins[1]}"]]


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
