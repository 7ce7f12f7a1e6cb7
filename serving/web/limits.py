"""Limits on requests, which Gradio leaves open: their addresses, their bodies and uploads of files.

Gradio answers most requests that it does not expect with a traceback here and no word to the
visitor, so they are refused before it reads them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from decoding.values import is_int, quote_json
from serving.api.bodies import BODY_SECONDS, DRAIN_SECONDS, parse_object
from serving.api.errors import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Refusal = tuple[int, str] | None  # status and words
MOST_BODY_BYTES = 1 << 20
MOST_DROPPED_BYTES = 256 << 20  # of a refused body; then its connection is closed
LONGEST_SESSION = 64  # characters
UPLOAD = "/upload"
# addresses to which the page itself posts: calls of its functions, and the end of one
CALLS = ("/gradio_api/queue/join", "/gradio_api/run/predict")
ENDS = ("/gradio_api/reset", "/gradio_api/cancel")


class Limits:
    """An ASGI application that refuses what the page does not send, and passes on the rest."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        inputs: Mapping[int, int],
        body_seconds: float = BODY_SECONDS,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        """Guard an application.

        inputs: number of a function of the page -> number of its inputs. body_seconds: in which a
        body must arrive. drain_seconds: how long a refused body is read and dropped.
        """
        self.app, self.inputs = app, inputs
        self.body_seconds, self.drain_seconds = body_seconds, drain_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request."""
        refusal = refusal_of(scope) if scope["type"] == "http" else None
        if refusal is not None:
            # a client that still sends would not read the answer
            with suppress(TimeoutError):
                async with asyncio.timeout(self.drain_seconds):
                    await _drop_body(receive)
        elif scope["type"] == "http" and scope["method"] == "POST":
            try:
                async with asyncio.timeout(self.body_seconds):
                    body = await _read_body(receive)
            except TimeoutError:
                refusal = 408, f"the body did not arrive within {self.body_seconds:g} s."
            else:
                if body is None:
                    return  # the visitor has left
                refusal = wrong_call(scope["path"], body, self.inputs)
                receive = _replay(body, receive)
        if refusal is None:
            await self.app(scope, receive, send)
            return
        status, words = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": words.encode(errors="replace")})


async def _drop_body(receive: Receive) -> None:
    """Read a request's body, and keep nothing of it."""
    dropped, more = 0, True
    while more and dropped < MOST_DROPPED_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        more = message.get("more_body", False)


async def _read_body(receive: Receive) -> bytes | None:
    """Return a request's body, None if its sender leaves. Its declared length was checked."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body that was read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Any:
        return left.pop() if left else await receive()

    return receive_again


def refusal_of(scope: Scope) -> Refusal:
    """Return how a request is refused for its address and headers; None: it is not."""
    if UPLOAD in scope["path"]:
        return 403, "this page takes no files."
    if scope["method"] in ("GET", "HEAD"):
        return None
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if not length.isdigit():
        return 411, "a request needs a content-length."
    if int(length) > MOST_BODY_BYTES:
        return 413, f"a request has at most {MOST_BODY_BYTES:,} bytes, found {int(length):,}."
    if scope["method"] != "POST" or scope["path"] not in (*CALLS, *ENDS):
        return 404, "this page has no such address. Open it in a browser."
    return None


def wrong_call(path: str, body: bytes, inputs: Mapping[int, int]) -> Refusal:
    """Return how a body is refused that this page would not send; None: it is not.

    inputs: see `Limits`.
    """
    try:
        call = parse_object(body)
    except RequestError as error:
        return error.status, error.message
    if path not in CALLS:
        return None
    number: Any = call.get("fn_index")
    data, session = call.get("data"), call.get("session_hash")
    if not is_int(number) or number not in inputs:
        expected = f"expected one of {', '.join(map(str, inputs))}"
        return 400, f"fn_index is {quote_json(number)}, {expected}."
    if not isinstance(data, list) or len(data) != inputs[number]:
        return 400, f"data is {quote_json(data)}, expected a list of {inputs[number]} values."
    if not isinstance(session, str) or not 0 < len(session) <= LONGEST_SESSION:
        expected = f"expected 1 to {LONGEST_SESSION} characters"
        return 400, f"session_hash is {quote_json(session)}, {expected}."
    return None
