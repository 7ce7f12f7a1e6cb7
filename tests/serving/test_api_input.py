"""Requests that the server refuses, each with an error that names what is wrong."""

import importlib.util
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError

from decoding.errors import UserError
from decoding.models.text.tokenizer import longest_token
from jobs.config import TargetConfig
from serving.api.answers import ChoiceText
from serving.api.config import ApiConfig
from serving.api.errors import RequestError
from serving.api.job import check, run
from serving.api.requests import CHAT, TEXT, read_request
from serving.api.service import Service
from serving.listening import listen
from tests.support.api_server import Served, serve
from tests.support.idle_connections import is_open, open_idle, wait_until_closed

MIB = 1 << 20
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_rows=4) as running:
        yield running


@pytest.fixture(autouse=True)
def the_server_lives(served: Served) -> Iterator[None]:
    """Check after every test that the server still answers."""
    yield
    answer = served.post({"model": served.model, "prompt": [5], "max_tokens": 2})
    assert answer.status_code == 200


def error_of(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 5}, "logprobs", "does not support"),
    ({"logprobs": 0}, "logprobs", "does not support"),
    ({"echo": None, "logit_bias": {"5": True}}, "logit_bias", 'logit_bias is {"5": true}'),
    ({"echo": True}, "echo", "does not support"),
    ({"best_of": 3}, "best_of", "does not support"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "does not support"),
    ({"temprature": 1}, "temprature", 'the nearest is "temperature"'),
    ({"x" * 100_000: 1}, "x" * 64, "is unknown"),
    ({"temperature": "hot"}, "temperature", "expected 0 (greedy)"),
    ({"temperature": -1}, "temperature", "expected 0 (greedy)"),
    ({"top_p": 0}, "top_p", "more than 0"),
    ({"seed": 2.5}, "seed", "a whole number"),
    ({"max_tokens": 0}, "max_tokens", "a whole number from 1"),
    ({"max_tokens": 2**40}, "max_tokens", "a whole number from 1"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 strings"),
    ({"stop": ""}, "stop", "1 to 256 characters"),
    ({"n": 5}, "n", "from 1 to 4"),
    ({"stream": "yes"}, "stream", 'is "yes", expected true or false'),
    ({"return_token_ids": 1}, "return_token_ids", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options",
        "include_obfuscation is true, which this server does not support",
    ),
    ({"stream": True, "stream_options": {"include": True}}, "stream_options", "expected {"),
    ({"safety_identifier": 5}, "safety_identifier", "expected a string"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "does not support"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "does not support"),
    ({"moderation": {"model": "x"}}, "moderation", "does not support"),
    ({"prompt": []}, "prompt", "expected a text"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [-1]}, "prompt", "token ids from 0"),
    ({"prompt": [10**9]}, "prompt", "token ids from 0"),
    ({"prompt": ["a"] * 5}, "prompt", "at most 4"),
    ({"prompt": ["a", "b"], "n": 3}, "n", "asks for 6 choices"),
    ({"prompt": "cut \ud83d"}, "prompt", "half a surrogate pair"),
]


@pytest.mark.parametrize(("change", "field", "words"), FIELDS)
def test_a_wrong_field_is_named(
    served: Served, change: dict[str, Any], field: str, words: str
) -> None:
    body = json.dumps({"model": served.model, "prompt": "def", "max_tokens": 3, **change})
    error = error_of(httpx2.post(f"{served.url}/v1/completions", content=body, headers=JSON))
    assert error["param"] == field and words in error["message"]


def test_values_that_ask_for_nothing_are_accepted(served: Served) -> None:
    nothing = {"logprobs": None, "echo": False, "best_of": 1, "logit_bias": {}, "suffix": None}
    body = {"model": served.model, "prompt": "def", "max_tokens": 3, **nothing, "user": "me"}
    assert served.post(body).status_code == 200


MESSAGES: list[tuple[Any, str]] = [
    ([], "expected a list of messages"),
    ("hello", "expected a list of messages"),
    ([{"role": "robot", "content": "x"}], "expected one of system"),
    ([{"role": "user"}], "has no content"),
    ([{"role": "user", "content": ""}], "empty"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        'content [{"type": "image_url", ',
    ),
    *(
        ([{"role": "user", "content": parts}], f"the content {json.dumps(parts)[:60]}")
        for parts in (
            [],
            ["Name it."],
            [{"type": "text"}],
            [{"type": "text", "text": None}],
            [{"type": "text", "text": 5}],
            [{"type": "text", "text": ["a"]}],
            [{"type": "text", "text": "a"}, {"type": "text"}],
            [{"type": {}, "text": "x"}],
            [{"type": ["text"], "text": "x"}],
        )
    ),
    ([{"role": None, "content": "x"}], "role of message 1 of the chat is null"),
    (["hello"], "expected a mapping"),
]


