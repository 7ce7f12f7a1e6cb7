"""What browsers do not send: bad input through the addresses of the page itself, over HTTP."""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jobs.config import TargetConfig
from serving.listening import address_of, listen
from serving.web.config import WebConfig
from serving.web.demo import Demo
from serving.web.job import make_server
from serving.web.limits import Limits, Scope
from serving.web.models import load
from serving.web.race import Pane
from tests.support.idle_connections import is_open, open_idle, wait_until_closed

JOIN, PREDICT = "/gradio_api/queue/join", "/gradio_api/run/predict"
GOOD: list[Any] = ["def f(", "prompt_lookup", "serial", 0, 8, 0]
TOKENS = 256
LONG = ["one two three", *GOOD[1:4], TOKENS, 0]  # its text ends at the limit
ROUND_S = 0.1
PATIENCE_S = 60.0


@dataclass
class Page:
    """A running page, and the numbers of its functions."""

    url: str
    demo: Demo
    functions: dict[str, int]

    def post(self, content: bytes | Any, path: str = JOIN) -> httpx2.Response:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        return httpx2.post(self.url + path, content=body, headers=headers, timeout=PATIENCE_S)

    def call(self, name: str, data: list[Any], session: str = "") -> dict[str, Any]:
        """Call a function through the queue, as the page does; return its last message."""
        *_, last = self.messages(name, data, session or secrets.token_hex(5))
        return last

    def begin(self, data: list[Any], session: str) -> list[Any]:
        """Begin a run, and return the values with which the page then calls `run`."""
        number, panes = self.call("begin", data, session)["output"]["data"]
        assert 'data-status="waiting"' in panes
        return [number, *data]

    def run(self, data: list[Any]) -> dict[str, Any]:
        """Begin a run and return its last message."""
        session = secrets.token_hex(5)
        return self.call("run", self.begin(data, session), session)

    def join(self, name: str, data: list[Any], session: str) -> str:
        """Call a function through the queue, and return the name of the call."""
        call = {"data": data, "fn_index": self.functions[name], "session_hash": session}
        joined = self.post(call)
        assert joined.status_code == 200, joined.text
        return joined.json()["event_id"]

    def messages(
        self, name: str, data: list[Any], session: str
    ) -> Generator[dict[str, Any], None, None]:
        """Call a function, and yield what the queue sends until the call has ended."""
        called = self.join(name, data, session)
        address = f"{self.url}/gradio_api/queue/data?session_hash={session}"
        with httpx2.stream("GET", address, timeout=PATIENCE_S) as stream:
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    message = json.loads(line.removeprefix("data:"))
                    yield message
                    if message["msg"] == "process_completed" and message["event_id"] == called:
                        return


@contextmanager
def running(target: Path, **settings: Any) -> Iterator[Page]:
    """Serve the page in a thread; at its end, check that it still answers."""
    place = TargetConfig(path=str(target), device="cpu")
    cfg = WebConfig(job="serving.web", output_dir="", target=place, idle_seconds=2, **settings)
    demo = Demo(load(cfg), cfg, refresh_seconds=0.0)
    server = make_server(demo, cfg)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=[[listener]])
        thread.start()
        try:
            url = f"http://{address_of(listener)}"
            functions = httpx2.get(f"{url}/config", timeout=PATIENCE_S).json()["dependencies"]
            found = Page(url, demo, {one["api_name"]: one["id"] for one in functions})
            yield found
            assert found.run(GOOD)["success"], "the page still answers"
        finally:
            server.should_exit = True
            thread.join()
            demo.close()


@pytest.fixture(scope="module")
def page(gradio: None, tiny_target: Path) -> Iterator[Page]:
    with running(tiny_target) as found:
        yield found


