"""The HTTP side of the server: routes, streams, and clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from decoding.engine import Engine, text_of
from decoding.values import quote_json
from serving.api.answers import Answer, ChoiceText
from serving.api.bodies import BODY_SECONDS, drop, read_object
from serving.api.errors import RequestError
from serving.api.keys import Keys
from serving.api.metrics import Metrics
from serving.api.pools import Pools
from serving.api.requests import CHAT, TEXT, Asked, Limits, read_request
from serving.api.scheduler import Delivery, Job, Scheduler

GONE = object()  # in a client's inbox: it has closed its connection
COMPLETE = ("stop", "length")  # outcomes of answers that their clients have read to the end
LEFT_STATUS = 499  # of an answer that nobody reads


class ClientLeftError(Exception):
    """A client that has closed its connection before its answer was complete."""


class Api:
    """The endpoints over one scheduler."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        limits: Limits,
        metrics: Metrics,
        *,
        keys: Keys,
        pools: Pools | None = None,
        most_body_bytes: int = 4 << 20,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self.engine, self.scheduler, self.limits, self.metrics = engine, scheduler, limits, metrics
        self.keys, self.pools = keys, pools
        self.most_body_bytes, self.body_seconds = most_body_bytes, body_seconds
        # one thread: prompts are encoded beside the event loop, but never by two threads at once
        self._encoder = ThreadPoolExecutor(1, "encoding")
        metrics.watch("running_rows", "Rows that are decoded.", lambda: scheduler.running)
        metrics.watch("waiting_requests", "Requests in the queue.", lambda: scheduler.waiting)

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route(CHAT, self._complete, methods=["POST"]),
                Route(TEXT, self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={
                RequestError: _answer_error,
                HTTPException: _answer_http_error,
                Exception: _answer_fault,
            },
        )

    def _model_entry(self) -> dict[str, Any]:
        entry = {"id": self.limits.model, "object": "model", "created": 0, "owned_by": "local"}
        return {**entry, "max_model_len": self.limits.context}

    async def _models(self, request: Request) -> Response:
        self.keys.check(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    async def _model(self, request: Request) -> Response:
        self.keys.check(request.headers.get("authorization"))
        name = request.path_params["name"]
        if name != self.limits.model:
            raise RequestError(
                f"the model {quote_json(name)} does not exist here, expected "
                f'"{self.limits.model}".',
                status=404,
                code="model_not_found",
                param="model",
            )
        return JSONResponse(self._model_entry())

    async def _health(self, request: Request) -> Response:
        alive = self.scheduler.is_alive
        found = {"running": self.scheduler.running, "waiting": self.scheduler.waiting}
        status = {"status": "ok" if alive else "the decoding thread has ended", **found}
        return JSONResponse(status, 200 if alive else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _key_of(self, request: Request) -> str:
        """Return the key of a request with a body. Raises RequestError for an unknown one."""
        try:
            return self.keys.check(request.headers.get("authorization"))
        except RequestError:
            await drop(request)
            raise

    async def _complete(self, request: Request) -> Response:
        """Answer a request for completions, whole or as a stream."""
        try:
            key = await self._key_of(request)
            body = await read_object(request, self.most_body_bytes, self.body_seconds)
            asked = await asyncio.get_running_loop().run_in_executor(
                self._encoder, read_request, request.url.path, body, self.limits
            )
            client = Client(self, asked, key)
            self.scheduler.submit(client.job)
        except RequestError:
            self.metrics.requests.labels("refused").inc()
            raise
        except ClientDisconnect:
            self.metrics.requests.labels("cancelled").inc()
            return Response(status_code=LEFT_STATUS)
        except Exception:  # a fault of ours, which `_answer_fault` answers
            self.metrics.requests.labels("failed").inc()
            raise
        if asked.stream:
            return EventStream(client)
        return await client.answer_whole(request.receive)


class Client:
    """One client that waits for its answer: its job, its inbox and the texts so far."""

    def __init__(self, api: Api, asked: Asked, key: str) -> None:
        self.api, self.asked = api, asked
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        pool = None if api.pools is None else api.pools.of(key)
        requests = [replace(request, pool=pool) for request in asked.requests]
        self.job = Job(requests, self._deliver, asked.stream)
        self.answer = Answer(api.limits.model, asked.is_chat, asked.prompt_tokens, asked.return_ids)
        self.choices = [
            ChoiceText(
                lambda ids: text_of(api.engine, ids),
                asked.stops,
                () if asked.is_chat else request.prompt,
            )
            for request in requests
        ]

    def _deliver(self, news: Delivery) -> None:
        """Put news of the decoding thread into the inbox."""
        with suppress(RuntimeError):  # the event loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, news)

    async def news(self) -> AsyncIterator[tuple[int, str]]:
        """Yield a choice's index and its new text, which may be empty at its end.

        Raises RequestError for a job that failed, and ClientLeftError.
        """
        while any(choice.finish is None for choice in self.choices):
            found = await self._inbox.get()
            if found is GONE:
                raise ClientLeftError
            if isinstance(found, RequestError):
                raise found
            for new in found:
                choice = self.choices[new.choice]
                if choice.finish is None:
                    text = choice.add(new.tokens, new.finish)
                    if text or choice.finish:
                        yield new.choice, text

    async def watch(self, receive: Receive) -> None:
        """Put GONE into the inbox when the client closes its connection."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._inbox.put_nowait(GONE)

    def end(self, outcome: str) -> None:
        """Count the request, and drop its rows if they still run."""
        self.api.scheduler.cancel(self.job)
        self.api.metrics.requests.labels(outcome).inc()
        if outcome in COMPLETE:
            self.api.metrics.answered.observe(perf_counter() - self.job.began)

    async def answer_whole(self, receive: Receive) -> Response:
        """Return the complete answer."""
        texts: list[list[str]] = [[] for _ in self.choices]
        watcher, outcome = asyncio.create_task(self.watch(receive)), "failed"
        try:
            async for index, text in self.news():
                texts[index].append(text)
            outcome = self.outcome
            return JSONResponse(self.answer.complete(["".join(one) for one in texts], self.choices))
        except ClientLeftError:
            outcome = "cancelled"
            return Response(status_code=LEFT_STATUS)
        finally:
            watcher.cancel()
            self.end(outcome)

    @property
    def outcome(self) -> str:
        """Why the answer has ended: length if any of its choices was cut."""
        return "length" if any(one.finish == "length" for one in self.choices) else "stop"


class EventStream(Response):
    """An answer as server-sent events. Its status waits for the first tokens, or their error."""

    def __init__(self, client: Client) -> None:
        self.client, self.background = client, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the answer is complete or the client leaves."""
        client, outcome, started = self.client, "failed", False
        watcher = asyncio.create_task(client.watch(receive))
        try:
            async for index, text in client.news():
                parts = [] if started else client.answer.first_parts(len(client.choices))
                parts += client.answer.parts(index, text, client.choices[index])
                if not started:
                    await send(START)
                    started = True
                await _send_events(send, parts)
            last = [client.answer.usage_part(client.choices)] if client.asked.include_usage else []
            await _send_events(send, last, end=True)
            outcome = client.outcome
        except RequestError as error:
            if not started:
                await JSONResponse(error.body, error.status)(scope, receive, send)
            else:
                await _send_events(send, [error.body], end=True)
        except (ClientLeftError, OSError):
            outcome = "cancelled"
        finally:
            watcher.cancel()
            client.end(outcome)


START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


async def _send_events(send: Send, parts: Sequence[dict[str, Any]], end: bool = False) -> None:
    """Send parts of a stream, and at its end the mark that OpenAI's clients expect."""
    lines = [f"data: {json.dumps(part, separators=(',', ':'))}\n\n" for part in parts]
    lines += ["data: [DONE]\n\n"] if end else []
    body = "".join(lines).encode()
    await send({"type": "http.response.body", "body": body, "more_body": not end})


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(error.status)
    return JSONResponse(error.body, error.status, headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path} does not exist. Use POST {CHAT} or POST {TEXT}."
    found = RequestError(words, status=error.status_code, code="unknown_url")
    return JSONResponse(found.body, error.status_code, error.headers)


async def _answer_fault(request: Request, error: Exception) -> Response:
    """Answer a request that met an error of the server itself, which its log shows."""
    found = RequestError(f"the server failed: {type(error).__name__}.", status=500, code="failed")
    return JSONResponse(found.body, 500)
