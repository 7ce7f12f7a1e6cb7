"""Client of an OpenAI-compatible server: JSON requests with retries, many of them in flight."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from decoding.errors import UserError, without_stop
from jobs.run_files import WRONG, reason_of

Read = TypeVar("Read")
KEY = "OPENAI_API_KEY"  # environment variable; a key in a configuration would be saved with it
_LONGEST_PAUSE_S = 60.0
_CONNECT_S = 30.0
_REFUSED = (400, 413, 422)  # the request itself is at fault; another one may be answered
_LATER = (408, 409, 425, 429)  # like every 5xx: the same request may be answered later
_QUOTED = 300  # characters of an answer in a message


class RequestRefused(Exception):
    """A request that the server can read and does not answer; the message holds its words."""


class _TryAgain(Exception):
    """A failure that may pass; the message says what happened. pause_s: the server's wish, or 0."""

    def __init__(self, what: str, pause_s: float = 0.0) -> None:
        super().__init__(what)
        self.pause_s = pause_s


@dataclass(frozen=True)
class Patience:
    """Bounds of waiting for a server."""

    # longest wait for one answer
    timeout_s: float = 600.0
    # further tries after the first one
    retries: int = 6
    # pause before the first retry; it doubles with each further one, up to a minute
    pause_s: float = 1.0


class OpenAIClient:
    """Connections to one server, used as an asynchronous context.

    url: base URL, such as http://127.0.0.1:8000/v1. connections: number of requests in flight.
    advice: end of every error, such as what happens to finished work.
    """

    def __init__(
        self, url: str, patience: Patience, connections: int = 1, advice: str = ""
    ) -> None:
        self.url, self.patience, self.advice = url.rstrip("/"), patience, advice
        key = os.environ.get(KEY)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(
                patience.timeout_s, connect=min(_CONNECT_S, patience.timeout_s), pool=None
            ),
            limits=httpx2.Limits(
                max_connections=connections, max_keepalive_connections=connections
            ),
        )

    async def __aenter__(self) -> "OpenAIClient":
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(*error)

    async def find_model(self, name: str = "") -> dict[str, Any]:
        """Return the server's entry of the model `name`, or of its only model.

        Raises UserError if the server cannot be reached, lists no such model, or several.
        """
        models = await self._call("GET", "/models", None, _read_models, retries=0)
        listed = {str(model["id"]): model for model in models}
        if not name and len(listed) == 1:
            return next(iter(listed.values()))
        if not listed:
            raise UserError(f"{self.url} serves no model. Load one into the server and try again")
        if name not in listed:
            expected = f"server_model is '{name}', which it does not list" if name else "choose one"
            raise UserError(
                f"{self.url} serves {', '.join(listed)}; {expected}. Set "
                f"server_model= to a model of the list"
            )
        return listed[name]

    async def post(self, path: str, body: dict[str, Any], read: Callable[[Any], Read]) -> Read:
        """Send a request, again after failures that may pass, and return what `read` makes of it.

        read: converts the JSON object of an answer, and raises ValueError, KeyError or TypeError
        for a malformed one. Raises RequestRefused for a request that the server rejects, and
        UserError after the last try and for a wrong address, key or model.
        """
        return await self._call("POST", path, body, read, self.patience.retries)

    async def _call(
        self, method: str, path: str, body: Any, read: Callable[[Any], Read], retries: int
    ) -> Read:
        pause_s = self.patience.pause_s
        for left in range(retries, -1, -1):
            try:
                return await self._try(method, path, body, read)
            except _TryAgain as failure:
                if not left:
                    times = f" {retries + 1} times in a row, at last" if retries else ""
                    raise self._error(
                        f"{path} failed{times}: {failure}",
                        "Check that the server runs, and its own log",
                    ) from failure
                await asyncio.sleep(min(max(pause_s, failure.pause_s), _LONGEST_PAUSE_S))
                pause_s *= 2
        raise AssertionError("the last try returns or raises")

    async def _try(self, method: str, path: str, body: Any, read: Callable[[Any], Read]) -> Read:
        """Send a request once. Raises _TryAgain, RequestRefused or UserError."""
        try:
            answer = await self._http.request(method, self.url + path, json=body)
        except httpx2.TimeoutException as error:
            waited = f"no answer within {self.patience.timeout_s:g} s"
            raise _TryAgain(f"{waited} ({type(error).__name__})") from error
        except httpx2.TransportError as error:
            raise _TryAgain(f"{type(error).__name__}, {error}".rstrip(", ")) from error
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise UserError(
                f"server={self.url} is not an address ({error}), expected one such as "
                f"http://127.0.0.1:8000/v1"
            ) from error
        if answer.status_code != 200:
            raise self._failure(path, answer)
        kind = answer.headers.get("content-type", "")
        if method == "GET" and kind.startswith("text/html"):
            raise self._error(
                f"{path} is a web page, expected JSON",
                "Use the server's address with its /v1, such as http://127.0.0.1:8000/v1",
            )
        try:
            return read(answer.json())
        except WRONG as error:
            why = reason_of(error, answer.content)
            raise _TryAgain(
                f"an incomplete or malformed answer of {len(answer.content):,} bytes ({why[:200]})"
            ) from error

    def _failure(self, path: str, answer: httpx2.Response) -> Exception:
        """Return the exception for a status other than 200."""
        status, words = answer.status_code, " ".join(answer.text.split())[:_QUOTED]
        found = f"HTTP {status}: {words or 'no words'}"
        if status in _REFUSED:
            return RequestRefused(found)
        if status in _LATER or status >= 500:
            wish = answer.headers.get("retry-after", "")
            return _TryAgain(found, float(wish) if wish.isdigit() else 0.0)
        if status in (401, 403):
            return self._error(f"{path}: {found}", f"Set {KEY} to a key that it accepts")
        return self._error(
            f"{path}: {found}",
            "Check the address, which usually ends in /v1, and server_model=; for a server that "
            "has only chats set server_prompts=messages",
        )

    def _error(self, what: str, remedy: str) -> UserError:
        return UserError(f"{self.url}{without_stop(what)}. {remedy}{self.advice}")


def _read_models(content: Any) -> list[dict[str, Any]]:
    models = content["data"]
    if not isinstance(models, list) or not all("id" in model for model in models):
        raise ValueError("expected a list of models under data")
    return models