BODIES: list[tuple[bytes | Any, int, str]] = [
    (b'{"data": ["caf\xe9"]}', 400, "not valid UTF-8: byte 14 is 0xe9"),
    (b'{"data": ', 400, "not valid JSON"),
    (b"", 400, "not valid JSON"),
    ([1], 400, "the body is [1], expected a JSON object"),
    (b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nested too deeply"),
    (b'{"data": [NaN]}', 400, "NaN is no JSON number"),
    ({"data": []}, 400, "fn_index is null, expected one of 0, 1"),
    ({"fn_index": 999}, 400, "fn_index is 999"),
    ({"fn_index": True}, 400, "fn_index is true"),
    ({"fn_index": 1, "data": "x"}, 400, 'data is "x", expected a list of 6 values'),
    ({"fn_index": 1, "data": [1]}, 400, "data is [1], expected a list of 6 values"),
    ({"fn_index": 1, "data": GOOD}, 400, "session_hash is null"),
    ({"fn_index": 1, "data": GOOD, "session_hash": "x" * 65}, 400, "expected 1 to 64"),
    (b"x" * (1 << 20 | 1), 413, "at most 1,048,576 bytes"),
]


@pytest.mark.parametrize("path", [JOIN, PREDICT])
@pytest.mark.parametrize(("body", "status", "words"), BODIES, ids=[one[2] for one in BODIES])
def test_a_malformed_call_is_refused_by_name(
    page: Page, path: str, body: bytes | Any, status: int, words: str
) -> None:
    answer = page.post(body, path)
    assert answer.status_code == status and words in answer.text


def test_a_body_of_100_mb_is_refused(page: Page) -> None:
    part, count = b"x" * (1 << 20), 100
    declared = page.post(part * count)
    assert declared.status_code == 413 and "found 104,857,600" in declared.text
    assert page.run(GOOD)["success"]
    chunks = httpx2.post(page.url + JOIN, content=(part for _ in range(count)), timeout=PATIENCE_S)
    assert chunks.status_code == 411 and "content-length" in chunks.text


CHOICES: list[tuple[int, Any, str]] = [
    (0, "", "the prompt is empty"),
    (0, 5, "the prompt is empty"),
    (0, "cut \ud83d", "half a surrogate pair"),
    (0, "x" * 20_001, "has 20,001 characters"),
    (1, "nope", "drafter 'nope' is unknown, expected one of prompt_lookup"),
    (1, {"a": 1}, "drafter {'a': 1} is unknown"),
    (2, ["serial"], "schedule of prompt_lookup ['serial'] is unknown"),
    (3, "hot", "temperature is 'hot'"),
    (4, 1e99, "max_new_tokens is"),
    (5, None, "seed is None"),
]


@pytest.mark.parametrize("name", ["begin", "run"])
@pytest.mark.parametrize(("place", "value", "words"), CHOICES, ids=[one[2] for one in CHOICES])
def test_a_wrong_choice_is_named_to_the_visitor(
    page: Page, name: str, place: int, value: Any, words: str
) -> None:
    """Check both steps of a run: a program may call the second one alone."""
    number = [0] if name == "run" else []
    last = page.call(name, [*number, *GOOD[:place], value, *GOOD[place + 1 :]])
    assert not last["success"] and words in last["output"]["error"]


def test_a_wrong_drafter_has_no_schedules(page: Page) -> None:
    call = {"fn_index": page.functions["offer"], "session_hash": "a"}
    assert page.post({**call, "data": ["prompt_lookup"]}, PREDICT).status_code == 200
    answer = page.post({**call, "data": [["nope"]]}, PREDICT)
    assert answer.status_code == 500 and "drafter ['nope'] is unknown" in answer.text


def test_other_addresses_are_refused(page: Page) -> None:
    for path in ("/gradio_api/call/run", "/gradio_api/vibe-edit", "/gradio_api/component_server"):
        answer = page.post({"data": GOOD}, path)
        assert answer.status_code == 404 and "no such address" in answer.text
    assert httpx2.put(page.url + JOIN, content=b"{}").status_code == 404
    assert httpx2.get(page.url + "/gradio_api/file=/etc/passwd").status_code == 403


@pytest.fixture
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rounds so slow that the whole of a long text takes longer than a test may."""
    round_of = Pane.round

    def slow(pane: Pane) -> None:
        time.sleep(ROUND_S)
        round_of(pane)

    monkeypatch.setattr(Pane, "round", slow)


def decoding(page: Page, session: str) -> Generator[dict[str, Any], None, None]:
    """Return the messages of a long run, which has begun to decode."""
    messages = page.messages("run", page.begin(LONG, session), session)
    while next(messages)["msg"] != "process_generating":
        pass
    return messages


@pytest.mark.usefixtures("slow_rounds")
def test_a_client_that_leaves_in_mid_stream_frees_the_slot(page: Page) -> None:
    began = time.monotonic()
    decoding(page, "leaving").close()
    assert page.run(GOOD)["success"]
    assert time.monotonic() - began < TOKENS * ROUND_S


@pytest.mark.usefixtures("slow_rounds")
def test_a_run_that_waits_ends_when_its_visitor_begins_another(page: Page) -> None:
    """Let a session begin two runs while another visitor's text is decoded, and then free the slot.

    The first run must decode nothing, although the second one has not been stopped.
    """
    began, before = time.monotonic(), decoding(page, "before")
    stale = page.join("run", page.begin(LONG, "pressing"), "pressing")
    messages = page.messages("run", page.begin(GOOD, "pressing"), "pressing")
    before.close()
    shown: dict[bool, str] = {True: "", False: ""}
    for message in messages:
        if "output" in message:
            shown[message["event_id"] == stale] += json.dumps(message["output"])
    assert "target forwards" not in shown[True] and "target forwards" in shown[False]
    assert "Stopped" not in shown[True], "the second run waits in the same panes"
    assert time.monotonic() - began < TOKENS * ROUND_S


def test_a_run_that_was_stopped_before_its_turn_says_so(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forget a run that waits, as others have begun more than the page keeps."""
    monkeypatch.setattr("serving.web.visits.MOST_UNASKED", 2)
    waits = page.begin(GOOD, "waits")
    kept, _ = (page.begin(GOOD, session) for session in ("second", "third"))
    for values, session, stopped in ((waits, "waits", True), (kept, "second", False)):
        shown = json.dumps([one.get("output") for one in page.messages("run", values, session)])
        assert ("Stopped before the first round. Run it again." in shown) == stopped
        assert ("target forwards" in shown) != stopped


@pytest.mark.long
@pytest.mark.usefixtures("slow_rounds", "gradio")
def test_visitors_see_their_place_and_the_queue_is_bounded(tiny_target: Path) -> None:
    with running(tiny_target, max_waiting=2) as page:
        decodes = decoding(page, "decodes")
        values = {session: page.begin(GOOD, session) for session in ("first", "second", "third")}
        waiting = [
            page.messages("run", values[session], session) for session in ("first", "second")
        ]
        places = [next(one for one in run if one["msg"] == "estimation") for run in waiting]
        assert [place["rank"] for place in places] == [0, 1]
        body = {"data": values["third"], "fn_index": page.functions["run"]}
        refused = page.post({**body, "session_hash": "third"})
        assert refused.status_code == 503 and "Queue is full. Max size is 2" in refused.text
        decodes.close()
        assert all(list(run)[-1]["success"] for run in waiting), "they are served in the end"
        assert page.call("run", values["third"], "third")["success"], "control: there is room again"


def test_idle_connections_neither_block_nor_stay(page: Page) -> None:
    with open_idle(page.url, 200) as idle:
        assert page.run(GOOD)["success"]
        assert httpx2.get(page.url).status_code == 200
        wait_until_closed(idle)
    with open_idle(page.url, 1) as (new,):
        assert is_open(new), "control: a new connection is kept for a while"


Message = dict[str, Any]


def sent_by_limits(
    limits: dict[str, float], next_part: Callable[[], Awaitable[Message]], path: str = JOIN
) -> list[Message]:
    """Return what the limits of the page send while these parts of a body arrive."""

    async def answers() -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def app(scope: Scope, receive: Any, send: Any) -> None:
            await send({"type": "passed on", "body": (await receive())["body"]})

        headers = [(b"content-length", b"900")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await Limits(app, {1: 0}, **limits)(scope, next_part, send)
        return sent

    return asyncio.run(asyncio.wait_for(answers(), PATIENCE_S))


def test_a_body_that_never_ends_is_given_up() -> None:
    def ask(parts: list[Message], seconds: float) -> list[Message]:
        async def receive() -> Message:
            if not parts:
                await asyncio.sleep(2 * PATIENCE_S)
            return parts.pop(0)

        return sent_by_limits({"body_seconds": seconds}, receive)

    part = {"type": "http.request", "body": b'{"fn_index": 1, "data": [],', "more_body": True}
    rest = {"type": "http.request", "body": b'"session_hash": "a"}', "more_body": False}
    start, body = ask([part], 0.05)
    assert start["status"] == 408 and b"did not arrive within 0.05 s" in body["body"]
    assert ask([part, {"type": "http.disconnect"}], 9) == [], "nobody is there"
    (passed,) = ask([part, rest], 9)
    assert passed["body"] == part["body"] + rest["body"], "control: a whole body"


def test_the_body_of_a_refused_request_is_not_read_for_ever() -> None:
    """Check it with a body that trickles; one that ends is read before its answer."""
    read: list[int] = []

    async def trickle() -> Message:
        read.append(1)
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def whole() -> Message:
        read.append(1)
        return {"type": "http.request", "body": b"x", "more_body": len(read) < 20}

    limits = {"drain_seconds": 0.1}
    start, _ = sent_by_limits(limits, trickle, "/gradio_api/upload")
    assert start["status"] == 403 and 0 < len(read) <= 11
    read.clear()
    start, _ = sent_by_limits(limits, whole, "/gradio_api/upload")
    assert start["status"] == 403 and len(read) == 20, "control: a body that ends is read whole"