@pytest.mark.parametrize(("messages", "words"), MESSAGES)
def test_a_wrong_message_is_named(served: Served, messages: Any, words: str) -> None:
    body = {"model": served.model, "messages": messages, "max_tokens": 3}
    error = error_of(served.post(body, "/v1/chat/completions"))
    assert error["param"] == "messages" and words in error["message"]


def test_parts_of_text_are_joined(served: Served) -> None:
    def ask(content: Any) -> str:
        body = {
            "model": served.model,
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": content},
            ],
            "max_tokens": 5,
            "temperature": 0,
        }
        return served.post(body, "/v1/chat/completions").json()["choices"][0]["message"]["content"]

    parts = [{"type": "text", "text": "Name "}, {"type": "text", "text": "it."}]
    assert ask(parts) == ask("Name it.")


def test_openais_client_raises_its_own_errors(served: Served) -> None:
    with served.client() as client:
        with pytest.raises(NotFoundError, match="does not exist here"):
            client.completions.create(model="gpt-4", prompt="a")
        with pytest.raises(NotFoundError, match="does not exist here"):
            client.models.retrieve("gpt-4")
        with pytest.raises(BadRequestError, match="logprobs"):
            client.chat.completions.create(
                model=served.model,
                messages=[{"role": "user", "content": "a"}],
                logprobs=True,
                top_logprobs=2,
            )


def test_openais_client_may_set_what_asks_for_nothing(served: Served) -> None:
    """Check fields of today's client that change no text, in a stream; others are refused."""
    messages: Any = [{"role": "user", "content": "a"}]
    asked: dict[str, Any] = {"model": served.model, "messages": messages, "max_tokens": 5}
    asked |= {"seed": 1, "stream": True}
    nothing: dict[str, Any] = {
        "safety_identifier": "hash of a user",
        "prompt_cache_key": "tenant",
        "prompt_cache_retention": "in_memory",
        "reasoning_effort": "none",
        "verbosity": "medium",
        "service_tier": "auto",
        "store": False,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }

    def text(**fields: Any) -> str:
        parts = [*client.chat.completions.create(**asked, **fields)]
        assert bool(parts[-1].usage) == bool(fields), "the stream ends with its numbers of tokens"
        return "".join(one.delta.content or "" for part in parts for one in part.choices)

    with served.client() as client:
        assert text(**nothing) == text() != ""
        for field, value in {
            "verbosity": "low",
            "prompt_cache_retention": "24h",
            "store": True,
            "stream_options": {"include_obfuscation": True},
        }.items():
            with pytest.raises(BadRequestError, match=f"{field}.*does not support"):
                text(**{**nothing, field: value})


def test_a_prompt_over_the_context_is_refused_with_its_length(served: Served) -> None:
    error = error_of(served.post({"model": served.model, "prompt": [5] * 300}))
    assert error["code"] == "context_length_exceeded" and "300 tokens" in error["message"]
    long = {"model": served.model, "prompt": [5] * 250}
    answer = served.post({**long, "temperature": 0})
    assert answer.json()["usage"]["total_tokens"] <= 256


