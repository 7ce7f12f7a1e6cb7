"""Latency of the HTTP server under Poisson arrivals, with several drafters and without any.

    python scripts/bench/load.py target=models/smollm2_135m "drafters=[FOLDER,prompt_lookup]" \\
        "rates=[0.5,1,2]"

First, batches of each size are decoded with each draft length. The fastest lengths are each
drafter's table `num_draft_tokens_by_batch`, which `serving.api` takes and, in the file
results/load.NAME.yaml, vLLM. Then servers without a drafter, and with each drafter with and without
its table, answer the same requests, which arrive at the same random times; `urls` adds other
servers, such as vLLM's. Seconds count from a request's arrival. All are measured in several passes,
in rotated order; a drafter pays at a rate, or stops paying, where the 95 % interval of its latency
over plain decoding's lies below or above 1. Plots are saved as results/load.*.png, and each answer
in results/load.answers.json.
"""

import asyncio
import itertools
import json
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx2

from decoding.engine import Engine, encode, with_costs
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sessions.draft_lengths import KEY, ranges_of
from jobs.drafters import read_card_name
from jobs.files import write_bytes
from jobs.paths import resolve_model
from jobs.syntax import quoted
from scripts.bench import common
from scripts.bench.load_figures import left_out, plots, summary, where_it_pays
from scripts.bench.load_requests import Answered, arrivals, offer
from scripts.bench.served_models import ServedOptions, load_engine
from scripts.bench.vllm_file import format_file, speculative_config
from scripts.server_process import run_server
from scripts.usage import run_script

PLAIN = "plain"
TABLE = "{} by batch"  # of a drafter, with its table
WARM_UP_TOKENS = 4  # of an unmeasured answer before each measurement


@dataclass
class Options(ServedOptions):
    # names, folders, or mappings with `use` and options
    drafters: list[Any] = field(default_factory=lambda: ["prompt_lookup"])
    rates: list[float] = field(default_factory=lambda: [1.0, 2.0, 4.0])  # requests a second
    requests: int = 32  # for each rate, the same in each pass
    passes: int = 3  # repetitions of all rates and servers
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8])  # rows of the table, from 1 on
    num_draft_tokens: int = 4  # longest draft
    max_new_tokens: int = 64  # of an answer
    least_gain: float = 1.02  # of a draft length over plain decoding; a smaller one counts as none
    urls: dict[str, str] = field(default_factory=dict)  # name -> address of another server
    seed: int = 1  # of arrivals and samples
    rounds: int = 3  # rounds of measurement for the table
    name: str = "load"  # name of the results file


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
    """Return the name of a drafter in the figures.

    It is the given one, that on the card of its folder, or the last part of the folder's path.
    """
    given = {"use": drafter} if isinstance(drafter, str) else drafter
    if "name" in given:
        return str(given["name"])
    used = Path(str(given.get("use")))
    return Path(read_card_name(used)).name if used.is_dir() else str(used)


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
    figures["vllm"] = write_vllm_file(drafter, engine, table, chosen)
    return figures, table


def write_vllm_file(
    drafter: str | Mapping[str, Any],
    engine: Engine,
    table: Sequence[Sequence[int]],
    chosen: Options,
) -> str:
    """Write a drafter's settings for vLLM; return the file's name, or why there is none."""
    assert engine.drafter is not None
    folder, layers = folder_of(drafter), engine.target.num_layers
    try:
        found = speculative_config(engine.drafter, folder, table, layers)
    except UserError as error:
        return str(error)
    name = re.sub(r"[^\w.-]+", "_", label_of(drafter)).strip("_.")
    file = f"{chosen.name}.{name}.yaml"
    common.write_result(file, format_file(found, chosen.target))
    return file


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


