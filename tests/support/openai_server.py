"""A small OpenAI-compatible server on loopback that runs a real target, with planted faults."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from decoding import generate, load
from decoding.engine import Engine, Reply
from training.data.chat import render_prompt

# Names of faults, by the number of the request that they change.
Faults = Callable[[int], str]


@dataclass
class Served:
    """Address of a running server, and the bodies of the requests that it has read."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    # number of requests that were being answered at the same time
    most_in_flight: int = 0
    # values of the Authorization headers
    authorizations: set[str | None] = field(default_factory=set)

    @property
    def prompts(self) -> list[str]:
        """Prompts or messages of the requests, as JSON."""
        return [json.dumps(body.get("prompt", body.get("messages"))) for body in self.asked]


@cache
def _engine(folder: Path) -> Engine:
    return load(folder, dtype="float64")


@cache
def _reply(folder: Path, ids: tuple[int, ...], stops: tuple[int, ...], settings: str) -> Reply:
    """Return the reply to a prompt; a module's tests ask the same. settings: an object in JSON."""
    return generate(_engine(folder), [*ids], stop_token_ids=stops, **json.loads(settings))


@contextmanager
def serve(
    folder: Path,
    faults: Faults = lambda number: "",
    *,
    delay_s: float = 0.0,
    token_ids: bool = True,
    models: tuple[str, ...] = ("the-target",),
    context: int | None = None,
    bos: bool = False,
) -> Iterator[Served]:
    """Serve a model folder in float64.

    faults: see `_Handler`. delay_s: time that every answer takes in addition. token_ids: whether
    answers hold them. context: max_model_len of the listed models. bos: whether the server adds a
    token to every prompt, as some do.
    """
    engine, lock = _engine(folder), threading.Lock()
    served = Served("")
    busy = 0

    class Handler(_Handler):
        def do_GET(self) -> None:
            if not self.path.startswith("/v1/"):  # as servers with a page for people do
                self.send(200, {}, kind="text/html; charset=utf-8")
                return
            extra = {} if context is None else {"max_model_len": context}
            self.send(200, {"data": [{"id": name, "object": "model", **extra} for name in models]})

        def do_POST(self) -> None:
            nonlocal busy
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(served.asked)
                served.asked.append(body)
                served.authorizations.add(self.headers.get("Authorization"))
                busy += 1
                served.most_in_flight = max(served.most_in_flight, busy)
            try:
                self.answer(body, faults(number))
            finally:
                with lock:
                    busy -= 1

        def answer(self, body: dict[str, Any], fault: str) -> None:
            time.sleep(delay_s + (0.2 if fault == "slow" else 0.0))
            if self.fail(fault):
                return
            chat = self.path.endswith("/chat/completions")
            ids = render_prompt(engine.tokenizer, body["messages"]) if chat else body["prompt"]
            ids = [1, *ids] if bos else ids
            settings = {
                "max_new_tokens": 2 if fault == "cut" else body["max_tokens"],
                "temperature": body["temperature"],
                "top_p": body["top_p"],
                "top_k": max(body.get("top_k", 0), 0),
                "min_p": body.get("min_p", 0.0),
                "seed": body["seed"],
            }
            stops = tuple(body.get("stop_token_ids", engine.stop_token_ids))
            with lock:
                reply = _reply(folder, tuple(ids), stops, json.dumps(settings))
            text = "" if fault == "empty" else reply.text
            tokens = {"empty": [], "ids": [-1]}.get(fault, reply.tokens)
            choice: dict[str, Any] = {"index": 0, "finish_reason": reply.stats.finish}
            choice |= (
                {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            )
            if token_ids and body.get("return_token_ids"):
                choice["token_ids"] = tokens
            if fault == "filtered":
                choice["finish_reason"] = "content_filter"
            usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
            self.send(200, {"choices": [choice], "usage": usage}, truncate=fault == "truncate")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # no thread may outlive the test
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Sending of answers, and faults.

    Faults: drop (close the connection), half (close it within the body), truncate (a complete body
    that holds a part of the JSON), empty, ids (that no vocabulary has), slow, filtered, cut,
    refuse (400), 500, 429, 404.
    """

    protocol_version = "HTTP/1.1"
    timeout = 5  # seconds that an idle connection stays open

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def fail(self, fault: str) -> bool:
        """Plant a fault that replaces the answer. Returns whether there is one."""
        if fault == "drop":
            self.close_connection = True
        elif fault == "half":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [{"text": "the')
            self.close_connection = True
        elif fault == "refuse":
            self.send(400, {"error": {"message": "the prompt is not welcome"}})
        elif fault.isdigit():
            self.send(int(fault), {"error": {"message": f"planted {fault}"}})
        return fault in ("drop", "half", "refuse") or fault.isdigit()

    def send(
        self,
        status: int,
        content: dict[str, Any],
        truncate: bool = False,
        kind: str = "application/json",
    ) -> None:
        """Send JSON as content of this kind; truncate: only the first half of it."""
        body = json.dumps(content).encode()
        body = body[: len(body) // 2] if truncate else body
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # the client was killed
            self.close_connection = True
