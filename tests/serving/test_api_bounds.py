"""Bounds of the server: its queue, what requests get when it stops, and an ended thread."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from openai import APIError

from decoding.models.native.model import NativeTarget
from tests.support.api_server import PATIENCE_S, Served, serve

MOST = 200  # tokens of a text
HELD_S = 60.0  # until a round that is held fails
STOPPING = "the server is stopping. Try again later."


def ask(served: Served, **given: Any) -> dict[str, Any]:
    """Return the body of a request for a greedy text, which ends at its limit."""
    return {"model": served.model, "prompt": [4, 5], "temperature": 0, "max_tokens": MOST, **given}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no round end before this event is set; prompts are read by another method."""
    opened, forward = threading.Event(), NativeTarget.forward

    def held(*given: Any, **named: Any) -> Any:
        assert opened.wait(HELD_S)
        return forward(*given, **named)

    monkeypatch.setattr(NativeTarget, "forward", held)
    yield opened
    opened.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as found:
        yield found


def wait_for_rows(served: Served, count: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while served.service.scheduler.running < count:
        assert time.monotonic() < until, "the requests do not run"
        time.sleep(0.01)


def test_the_queue_is_bounded(gate: threading.Event, threads: ThreadPoolExecutor) -> None:
    """Check that one row and exactly `max_waiting` requests are not refused, as long as it runs."""
    with serve("none", max_rows=1, max_waiting=2) as served:
        body = ask(served, max_tokens=3)
        accepted = [threads.submit(served.post, body)]
        wait_for_rows(served, 1)
        accepted += [threads.submit(served.post, body) for _ in range(2)]
        until = time.monotonic() + HELD_S
        while served.service.scheduler.waiting < 2:
            assert time.monotonic() < until, "the requests do not wait"
            time.sleep(0.01)
        for _ in range(3):
            refused = served.post(body)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert "2 requests are waiting already (max_waiting)" in refused.text
        gate.set()
        assert [one.result(PATIENCE_S).status_code for one in accepted] == [200] * 3
        assert served.post(body).status_code == 200, "there is room again"


def test_running_requests_are_finished_within_grace_seconds(
    gate: threading.Event, threads: ThreadPoolExecutor
) -> None:
    with serve("none", grace_seconds=60) as served:
        running: Future[httpx2.Response] = threads.submit(served.post, ask(served, max_tokens=9))
        wait_for_rows(served, 1)
        served.service.server.should_exit = True
        until = time.monotonic() + PATIENCE_S
        while is_listening(served):
            assert time.monotonic() < until, "a server that stops takes new requests"
        gate.set()
        answer = running.result(PATIENCE_S)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 9


def is_listening(served: Served) -> bool:
    try:
        return httpx2.get(f"{served.url}/health").status_code == 200
    except httpx2.TransportError:
        return False


def test_requests_that_take_longer_get_an_error(
    monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    """Check an answer in one piece, a stream, and a request that waits."""
    forward = NativeTarget.forward

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(0.1)
        return forward(*given, **named)

    monkeypatch.setattr(NativeTarget, "forward", slow)
    with serve("none", grace_seconds=1, max_rows=2) as served, served.client() as client:
        stream: Any = client.completions.create(**ask(served), stream=True)
        assert next(stream).choices
        posted = [threads.submit(served.post, ask(served)) for _ in range(2)]
        wait_for_rows(served, 2)
        served.service.server.should_exit = True
        with pytest.raises(APIError, match="the server is stopping"):
            list(stream)
        for one in posted:
            answer = one.result(PATIENCE_S)
            assert answer.status_code == 503 and answer.json()["error"]["message"] == STOPPING


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_shows_that_the_decoding_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the thread by what is no Exception; neither this request nor the next one may hang."""

    def exit_thread(*_: object, **__: object) -> None:
        raise SystemExit

    with serve() as served:
        health = httpx2.get(f"{served.url}/health")
        assert health.status_code == 200 and health.json()["status"] == "ok", "control"
        monkeypatch.setattr(NativeTarget, "forward", exit_thread)
        for _ in range(2):
            answer = served.post(ask(served))
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "stopping"
        served.service.scheduler.stop()
        health = httpx2.get(f"{served.url}/health")
        assert health.status_code == 503
        ended = {"status": "the decoding thread has ended", "running": 0, "waiting": 0}
        assert health.json() == ended
