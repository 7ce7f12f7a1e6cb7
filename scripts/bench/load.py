"""Latency of the HTTP server under Poisson arrivals, with and without a drafter.

    python scripts/bench/load.py target=models/smollm2_135m drafter=FOLDER "rates=[0.5,1,2]"

First, batches of each size are decoded with each draft length. The fastest lengths are the table
`num_draft_tokens_by_batch`, which `serving.api` and (as num_speculative_tokens_per_batch_size) vLLM
take. Then servers without a drafter, with one, and with one and this table answer the same
requests, which arrive at the same random times; `urls` adds other servers, such as vLLM's. Seconds
count from a request's arrival.
"""

import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx2

from decoding.engine import Engine, encode, with_costs
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sessions.draft_lengths import KEY, ranges_of
from jobs.paths import resolve_model
from scripts.bench import common
from scripts.bench.served_models import ServedOptions, load_engine

PLAIN, DRAFTER, TABLE = "plain", "drafter", "by batch"
VLLM_KEY = "num_speculative_tokens_per_batch_size"
PERCENTILES = (50, 90, 99)
PATIENCE_S = 600.0


@dataclass
class Options(ServedOptions):
    rates: list[float] = field(default_factory=lambda: [1.0, 2.0, 4.0])  # requests a second
    requests: int = 32  # for each rate
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8])  # rows of the table, from 1 on
    num_draft_tokens: int = 4  # longest draft
    max_new_tokens: int = 64  # of an answer
    least_gain: float = 1.02  # of a draft length over plain decoding; a smaller one counts as none
    urls: dict[str, str] = field(default_factory=dict)  # name -> address of another server
    seed: int = 1  # of arrivals and samples
    rounds: int = 3  # rounds of measurement for the table
    name: str = "load"  # name of the results file


@dataclass(frozen=True)
class Answered:
    """A request's seconds from its arrival, and its number of tokens."""

    first_token: float
    whole: float
    tokens: int
    text: str

    @property
    def per_token(self) -> float:
        """Seconds from a token to the next one."""
        return (self.whole - self.first_token) / max(1, self.tokens - 1)


# ------------------------------------------------------------------------------- draft lengths
def measure_lengths(
    engine: Engine, prompts: Sequence[list[int]], chosen: Options
) -> dict[int, dict[int, float]]:
    """Return tokens/s of full batches: number of rows -> draft length -> median of the rounds."""
    settings = Settings(
        max_new_tokens=chosen.max_new_tokens,
        temperature=chosen.temperature,
        verify="coupled",
        num_draft_tokens=chosen.num_draft_tokens,
        seed=chosen.seed,
        ignore_eos=True,
    )
    settings = with_costs(engine, encode(engine, "Hello"), settings)
    speeds: dict[int, dict[int, float]] = {}
    for rows in chosen.batches:
        asked = [prompts[place % len(prompts)] for place in range(rows)]

        def rate(tokens: int, asked: Sequence[list[int]] = asked) -> float:
            drafter = engine.drafter if tokens else None
            given = replace(settings, num_draft_tokens=tokens)
            done = decode(engine.target, drafter, asked, given)
            seconds = max(one.decode_seconds for one in done)
            return sum(len(one.tokens) for one in done) / seconds

        lengths = range(chosen.num_draft_tokens + 1)
        sides = {str(tokens): lambda tokens=tokens: rate(tokens) for tokens in lengths}
        found = common.medians(common.take_turns(sides, chosen.rounds))
        speeds[rows] = {int(tokens): speed for tokens, speed in found.items()}
    return speeds


def choose_lengths(
    speeds: Mapping[int, Mapping[int, float]], least_gain: float, most_rows: int
) -> list[list[int]]:
    """Return the table of the fastest draft lengths; none where the gain is below `least_gain`."""
    best = {rows: max(found, key=found.__getitem__) for rows, found in speeds.items()}
    pays = {rows: speeds[rows][best[rows]] >= least_gain * speeds[rows][0] for rows in best}
    return ranges_of({rows: best[rows] if pays[rows] else 0 for rows in best}, most_rows)


