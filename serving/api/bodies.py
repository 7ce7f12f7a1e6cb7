"""Reading of request bodies: bounded, UTF-8, a JSON object."""

import asyncio
import json
from contextlib import suppress
from typing import Any, NoReturn

from starlette.requests import Request

from decoding.errors import without_stop
from decoding.values import quote_json
from serving.api.errors import RequestError

BODY_SECONDS = 60.0  # longest time in which a body arrives
DRAIN_SECONDS = 10.0  # how long the rest of a refused body is read and dropped
MIB = 1 << 20


async def read_object(
    request: Request, most_bytes: int, seconds: float = BODY_SECONDS
) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    seconds: in which the body must arrive. Raises RequestError for another content type, for more
    than `most_bytes`, for a body that arrives too slowly, and for one that is not a JSON object in
    UTF-8.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        await drop(request)
        raise RequestError(
            f"the content type is '{kind}', expected application/json. Send the header "
            f"Content-Type: application/json.",
            status=415,
        )
    return parse_object(await _read(request, most_bytes, seconds))


async def drop(request: Request) -> None:
    """Read an unread body before its request is refused, for a limited time; keep nothing of it.

    A client that still sends would not see the answer. Raises ClientDisconnect if it leaves.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for _ in request.stream():
                pass


async def _read(request: Request, most_bytes: int, seconds: float) -> bytes:
    """Return the body. Of one that is too large nothing is kept.

    The rest is read before the answer, as a client that still sends would not see it.
    """
    parts, size, now = list[bytes](), 0, asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(seconds) as limit:
            async for part in request.stream():
                if size <= most_bytes < size + len(part):
                    parts.clear()
                    limit.reschedule(now() + DRAIN_SECONDS)
                size += len(part)
                if size <= most_bytes:
                    parts.append(part)
    except TimeoutError as error:
        if size <= most_bytes:
            raise RequestError(
                f"the body did not arrive within {seconds:g} s. Send it faster.", status=408
            ) from error
    if size > most_bytes:
        raise RequestError(
            f"the body has more than {most_bytes:,} bytes, the limit of this server "
            f"(max_body_mib={most_bytes // MIB}). Send a smaller request.",
            status=413,
            code="body_too_large",
        )
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of these bytes. Raises RequestError, which names the place."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: byte {error.start} is 0x{body[error.start]:02x} "
            f"({error.reason}). Encode the JSON as UTF-8."
        ) from error
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body is not valid JSON: {without_stop(error)}. Correct it."
        ) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply. Send a flat JSON object.") from error
    except ValueError as error:  # a number with more digits than Python reads
        raise RequestError(f"the body is not valid JSON: {without_stop(error)}.") from error
    if not isinstance(found, dict):
        raise RequestError(f"the body is {quote_json(found)}, expected a JSON object in braces.")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
