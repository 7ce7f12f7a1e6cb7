"""Formats of logged outputs, joined with their prompts, and the errors that name a line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from eval.config import BenchmarkConfig
from eval.logged.reading import read_log
from eval.logged.texts import LoggedTexts, Reader
from tests.support import tiny_folders as tiny

TOKENIZER = tiny.tokenizer()
STOP = TOKENIZER.eos_token_id
HELLO = TOKENIZER("Hello there")["input_ids"]
PROMPT = TOKENIZER("<u>Hi?<a>")["input_ids"]


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def texts_of(
    path: Path, prompts: Path | None = None, requests: str = "", **settings: Any
) -> LoggedTexts:
    benchmark = BenchmarkConfig(path=str(prompts or ""), **{"turns": "all", **settings})
    log = read_log(str(path), requests)
    return Reader(log, benchmark, TOKENIZER, len(TOKENIZER), (STOP,)).read()


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat_body(content: str | None = "Hello there", **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}}
    return {"id": "x", "object": "chat.completion", "choices": [choice], **fields}


REQUEST = {"messages": [message("user", "Hi?")], "max_tokens": 40, "temperature": 0.0}
# one output, `Hello there` after `<u>Hi?<a>`, in every format with prompts of its own
ALONE: dict[str, Any] = {
    "prompt and text": {"prompt": "Hi?", "output": "Hello there"},
    "prompt and response": {"prompt": "Hi?", "response": "Hello there"},
    "prompt and ids": {"prompt": "Hi?", "token_ids": HELLO},
    "ids and ids": {"prompt_token_ids": PROMPT, "token_ids": HELLO, "output": "Hello there"},
    "ShareGPT": {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "Hi?"},
            {"from": "gpt", "value": "Hello there"},
        ],
    },
    "messages": {"messages": [message("user", "Hi?"), message("assistant", "Hello there")]},
    "vLLM RequestOutput": {
        "request_id": "1",
        "prompt_token_ids": PROMPT,
        "outputs": [{"text": "Hello there", "token_ids": HELLO}],
    },
    "request and response": {"request": REQUEST, "response": chat_body()},
    "response beside its request": {**REQUEST, **chat_body()},
    "text of a response": {"prompt": "Hi?", "response": "Hello there"},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}],
        "choices": chat_body()["choices"],
    },
    "response with ids": chat_body(
        prompt_token_ids=PROMPT, usage={"prompt_tokens": len(PROMPT), "completion_tokens": 11}
    ),
    "completion": {
        "request": {"prompt": "<u>Hi?<a>"},
        "response": {"choices": [{"text": "Hello there", "token_ids": HELLO}]},
    },
}


@pytest.mark.parametrize("form", ALONE)
def test_every_form_gives_the_same_output(form: str, tmp_path: Path) -> None:
    (text,) = texts_of(written(tmp_path / "log.jsonl", ALONE[form])).texts
    assert (text.prompt, text.tokens) == (PROMPT, HELLO)
    assert text.limit == len(HELLO), "it is not known to end by itself"


@pytest.mark.parametrize("form", ["request and response", "completion"])
def test_limits_and_temperatures_of_requests_are_read(form: str, tmp_path: Path) -> None:
    record = json.loads(json.dumps(ALONE[form]))
    record["request"] |= {"max_tokens": 40, "temperature": 0.5}
    record["response"]["choices"][0]["token_ids"] = [*HELLO, STOP]
    found = texts_of(written(tmp_path / "log.jsonl", record))
    assert found.temperature == 0.5
    assert (found.texts[0].tokens, found.texts[0].limit) == ([*HELLO, STOP], 40)


def prompt_file(tmp_path: Path, *ids_: str) -> Path:
    lines = [{"id": one, "category": "even", "turns": ["Hi?", "And?"]} for one in ids_]
    return written(tmp_path / "prompts.jsonl", *lines)


@pytest.mark.parametrize("form", ["turns", "choices"])
def test_answers_join_their_prompts_and_follow_each_other(form: str, tmp_path: Path) -> None:
    answers = ["Hello there", "No"]
    record: dict[str, Any] = {"id": "b", "turns": answers}
    if form == "choices":
        record = {"question_id": "b", "choices": [{"index": 0, "turns": answers}]}
    path = written(tmp_path / "log.jsonl", record)
    found = texts_of(path, prompt_file(tmp_path, "a", "b")).texts
    assert [(one.prompt_id, one.category, one.turn) for one in found] == [
        ("b", "even", 0),
        ("b", "even", 1),
    ]
    assert found[1].prompt == ids("<u>Hi?<a>Hello there</s><u>And?<a>")
    assert found[1].tokens == ids("No")
    first = texts_of(path, prompt_file(tmp_path, "b"), turns="first").texts
    assert [one.turn for one in first] == [0]


def test_published_tensors_join_their_prompts_in_order(tmp_path: Path) -> None:
    """Check tensors over several lines, of several rows, with a stop token inside."""
    path = tmp_path / "log.txt"
    broken = f"{', '.join(map(str, HELLO[:4]))},\n         {', '.join(map(str, HELLO[4:]))}"
    rows = f"[[{broken}, {STOP}, 0, 0]]"
    path.write_text(f"tensor({rows})\ntensor([[7, 8],\n        [9, 10]])\n")
    found = texts_of(path, prompt_file(tmp_path, "a", "b", "c"))
    assert [one.tokens for one in found.texts] == [[*HELLO, STOP], [7, 8], [9, 10]]
    assert found.texts[0].prompt == PROMPT and found.texts[0].limit > 1000
    assert "went on after a stop token" in found.notes[0]
    assert not found.tokenized


def test_outputs_that_repeat_their_prompts_lose_them(tmp_path: Path) -> None:
    path, prompts = tmp_path / "log.txt", prompt_file(tmp_path, "a")
    path.write_text(f"tensor([{[*PROMPT, *HELLO]}])")
    assert texts_of(path, prompts).texts[0].tokens == HELLO
    path.write_text(f"tensor([{HELLO}])")
    assert texts_of(path, prompts).texts[0].tokens == HELLO


# content of a prompt file -> words of its error, beginning with the file's name
WRONG_PROMPTS: dict[bytes, str] = {
    b"": r"prompts.jsonl: the file is empty",
    b"\n \n": r"prompts.jsonl holds no records",
    b'{"id": "a", "turns": ["Hi?"]}\n{"id": "b", "turns": [': r"not JSON.*prompts.jsonl:2\)",
    b'{"id": "a", "turns": ["Hi?"]}\n{"id": "b"}': r"no prompt .*prompts.jsonl:2\)",
    b'{"id": "a", "turns": [3]}': r"turns is not a list of strings .*prompts.jsonl:1\)",
    b'{"id": "a", "turns": ["Hi?"]}\n{"id": "b", "turns": ["\xff"]}': r"UTF-8 .*prompts.jsonl:2\)",
}


@pytest.mark.parametrize("content", WRONG_PROMPTS, ids=[str(n) for n in range(len(WRONG_PROMPTS))])
def test_a_malformed_prompt_file_is_refused_with_its_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(content)
    log = written(tmp_path / "log.jsonl", {"id": "a", "turns": ["Hello there"]})
    with pytest.raises(UserError, match=WRONG_PROMPTS[content]):
        texts_of(log, tmp_path / "prompts.jsonl")


def test_one_bad_prompt_of_many_is_refused(tmp_path: Path) -> None:
    """Check that no prompt is left out: the outputs after it would get those of others."""
    lines = [json.dumps({"turns": ["Hi?"]}) for _ in range(199)]
    path, log = tmp_path / "prompts.jsonl", tmp_path / "log.txt"
    log.write_text(f"tensor([{HELLO}])\n" * 199)
    path.write_text("\n".join(lines))
    assert len(texts_of(log, path).texts) == 199
    path.write_text("\n".join(["{", *lines]))
    with pytest.raises(UserError, match=r"199 of 200 used; 1 skipped: .*prompts.jsonl:1\)"):
        texts_of(log, path)


def test_batch_responses_join_their_requests(tmp_path: Path) -> None:
    requests = written(
        tmp_path / "requests.jsonl", {"custom_id": "r1", "url": "/v1", "body": REQUEST}
    )
    good = {"custom_id": "r1", "response": {"status_code": 200, "body": chat_body()}}
    failed = {"custom_id": "r1", "response": {"status_code": 500, "body": {}}}
    refused = {"custom_id": "r1", "response": None, "error": {"code": "x"}}
    path = written(tmp_path / "log.jsonl", good, failed, refused)
    found = texts_of(path, requests=str(requests))
    assert [(one.prompt_id, one.prompt, one.tokens) for one in found.texts] == [
        ("r1", PROMPT, HELLO)
    ]
    assert [note.split(" (")[0] for note in found.notes] == [
        "1 left out: status 500",
        "1 left out: failed request",
    ]
    other = written(tmp_path / "other.jsonl", {"custom_id": "r2", "body": REQUEST})
    with pytest.raises(UserError, match=r"log.jsonl:1: found a response to 'r1', expected one of"):
        texts_of(path, requests=str(other))


def test_answers_of_several_turns_follow_those_of_their_log(tmp_path: Path) -> None:
    """Check the form in which recurrent_drafting.generate writes answers."""
    lines = [
        {"id": "q", "turn": 1, "prompt": "Hi?", "answer": "Hello there", "tokens": HELLO},
        {"id": "q", "turn": 2, "prompt": "And?", "answer": "No", "tokens": ids("No")},
    ]
    found = texts_of(written(tmp_path / "log.jsonl", *lines)).texts
    assert found[1].prompt == ids("<u>Hi?<a>Hello there</s><u>And?<a>")
    with pytest.raises(UserError, match=r"turn 2 of 'q', expected turn 1 in the log too"):
        texts_of(written(tmp_path / "cut.jsonl", lines[1]))


def test_a_log_of_another_tokenizer_is_suspected(tmp_path: Path) -> None:
    """Check ids that the tokenizer would not write; the control is a usual log."""
    path, prompts = tmp_path / "log.txt", prompt_file(tmp_path, "a")
    unknown = TOKENIZER.unk_token_id
    path.write_text(f"tensor([{[unknown, 7] * 20}])")
    assert "may be of another tokenizer" in texts_of(path, prompts).warnings[0]
    path.write_text(f"tensor([{HELLO}])")
    assert not texts_of(path, prompts).warnings


# malformed log -> words of its error
WRONG: dict[str, str] = {
    "": r"bad is empty, expected token ids as tensor",
    "\n \n": r"bad is empty",
    "\nHello there": r"bad:2: found 'Hello there', expected token ids as tensor",
    "tensor([[1, 2]])\n\nHello": r"bad:3: found 'Hello', expected token ids as tensor",
    "tensor([[1, 2]])\ntensor([[1,": r"bad:2: found 'tensor\(\[\[1,', expected token ids",
    "tensor([[1, 2]])\ntensor([[]])": r"bad:2: found 'no numbers', expected token ids",
    "tensor([[1, x]])": r"bad:1: found 'x', expected token ids",
    "tensor([[1, ..., 2]])": r"bad:1: found a tensor that PyTorch has abbreviated with",
    "tensor([1, 2])": r"bad:1: found '\[1, 2\]', expected token ids as tensor",
    '{"prompt": "a", "output": "b"}\n{"prompt": ': r"bad:2: .*expected an object with turns",
    '{"prompt": "a", "output": "b"}\n[1]': r"bad:2: found a list, expected an object",
    '{"prompt": "a"}': r"bad:1: found the keys prompt, expected an object with turns",
    '{"prompt": 3, "output": "b"}': r"bad:1: found a number as prompt, expected text",
    '{"prompt": "a", "token_ids": [1, -2]}': r"bad:1: found -2 in token_ids, expected token ids",
    '{"prompt": "a", "token_ids": "b"}': r"bad:1: found text as token_ids, expected a list",
    '{"id": "a", "turns": []}': r"bad:1: found \[\] as turns, expected a list of answers",
    '{"id": "a", "turns": [3]}': r"bad:1: found a number as answer 1, expected text",
    '{"choices": []}': r"bad:1: found \[\] as choices, expected a list of choices",
    '{"choices": [{"message": {"content": null}}]}': r"bad:1: found None as the output",
    '{"object": "chat.completion.chunk", "choices": [{"delta": {}}]}': r"bad:1: found a chunk of",
    '{"messages": [{"role": "user"}]}': r"without text",
    '{"response": null, "error": "x"}': r"bad holds no outputs \(1 failed request\)",
}


@pytest.mark.parametrize("content", WRONG)
def test_a_malformed_log_is_refused_with_its_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    if content.startswith('{"messages'):
        path = tmp_path / "bad.jsonl"  # the suffix decides whether a file holds chats
    path.write_text(content)
    with pytest.raises(UserError, match=WRONG[content]):
        read_log(str(path))


def test_json_with_the_suffix_of_a_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log.txt holds JSON, expected the suffix .jsonl"):
        read_log(str(written(tmp_path / "log.txt", PAIR)))


def test_a_log_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"tensor([[1]])\n\xff")
    with pytest.raises(UserError, match=r"bad:2: found bytes that are not UTF-8"):
        read_log(str(tmp_path / "bad"))


PAIR = {"prompt_token_ids": PROMPT, "token_ids": HELLO}
# records of other prompts or another tokenizer -> words of the error
OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {"id": "z", "turns": ["Hello"]},
        r"output of prompt 'z', expected one of .* the prompts of 1 of 1 outputs",
    ),
    ({"id": "a", "turns": ["A", "B", "C"]}, r"output of turn 3 of 'a', which has 2 in"),
    ({"token_ids": HELLO}, r"holds 1 output without the ids of their prompts, and .* 2 prompts"),
    (PAIR | {"token_ids": [5000]}, r"found token 5000, expected ids below 101"),
    (PAIR | {"output": "Good bye"}, r"the ids are 'Hello there' here and 'Good bye' in the log"),
    ({"prompt": "Hi?", "output": "A", "prompt_tokens": 9}, r"has 5 tokens here and 9 in the log"),
    (
        chat_body(prompt_token_ids=PROMPT, usage={"completion_tokens": 3}),
        r"the output has 11 tokens here and 3 in the log. The log is of other prompts, or of anoth",
    ),
]


@pytest.mark.parametrize(("record", "words"), OTHERS, ids=[str(n) for n in range(len(OTHERS))])
def test_a_log_of_other_prompts_or_tokens_is_refused(
    record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "log.jsonl", record)
    with pytest.raises(UserError, match=words) as refused:
        texts_of(path, prompt_file(tmp_path, "a", "b"))
    assert "benchmark.path=" in str(refused.value)


def test_a_log_without_prompts_names_the_key(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", {"id": "a", "turns": ["Hello"]})
    with pytest.raises(UserError, match=r"log.jsonl:1: the log holds no prompts. Set benchmark="):
        texts_of(path)


def test_empty_outputs_are_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", PAIR, PAIR | {"token_ids": []})
    found = texts_of(path)
    assert len(found.texts) == 1 and found.notes[0].startswith("1 left out: empty outputs")
    with pytest.raises(UserError, match=r"the log holds no tokens of the target"):
        texts_of(written(tmp_path / "empty.jsonl", PAIR | {"token_ids": []}))


# outputs of one request, `Hello there` and `No` after `<u>Hi?<a>`, in every form that has several
SEVERAL: dict[str, Any] = {
    "vLLM RequestOutput": {
        "prompt_token_ids": PROMPT,
        "outputs": [{"token_ids": HELLO}, {"token_ids": ids("No"), "text": "No"}],
    },
    "response": {
        "request": {**REQUEST, "n": 2},
        "response": {
            "choices": [{"message": message("assistant", text)} for text in ("Hello there", "No")],
            "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": 13},
        },
    },
    "FastChat": {"question_id": "b", "choices": [{"turns": ["Hello there"]}, {"turns": ["No"]}]},
    "response alone": {"choices": [{"text": "Hello there"}, {"text": "No"}]},
}


@pytest.mark.parametrize("form", SEVERAL)
def test_all_outputs_of_a_request_are_samples_of_its_prompt(form: str, tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, "b") if form in ("FastChat", "response alone") else None
    path = written(tmp_path / "log.jsonl", SEVERAL[form])
    found = texts_of(path, prompts)
    assert [one.tokens for one in found.texts] == [HELLO, ids("No")]
    assert [one.prompt for one in found.texts] == [PROMPT, PROMPT]
    assert len({one.prompt_id for one in found.texts}) == 1 and not found.notes
    again = written(tmp_path / "apart.jsonl", SEVERAL[form], SEVERAL[form])
    if form not in ("FastChat", "response alone"):
        assert len({one.prompt_id for one in texts_of(again).texts}) == 2, "control: two requests"


def test_later_turns_follow_the_answers_of_their_own_sample(tmp_path: Path) -> None:
    choices = [{"turns": ["Hello there", "No"]}, {"turns": ["Bye", "Yes"]}]
    path = written(tmp_path / "log.jsonl", {"question_id": "b", "choices": choices})
    found = texts_of(path, prompt_file(tmp_path, "a", "b")).texts
    assert [(one.prompt, one.tokens) for one in found if one.turn == 1] == [
        (ids(f"<u>Hi?<a>{first}</s><u>And?<a>"), ids(then))
        for first, then in (("Hello there", "No"), ("Bye", "Yes"))
    ]


API_ERROR = {"error": {"message": "no room", "type": "BadRequestError", "code": 400}}
VLLM_ERROR = {"object": "error", "message": "no room", "type": "BadRequestError", "code": 400}
# responses of failed requests, as batches, proxies and servers log them
FAILURES: dict[str, Any] = {
    "no response": {"custom_id": "a", "response": None, "error": {"code": "x"}},
    "error beside its request": {"request": REQUEST, "response": API_ERROR},
    "vLLM's beside its request": {"request": REQUEST, "response": VLLM_ERROR},
    "error without response": {"request": REQUEST, **API_ERROR},
    "error alone": API_ERROR,
    "vLLM's alone": VLLM_ERROR,
    "messages beside": {**REQUEST, **API_ERROR},
    "prompt beside": {"prompt": "Hi?", **API_ERROR},
    "no choices": {"request": REQUEST, "response": {**API_ERROR, "choices": []}},
}


@pytest.mark.parametrize("form", FAILURES)
def test_failed_requests_are_left_out_and_counted(form: str, tmp_path: Path) -> None:
    """Check a log whose first line failed; an error beside choices is none of a request."""
    good = {"request": REQUEST, "response": chat_body(error=None)}
    found = texts_of(written(tmp_path / "log.jsonl", FAILURES[form], good, FAILURES[form]))
    assert [one.tokens for one in found.texts] == [HELLO]
    assert found.notes[0].startswith("2 left out: failed request (")
    good["response"] = chat_body(**API_ERROR)
    found = texts_of(written(tmp_path / "log.jsonl", good))
    assert [one.tokens for one in found.texts] == [HELLO] and not found.notes, "control"


def test_choices_without_an_output_are_counted(tmp_path: Path) -> None:
    call = {"message": {"content": None, "tool_calls": [{"id": "x"}]}}
    record = {**REQUEST, "choices": [call, *chat_body()["choices"], call]}
    found = texts_of(written(tmp_path / "log.jsonl", record))
    assert [one.tokens for one in found.texts] == [HELLO]
    assert found.notes[0].startswith("2 left out: tool_calls without token_ids (")
    record["choices"] = chat_body()["choices"] * 2
    found = texts_of(written(tmp_path / "log.jsonl", record))
    assert len(found.texts) == 2 and not found.notes, "control"


# size of the model -> tokens that the documentation of the log states
VICUNA = {"7b": 43_594, "13b": 43_009, "33b": 54_254}


@pytest.mark.parametrize("size", VICUNA)
def test_logs_of_vicuna_have_llamas_tokens(
    size: str, shared_data: Path, llama_tokenizer: Path
) -> None:
    """Check the number of tokens that the log's documentation states."""
    from decoding.models.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(llama_tokenizer, of_model=False)
    folder = shared_data / "eval"
    benchmark = BenchmarkConfig(
        path=str(folder / "mt_bench.jsonl"), chat_template="vicuna", turns="all"
    )
    log = read_log(str(folder / "target_outputs" / f"mt_bench_vicuna-{size}-v1.3.jsonl"))
    found = Reader(log, benchmark, tokenizer, len(tokenizer), (2,)).read()
    assert len(found.texts) == 160 and not found.warnings
    assert found.tokens == VICUNA[size]
    texts: Sequence[str] = [tokenizer.decode(one.tokens) for one in found.texts]
    assert not any(text.endswith("</s>") for text in texts)
    if size == "7b":
        assert texts[0].startswith('Title: "Aloha Adventures')
    assert tokenizer.decode(found.texts[1].prompt).endswith("the letter A. ASSISTANT:")