# ------------------------------------------------------------------------------------- servers
@contextmanager
def server(chosen: Options, folder: str, *overrides: str) -> Iterator[str]:
    """Run serving.api in a process of its own; yield its address."""
    given = {
        "target.path": resolve_model(chosen.target),
        "target.dtype": chosen.dtype,
        "target.device": chosen.device,
        "target.max_length": chosen.max_length,
        "threads": chosen.threads,
        "num_draft_tokens": chosen.num_draft_tokens,
        "max_rows": max(chosen.batches),
        "max_waiting": chosen.requests,
        "port": 0,
        "output_dir": folder,
    }
    words = [f"{key}={value}" for key, value in given.items()]
    command = [sys.executable, "-m", "serving.api", *words, *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines: list[str] = []
        while (found := re.search(r"at (http://\S+)/v1", lines[-1] if lines else "")) is None:
            lines.append(process.stdout.readline())
            if not lines[-1]:
                raise UserError(f"the server ended before it listened: {' '.join(lines)}")
        yield found[1]
    finally:
        process.terminate()
        process.wait()


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


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return percentiles by the nearest rank."""
    ranked = sorted(values)
    return {f"p{p}": ranked[-(-p * len(ranked) // 100) - 1] for p in PERCENTILES}


def summary(found: Sequence[Answered], times: Sequence[float], plain: Sequence[Answered]) -> dict:
    """Return the figures of a server at one rate.

    in_system: mean number of requests that wait or run, by Little's law.
    """
    ended = max(at + one.whole for at, one in zip(times, found, strict=True))
    seconds = ended - times[0]
    pairs = list(zip(found, plain, strict=True))
    return {
        "tokens_per_second": sum(one.tokens for one in found) / seconds,
        "in_system": sum(one.whole for one in found) / seconds,
        "first_token_s": percentiles([one.first_token for one in found]),
        "per_token_s": percentiles([one.per_token for one in found]),
        "latency_s": percentiles([one.whole for one in found]),
        "latency_over_plain": statistics.median(a.whole / b.whole for a, b in pairs),
        "equal_texts": sum(a.text == b.text for a, b in pairs),
    }


def measure_load(
    urls: Mapping[str, str], prompts: Sequence[list[int]], chosen: Options
) -> list[dict[str, Any]]:
    """Return a row of figures for each rate and server, the plain one first."""
    models = {
        name: httpx2.get(f"{url}/v1/models").json()["data"][0]["id"] for name, url in urls.items()
    }
    rows = []
    for rate in chosen.rates:
        times, answers = arrivals(rate, chosen.requests, chosen.seed), {}
        for name, url in urls.items():
            bodies = [
                {
                    "model": models[name],
                    "prompt": prompts[number % len(prompts)],
                    "max_tokens": chosen.max_new_tokens,
                    "temperature": chosen.temperature,
                    "seed": chosen.seed + number,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                for number in range(chosen.requests)
            ]
            asyncio.run(offer(url, bodies[:1], [0.0]))  # the first request of a server is slow
            answers[name] = asyncio.run(offer(url, bodies, times))
            figures = summary(answers[name], times, answers[PLAIN])
            rows.append({"rate": rate, "server": name, **figures})
            print(f"  {rate:g} requests/s, {name}: {figures['latency_s']}", file=sys.stderr)
    return rows


def pays_up_to(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the highest rate up to which a server's latencies are below the plain one's."""
    highest = None
    for row in rows:
        if row["server"] == name:
            if row["latency_over_plain"] >= 1:
                break
            highest = row["rate"]
    return highest


def main() -> None:
    """Measure the table and the servers, and save the figures."""
    chosen = common.read_options(Options)
    chosen.batches, chosen.rates = sorted(chosen.batches), sorted(chosen.rates)
    if chosen.batches[:1] != [1]:
        raise UserError(f"batches is {chosen.batches}, expected numbers of rows from 1 on.")
    engine = load_engine(chosen)
    fitting = common.fitting_prompts(engine, chosen.prompts, chosen.max_new_tokens)
    prompts = [ids for _, ids in fitting]
    speeds = measure_lengths(engine, prompts, chosen)
    table = choose_lengths(speeds, chosen.least_gain, max(chosen.batches))
    del engine
    with ExitStack() as running, tempfile.TemporaryDirectory() as folder:
        drafter = f"drafter={chosen.drafter}"
        if Path(chosen.drafter).exists():
            drafter = f"drafter={resolve_model(chosen.drafter)}"
        by_batch = f"{KEY}={json.dumps(table, separators=(',', ':'))}"
        sides = {PLAIN: ["drafter=none"], DRAFTER: [drafter], TABLE: [drafter, by_batch]}
        urls = {
            name: running.enter_context(server(chosen, folder, *words))
            for name, words in sides.items()
        }
        rows = measure_load({**urls, **chosen.urls}, prompts, chosen)
    common.save(
        chosen.name,
        chosen,
        {
            "tokens_per_second": speeds,
            KEY: table,
            "vllm": {"num_speculative_tokens": chosen.num_draft_tokens, VLLM_KEY: table},
            "drafts_nothing_from": next((first for first, _, k in table if k == 0), None),
            "pays_up_to": {name: pays_up_to(rows, name) for name in (DRAFTER, TABLE)},
            "rates": rows,
        },
    )


if __name__ == "__main__":
    common.run_script(main)