def never(*_: object) -> list[int]:
    raise AssertionError("it is tokenized")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(served: Served) -> None:
    """Check a text, several texts and a chat; a text of as many characters as fit is read."""
    limits = served.service.limits
    unread, most = replace(limits, encode=never), limits.most_characters
    fits, too_long = "a" * most, "a" * (most + 1)
    asked = {"model": served.model}
    chat = [{"role": "user", "content": too_long}]
    for path, prompt, field in (
        (TEXT, {"prompt": too_long}, "prompt"),
        (TEXT, {"prompt": ["a", too_long]}, "prompt"),
        (CHAT, {"messages": chat}, "messages"),
        (CHAT, {"messages": chat[:1] + [{"role": "user", "content": "a"}] * 256}, "messages"),
    ):
        with pytest.raises(RequestError, match="context holds 256 tokens") as found:
            read_request(path, {**asked, **prompt}, unread)
        error = error_of(served.post({**asked, **prompt}, path))
        assert error["code"] == "context_length_exceeded" and error["param"] == field
        assert error["message"] == found.value.message
    for path, prompt in (
        (TEXT, {"prompt": fits}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        with pytest.raises(AssertionError, match="it is tokenized"):
            read_request(path, {**asked, **prompt}, unread)
    assert (
        f"{most + 1:,} characters"
        in error_of(served.post({**asked, "prompt": too_long}))["message"]
    )
    assert " tokens, but" in error_of(served.post({**asked, "prompt": fits}))["message"], "control"


def test_no_token_has_more_characters_than_the_longest_entry(served: Served) -> None:
    tokenizer = served.engine.tokenizer
    texts = tokenizer.batch_decode([[one] for one in range(len(tokenizer))])
    assert max(map(len, texts)) <= longest_token(tokenizer)


BODIES: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b'{"model": ', "not valid JSON"),
    (b'{"prompt": "caf\xe9"}', "not valid UTF-8: byte 15 is 0xe9"),
    (b"[1, 2]", "the body is [1, 2], expected a JSON object"),
    (b"null", "the body is null, expected a JSON object"),
    (b'{"temperature": NaN}', "NaN is no JSON number"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b'{"stop": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
]


@pytest.mark.parametrize(("body", "words"), BODIES, ids=[words for _, words in BODIES])
def test_a_malformed_body_is_refused(served: Served, body: bytes, words: str) -> None:
    answer = httpx2.post(f"{served.url}/v1/completions", content=body, headers=JSON, timeout=30)
    assert words in error_of(answer)["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb_is_refused_and_dropped(served: Served, declared: bool) -> None:
    """Check a body with a declared length, and one in chunks."""
    part, count = b"x" * MIB, 100
    content = part * count if declared else (part for _ in range(count))
    answer = httpx2.post(f"{served.url}/v1/completions", content=content, headers=JSON, timeout=60)
    error = error_of(answer, 413)
    assert error["code"] == "body_too_large" and "max_body_mib=4" in error["message"]


def test_another_content_type_is_refused(served: Served) -> None:
    for body in ({"data": {"a": "b"}}, {"content": b"x" * (16 * MIB)}):
        answer = httpx2.post(f"{served.url}/v1/completions", **body, timeout=60)
        assert "application/json" in error_of(answer, 415)["message"]


def test_a_body_that_never_ends_is_given_up() -> None:
    """Check it on the raw connection; a body that is as slow but ends in time is read."""
    with serve("none", body_seconds=1) as running:
        body = json.dumps({"model": running.model, "prompt": [5], "max_tokens": 2}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        for rest, status in ((b"", b"408"), (body[9:], b"200")):
            with socket.create_connection(
                ("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=60
            ) as raw:
                raw.sendall(head.encode() + body[:9])
                time.sleep(0.3)
                raw.sendall(rest)
                answer = b"".join(iter(lambda: raw.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert (b"the body did not arrive within 1 s" in answer) == (not rest)


def test_an_unknown_path_or_method_is_refused(served: Served) -> None:
    assert "/v1/completions" in error_of(httpx2.post(f"{served.url}/v1/x"), 404)["message"]
    assert error_of(httpx2.get(f"{served.url}/v1/completions"), 405)["code"] == "unknown_url"


def test_bytes_that_are_no_http_are_refused(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as raw:
        raw.sendall(b"\x16\x03\x01\x00\xff\r\n\r\n")
        raw.settimeout(10)
        assert raw.recv(100).startswith(b"HTTP/1.1 400")


def test_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n secret \nother\n")
    with serve("none", key_file=str(keys)) as guarded:
        for key in ("secret", "other"):
            assert guarded.client(key).models.list().data[0].id == guarded.model
        for key in ("wrong", "secre", "secret2"):
            with pytest.raises(AuthenticationError):
                guarded.client(key).models.list()
        header = {"Authorization": "Basic secret"}
        assert httpx2.get(f"{guarded.url}/v1/models", headers=header).status_code == 401
        for prompt in ("a", "a" * (16 * MIB)):
            answer = guarded.post({"model": guarded.model, "prompt": prompt})
            assert error_of(answer, 401)["code"] == "invalid_api_key"
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path, words in ((empty, "has no key"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(UserError, match=words), serve("none", key_file=str(path)):
            pass


def test_a_port_that_is_in_use_is_an_error_before_any_model_is_loaded() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        cfg = ApiConfig(
            job="serving.api", output_dir="", target=TargetConfig(path="missing"), port=port
        )
        with pytest.raises(UserError, match="cannot listen on") as found:
            run(cfg)
        assert str(found.value).startswith(
            f"cannot listen on 127.0.0.1:{port}: the port is in use. Set port= to another one"
        )
    with pytest.raises(UserError, match="cannot listen on nowhere.invalid:0: (?!the port)"):
        listen("nowhere.invalid", 0)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"max_rows": 0}, "max_rows is 0"),
    ({"port": 70000}, "port is 70000"),
    ({"verify": "typical"}, "verify is typical"),
    ({"verify": "token", "keep_pools": True}, "keep_pools=true needs verify=coupled"),
    ({"num_draft_tokens_by_batch": [[2, 8, 1]]}, r"expected \[1, last, tokens\]"),
    (
        {"num_draft_tokens_by_batch": [[1, 8, 1]], "verify": "token"},
        "num_draft_tokens_by_batch needs verify=coupled",
    ),
    ({"drafter": {"use": "none"}, "num_draft_tokens": -1}, "num_draft_tokens is -1"),
]


@pytest.mark.parametrize(("changed", "words"), SETTINGS)
def test_a_wrong_setting_is_named(changed: dict[str, Any], words: str) -> None:
    cfg = ApiConfig(
        job="serving.api", output_dir="", target=TargetConfig(path="embedded:target"), **changed
    )
    with pytest.raises(UserError, match=words):
        check(cfg)


@pytest.mark.parametrize("schedule", ["pearl_wall", "pearl_virtual", "serial"])
def test_a_schedule_that_runs_ahead_is_refused(
    schedule: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the job refuses to serve it; serial is served (a control)."""
    monkeypatch.setattr(Service, "run", lambda *_: None)
    cfg = ApiConfig(
        job="serving.api",
        output_dir="",
        target=TargetConfig(path=str(tiny_target), device="cpu"),
        drafter={"use": str(tiny_target), "name": "itself", "schedule": schedule},
        port=0,
    )
    if schedule == "serial":
        run(cfg)
        return
    with pytest.raises(UserError, match=f"drafter itself has schedule={schedule}, .*=serial"):
        run(cfg)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    cfg = ApiConfig(job="serving.api", output_dir="", target=TargetConfig(path="embedded:target"))
    words = r"serving.api needs starlette, uvicorn, .* Run pip install -e '\.\[server\]'"
    with pytest.raises(UserError, match=words):
        check(cfg)
    check(replace(cfg, dry_run=True))


def test_pools_need_a_drafter_that_keeps_them() -> None:
    with pytest.raises(UserError, match="needs a drafter that remembers"), serve(keep_pools=True):
        pass


def test_idle_connections_neither_block_nor_stay() -> None:
    with serve("none", idle_seconds=2) as running, open_idle(running.url, 200) as idle:
        body = {"model": running.model, "prompt": [5], "max_tokens": 2}
        assert running.post(body).status_code == 200 and is_open(idle[-1])
        wait_until_closed(idle)
        assert running.post(body).status_code == 200


@pytest.mark.parametrize("path", ["/v1/nothing", TEXT])
def test_a_refused_body_that_trickles_does_not_keep_its_connection(path: str) -> None:
    """Check it with a request that is refused before its body has ended, and one that is read."""
    with serve("none", idle_seconds=1) as running:
        address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        with socket.create_connection(address, timeout=60) as raw:
            raw.sendall(f"{head}Content-Length: 900\r\n\r\n".encode())
            until = time.monotonic() + 3
            with suppress(BrokenPipeError, ConnectionResetError):
                while time.monotonic() < until:
                    raw.sendall(b" ")
                    time.sleep(0.1)
            assert (time.monotonic() < until) == (path != TEXT)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_stop_string_never_shows_however_the_text_arrives(size: int) -> None:
    text, stops = "ab abc abcd!", ("abcd", "zz")
    tokens = [ord(letter) for letter in text]
    choice = ChoiceText(lambda ids: "".join(map(chr, ids)), stops)
    shown = ""
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        shown += choice.add(part, "length" if start + len(part) >= len(tokens) else None)
        assert "abcd" not in shown
        if choice.finish:
            break
    assert (shown, choice.finish) == ("ab abc ", "stop")


def test_text_that_only_begins_a_stop_string_is_shown_at_the_end() -> None:
    choice = ChoiceText(lambda ids: "".join(map(chr, ids)), ("abcd",))
    assert choice.add([ord("x"), ord("a")], None) == "x"
    assert choice.add([ord("b")], "length") == "ab"
    assert choice.finish == "length"
