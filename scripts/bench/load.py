"""Latency of the HTTP server under Poisson arrivals, with several drafters and without any.

    python scripts/bench/load.py target=models/smollm2_135m "drafters=[FOLDER,prompt_lookup]" \\
        "rates=[0.5,1,2]"

First, batches of each size are decoded with each draft length. The fastest lengths are each
drafter's table `num_draft_tokens_by_batch`, which `serving.api` takes and, in the file
results/load.NAME.yaml, vLLM. Then servers without a drafter, and with each drafter with and without
its table, answer the same requests, which arrive at the same random times; `urls` adds other
servers, such as vLLM's. Seconds count from a request's arrival.
"""

import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from jobs.syntax import quoted
from scripts.bench import common
from scripts.bench.served_models import ServedOptions, load_engine
from scripts.bench.vllm_file import format_file, speculative_config
from scripts.server_process import run_server
from scripts.usage import run_script

PLAIN = "plain"
TABLE = "{} by batch"  # of a drafter, with its table
PERCENTILES = (50, 90, 99)
PATIENCE_S = 600.0


@dataclass
class Options(ServedOptions):
    # names, folders, or mappings with `use` and options
    drafters: list[Any] = field(default_factory=lambda: ["prompt_lookup"])
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


def drafts_nothing_from(table: Sequence[Sequence[int]]) -> int | None:
    """Return the number of rows from which no larger one has drafts; None if the largest has."""
    first, _, tokens = table[-1]
    return None if tokens else first


def label_of(drafter: str | Mapping[str, Any]) -> str:
    """Return the name of a drafter in the figures."""
    if isinstance(drafter, str):
        return drafter
    return str(drafter.get("name", drafter.get("use")))


def folder_of(drafter: str | Mapping[str, Any]) -> Path | None:
    """Return a drafter's folder; None for one without."""
    named = [drafter] if isinstance(drafter, str) else [drafter.get(k) for k in ("folder", "use")]
    return next((Path(one) for one in named if one and Path(one).exists()), None)


def learn_table(
    drafter: str | Mapping[str, Any], chosen: Options
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the figures of a drafter's draft lengths by batch size, and its table.

    The file for vLLM is written into the results folder.
    """
    engine = load_engine(chosen, drafter)
    assert engine.drafter is not None
    speeds = measure_lengths(engine, prompts_of(engine, chosen), chosen)
    table = choose_lengths(speeds, chosen.least_gain, max(chosen.batches))
    figures: dict[str, Any] = {
        "tokens_per_second": speeds,
        KEY: table,
        "drafts_nothing_from": drafts_nothing_from(table),
    }
    try:
        found = speculative_config(
            engine.drafter, folder_of(drafter), table, engine.target.num_layers
        )
    except UserError as error:
        figures["vllm"] = str(error)
    else:
        name = re.sub(r"[^\w.-]+", "_", label_of(drafter)).strip("_.")
        figures["vllm"] = f"{chosen.name}.{name}.yaml"
        common.write_result(figures["vllm"], format_file(found, chosen.target))
    return figures, table


def prompts_of(engine: Engine, chosen: Options) -> list[list[int]]:
    """Return the token ids of the prompts that fit the context with their answers."""
    return [ids for _, ids in common.fitting_prompts(engine, chosen.prompts, chosen.max_new_tokens)]


def override_of(drafter: str | Mapping[str, Any]) -> str:
    """Return the setting of serving.api that selects a drafter."""
    if isinstance(drafter, str):
        return f"drafter={resolve_model(drafter) if Path(drafter).exists() else drafter}"
    given = [
        f"{key}: {quoted(value) if isinstance(value, str) else json.dumps(value)}"
        for key, value in drafter.items()
        if key != "name"
    ]
    return f"drafter={{{', '.join(given)}}}"


# ------------------------------------------------------------------------------------- servers
@contextmanager
def servers(
    chosen: Options, sides: Mapping[str, Iterable[str]], folder: str
) -> Iterator[dict[str, str]]:
    """Run serving.api with each side's settings, in processes of their own; yield the addresses.

    folder: for what the jobs write.
    """
    given = {
        "target.path": resolve_model(chosen.target),
        "target.dtype": chosen.dtype,
        "target.device": chosen.device,
        "target.max_length": chosen.max_length,
        "threads": chosen.threads,
        "num_draft_tokens": chosen.num_draft_tokens,
        "max_rows": max(chosen.batches),
        "max_waiting": chosen.requests,
    }
    words = [f"{key}={value}" for key, value in given.items()]
    urls: dict[str, str] = {}
    with ExitStack() as running:
        for number, (name, overrides) in enumerate(sides.items()):
            # one after another, as each measures costs when it starts
            out = f"output_dir={folder}/{number}"
            started = running.enter_context(run_server("serving.api", *words, out, *overrides))
            urls[name] = started.url
        yield urls


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


def where_it_pays(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | None]:
    """Return the highest rate up to which a server's latencies are below the plain one's.

    stops_at: the next measured rate, at which they are not; None if there is none.
    """
    highest = None
    for row in rows:
        if row["server"] == name:
            if row["latency_over_plain"] >= 1:
                return {"up_to": highest, "stops_at": row["rate"]}
            highest = row["rate"]
    return {"up_to": highest, "stops_at": None}


def check(chosen: Options) -> None:
    """Sort the options. Raises UserError for values that cannot be measured."""
    chosen.batches, chosen.rates = sorted(chosen.batches), sorted(chosen.rates)
    if chosen.batches[:1] != [1]:
        raise UserError(f"batches is {chosen.batches}, expected numbers of rows from 1 on.")
    if not chosen.rates or chosen.rates[0] <= 0:
        raise UserError(f"rates is {chosen.rates}, expected requests a second above 0.")
    names = [label_of(one) for one in chosen.drafters]
    if not names or len({*names, PLAIN, *chosen.urls}) < len(names) + 1 + len(chosen.urls):
        raise UserError(
            f"drafters is {names}, expected at least one, each with a name of its own that is "
            f"neither {PLAIN} nor one of urls. Give a mapping with `use` and `name`."
        )


def main() -> None:
    """Measure the tables and the servers, and save the figures."""
    chosen = common.read_options(Options)
    check(chosen)
    prompts = prompts_of(load_engine(chosen, "prompt_lookup"), chosen)
    figures, sides = dict[str, Any](), {PLAIN: ["drafter=none"]}
    for drafter in chosen.drafters:
        name, setting = label_of(drafter), override_of(drafter)
        figures[name], table = learn_table(drafter, chosen)
        by_batch = f"{KEY}={json.dumps(table, separators=(',', ':'))}"
        sides |= {name: [setting], TABLE.format(name): [setting, by_batch]}
    with tempfile.TemporaryDirectory() as folder, servers(chosen, sides, folder) as urls:
        rows = measure_load({**urls, **chosen.urls}, prompts, chosen)
    pays = {name: where_it_pays(rows, name) for name in [*sides, *chosen.urls] if name != PLAIN}
    common.save(chosen.name, chosen, {"drafters": figures, "pays": pays, "rates": rows})


if __name__ == "__main__":
    run_script(main)
