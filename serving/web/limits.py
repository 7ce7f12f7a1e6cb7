"""Limits on requests, which Gradio leaves open: the size of a body, and uploads of files."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
MOST_BODY_BYTES = 1 << 20
MOST_DROPPED_BYTES = 256 << 20  # of a refused body; then its connection is closed
UPLOAD = "/upload"


class Limits:
    """An ASGI application that refuses large bodies and uploads, and passes on the rest."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request."""
        refusal = refusal_of(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        status, words = refusal
        await _drop_body(receive)  # a client that still sends would not read the answer
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": words.encode()})


async def _drop_body(receive: Receive) -> None:
    """Read a request's body, and keep nothing of it."""
    dropped, more = 0, True
    while more and dropped < MOST_DROPPED_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        more = message.get("more_body", False)


def refusal_of(scope: Scope) -> tuple[int, str] | None:
    """Return the status and the words with which a request is refused; None: it is not."""
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
    return None
