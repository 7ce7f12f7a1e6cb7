"""Many requests at once for the OpenAI-compatible server, half of which leave."""

import asyncio
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from decoding.engine import text_of
from decoding.rounds.batch import Row
from serving.api.answers import ChoiceText
from serving.api.scheduler import Job
from tests.support.api_server import Served, alone
from tests.support.tiny_targets import random_prompts

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_p": 0.9, "seed": 6},
)


def questions(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts and settings of requests; no two are equal."""
    prompts = random_prompts(count, longest=30, seed=1)
    return [
        (prompt, {**SAMPLING[i % len(SAMPLING)], "max_tokens": 8 + i % 9})
        for i, prompt in enumerate(prompts)
    ]


# the extension of vLLM's, under which answers have their token ids
WITH_IDS = {"return_token_ids": True}


def expected(served: Served, prompt: list[int], asked: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the text of a decode alone, and its tokens.

    A random model writes bytes that are no characters. Their text is that of a stream, which
    shows a byte before it can know that the next one spoils it.
    """
    given = {key: value for key, value in asked.items() if key != "max_tokens"}
    settings = replace(served.settings, max_new_tokens=asked["max_tokens"], **given)
    done = alone(prompt, settings)
    text = ChoiceText(lambda ids: text_of(served.engine, ids), (), prompt)
    return text.add(done.tokens, done.finish), done.tokens


class Arrivals:
    """Which prompts the server has received, for clients that leave afterwards."""

    def __init__(self, served: Served, prompts: Sequence[list[int]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._of = {tuple(prompt): asyncio.Event() for prompt in prompts}
        self._submit = served.service.scheduler.submit
        served.service.scheduler.submit = self.submit  # type: ignore[method-assign]

    def submit(self, job: Job) -> None:
        """Pass a job to the scheduler, and note its prompt."""
        self._submit(job)
        self._loop.call_soon_threadsafe(self._of[tuple(job.requests[0].prompt)].set)

    async def wait(self, prompt: list[int]) -> None:
        await self._of[tuple(prompt)].wait()

    def end(self, served: Served) -> None:
        """Let the scheduler receive jobs by its own method again."""
        del served.service.scheduler.submit


async def ask_all(
    served: Served, asked: Sequence[tuple[list[int], dict[str, Any]]]
) -> list[tuple[str, list[int]] | None]:
    """Send all requests at once; every second one leaves, half of these in mid-stream.

    The others of these leave up to 0.2 s after the server has received them, so that most still
    wait in its queue. Returns the texts and their tokens, None for the requests that left.
    """
    arrivals = Arrivals(served, [prompt for prompt, _ in asked])
    async with served.async_client() as client:

        async def ask(number: int) -> tuple[str, list[int]] | None:
            prompt, given = asked[number]
            create = client.completions.create
            if number % 2 == 0:
                done = await create(model=served.model, prompt=prompt, extra_body=WITH_IDS, **given)
                assert done.usage.completion_tokens == len(done.choices[0].token_ids)
                return done.choices[0].text, done.choices[0].token_ids
            if number % 4 == 1:
                stream = await create(
                    model=served.model, prompt=prompt, stream=True, **{**given, "max_tokens": 200}
                )
                async for _ in stream:
                    break
                await stream.close()
                return None
            whole = asyncio.ensure_future(
                create(model=served.model, prompt=prompt, **{**given, "max_tokens": 200})
            )
            await arrivals.wait(prompt)
            await asyncio.sleep(0.01 * (number % 20))
            whole.cancel()
            return None

        found = await asyncio.gather(*map(ask, range(len(asked))))
    arrivals.end(served)
    return found


def check_nothing_is_left() -> None:
    """Check that no job and no row is in memory."""
    gc.collect()
    left = [type(one).__name__ for one in gc.get_objects() if isinstance(one, Job | Row)]
    assert not left, f"left in memory: {Counter(left)}"