def measure_load(
    urls: Mapping[str, str], prompts: Sequence[list[int]], chosen: Options
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row of figures for each rate and server, the plain one first, and all answers.

    In each pass every server gets the same requests at the same times. The order of the servers is
    rotated from pass to pass, so that drift of the machine affects them alike.
    """
    models = {
        name: httpx2.get(f"{url}/v1/models").json()["data"][0]["id"] for name, url in urls.items()
    }
    names, rows, everything = list(urls), [], []
    times = {rate: arrivals(rate, chosen.requests, chosen.seed) for rate in chosen.rates}
    found: dict[tuple[float, str], list[list[Answered]]] = defaultdict(list)
    for number in range(chosen.passes):
        first = number * len(names) // chosen.passes
        for rate, name in itertools.product(chosen.rates, names[first:] + names[:first]):
            bodies = request_bodies(models[name], prompts, chosen)
            # a server's first request is slow, and so is the first after a pause
            warm_up = bodies[0] | {"max_tokens": WARM_UP_TOKENS}
            asyncio.run(offer(urls[name], [warm_up], [0.0]))
            answers = asyncio.run(offer(urls[name], bodies, times[rate]))
            found[rate, name].append(answers)
            mean = statistics.mean(one.whole for one in answers)
            print(
                f"  {number + 1}/{chosen.passes}, {rate:g}/s, {name}: {mean:.2f} s on average",
                file=sys.stderr,
                flush=True,
            )
    for rate, name in itertools.product(chosen.rates, names):
        figures = summary(found[rate, name], times[rate], found[rate, PLAIN])
        rows.append({"rate": rate, "server": name, **figures})
        for number, answers in enumerate(found[rate, name]):
            place = {"rate": rate, "server": name, "pass": number}
            everything += [
                place | {"request": request, **asdict(one)} for request, one in enumerate(answers)
            ]
    return rows, everything


def request_bodies(
    model: str, prompts: Sequence[list[int]], chosen: Options
) -> list[dict[str, Any]]:
    """Return the requests of a rate, the same for every server but for the model's name."""
    return [
        {
            "model": model,
            "prompt": prompts[number % len(prompts)],
            "max_tokens": chosen.max_new_tokens,
            "temperature": chosen.temperature,
            "seed": chosen.seed + number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(chosen.requests)
    ]


def check(chosen: Options) -> None:
    """Sort the options. Raises UserError for values that cannot be measured."""
    chosen.batches, chosen.rates = sorted(chosen.batches), sorted(chosen.rates)
    if chosen.batches[:1] != [1]:
        raise UserError(f"batches is {chosen.batches}, expected numbers of rows, 1 among them.")
    if not chosen.rates or chosen.rates[0] <= 0:
        raise UserError(f"rates is {chosen.rates}, expected requests a second above 0.")
    for key in ("requests", "passes", "rounds", "num_draft_tokens", "max_new_tokens"):
        if getattr(chosen, key) < 1:
            raise UserError(f"{key} is {getattr(chosen, key)}, expected at least 1.")
    names = [label_of(one) for one in chosen.drafters]
    sides = [PLAIN, *names, *map(TABLE.format, names), *chosen.urls]
    if not names or len({*sides}) < len(sides):
        raise UserError(
            f"drafters is {names} and urls has {[*chosen.urls]}, expected at least one drafter and "
            f"names that differ from each other, from {PLAIN} and from each drafter's "
            f"`{TABLE.format('DRAFTER')}`. Give a drafter as a mapping with `use` and `name`, or "
            f"rename the address."
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
        rows, answers = measure_load({**urls, **chosen.urls}, prompts, chosen)
    common.write_result(f"{chosen.name}.answers.json", json.dumps(answers))
    for plot in plots(rows, PLAIN):
        write_bytes(common.RESULTS / f"{chosen.name}.{plot.name}.png", plot.png)
    names = [name for name in [*sides, *chosen.urls] if name != PLAIN]
    pays = {name: where_it_pays(rows, name) for name in names} if chosen.passes > 1 else {}
    notes = left_out(chosen.requests, chosen.passes)
    common.save(
        chosen.name, chosen, {"drafters": figures, "pays": pays, "notes": notes, "rates": rows}
    )


if __name__ == "__main__":
    run_script(main)
