"""Requests that arrive at random times at an HTTP server, and the seconds of their answers."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from decoding.errors import UserError

PATIENCE_S = 600.0


@dataclass(frozen=True)
class Answered:
    """A request's seconds from its arrival, and its text."""

    first_token: float
    whole: float
    tokens: int
    text: str

    @property
    def per_output_token(self) -> float:
        """Mean seconds from a token to the next one, the field's TPOT."""
        return (self.whole - self.first_token) / max(1, self.tokens - 1)


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return the seconds at which requests of a Poisson process arrive."""
    draws, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draws.expovariate(rate)
        times.append(now)
    return times


async def ask(client: httpx2.AsyncClient, url: str, body: dict[str, Any], began: float) -> Answered:
    """Send a request that arrived at `began`, and read its stream."""
    first, text, tokens = None, "", 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise UserError(
                f"{url} answered {answer.status_code}: {(await answer.aread())[:200]!r}"
            )
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line[6:])
            first = first or time.perf_counter()
            text += "".join(choice["text"] for choice in part["choices"])
            tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
    ended = time.perf_counter()
    return Answered((first or ended) - began, ended - began, tokens, text)


async def offer(
    url: str, bodies: Sequence[dict[str, Any]], times: Sequence[float]
) -> list[Answered]:
    """Send every request at its time, whether or not earlier ones are answered."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
        began = time.perf_counter()

        async def one(body: dict[str, Any], at: float) -> Answered:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            return await ask(client, url, body, began + at)

        return await asyncio.gather(*map(one, bodies, times))
