"""Seconds of single answers from the HTTP server, beside the same decode without a server.

    python scripts/bench/server.py target=models/smollm2_135m drafter=FOLDER

The server runs in this process on loopback, with a copy of the models, and is asked one request at
a time: as a stream, and for a whole answer. The sides take turns in every round, their texts must
be equal, and the ratios of their seconds to the plain decode's have a goal of 1.05. On a busy
machine the ratios of processor time, client included, say more.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx2

from decoding.engine import Engine, encode, text_of, with_costs
from decoding.loop import decode
from decoding.rounds.settings import Settings
from scripts.bench import common
from scripts.bench.served_models import ServedOptions, load_engine
from scripts.usage import run_script
from serving.api.config import ApiConfig
from serving.api.keys import Keys
from serving.api.service import Service, make_service
from serving.listening import listen
from serving.setup import ChatModels

GOAL = 1.05


@dataclass
class Options(ServedOptions):
    drafter: str = "prompt_lookup"  # name or folder
    max_prompts: int = 4  # prompts of the file
    max_new_tokens: int = 96  # of an answer
    num_draft_tokens: int = 4  # longest draft
    rounds: int = 7  # rounds of measurement
    name: str = "server"  # name of the results file


def settings_of(engine: Engine, chosen: Options) -> Settings:
    """Return the settings of all sides."""
    settings = Settings(
        max_new_tokens=chosen.max_new_tokens,
        temperature=chosen.temperature,
        num_draft_tokens=chosen.num_draft_tokens,
        verify="coupled",
        seed=1,
        stop_token_ids=engine.stop_token_ids,
        text_of=lambda ids: text_of(engine, ids),
    )
    return with_costs(engine, encode(engine, "Hello"), settings)


def sides_of(
    plain: Engine, settings: Settings, prompts: list[list[int]], ask: Callable[..., str]
) -> dict[str, Callable[[], list[str]]]:
    """Return the sides, each of which answers all prompts and returns the texts.

    ask: returns the server's text for a prompt, from a stream or not.
    """

    def direct() -> list[str]:
        done = [decode(plain.target, plain.drafter, [prompt], settings)[0] for prompt in prompts]
        return [text_of(plain, one.tokens) for one in done]

    def stream() -> list[str]:
        return [ask(prompt, stream=True) for prompt in prompts]

    def whole() -> list[str]:
        return [ask(prompt, stream=False) for prompt in prompts]

    return {"direct": direct, "stream": stream, "whole": whole}


@contextmanager
def run_service(service: Service) -> Iterator[str]:
    """Run a service on a free port until the block ends; yield its address."""
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=service.run, args=[listener])
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            service.server.should_exit = True
            thread.join()


def measure(sides: dict[str, Callable[[], list[str]]], rounds: int) -> dict[str, Any]:
    """Return the seconds, the ratios to the decode without a server, and the goals."""
    texts: dict[str, list[str]] = {}
    cpu: dict[str, list[float]] = {}

    def timed(name: str) -> float:
        before = process_time()
        seconds = common.measure_seconds(lambda: texts.__setitem__(name, sides[name]()))
        cpu.setdefault(name, []).append(process_time() - before)
        return seconds

    figures = common.take_turns({name: partial(timed, name) for name in sides}, rounds)
    cpu = {name: values[-rounds:] for name, values in cpu.items()}  # without the warm-up
    ratios, cpu_ratios = (
        {name: common.ratio(found, name, "direct") for name in sides if name != "direct"}
        for found in (figures, cpu)
    )
    return {
        "seconds": common.medians(figures),
        "over_direct": ratios,
        "cpu_over_direct": cpu_ratios,
        "equal_texts": all(found == texts["direct"] for found in texts.values()),
        "goals": {
            name: common.goal(found["median"], found["median"] <= GOAL)
            for name, found in ratios.items()
        },
    }


def main() -> None:
    """Measure all sides and save the figures."""
    chosen = common.read_options(Options)
    plain, served = (load_engine(chosen, chosen.drafter) for _ in range(2))
    settings = settings_of(plain, chosen)
    fitting = common.fitting_prompts(plain, chosen.prompts, chosen.max_new_tokens)
    prompts = [ids for _, ids in fitting][: chosen.max_prompts]
    cfg = ApiConfig(job="serving.api", output_dir="")
    shared = replace(settings, text_of=lambda ids: text_of(served, ids))
    service = make_service(ChatModels(served, shared, "", ""), cfg, Keys())
    asked = {
        "model": service.limits.model,
        "max_tokens": chosen.max_new_tokens,
        "temperature": chosen.temperature,
        "seed": 1,
    }
    with run_service(service) as url, httpx2.Client(timeout=600) as client:

        def ask(prompt: list[int], stream: bool) -> str:
            body = {**asked, "prompt": prompt}
            if stream:
                return read_stream(client, f"{url}/v1/completions", body)
            answer = client.post(f"{url}/v1/completions", json=body).json()
            return str(answer["choices"][0]["text"])

        found = measure(sides_of(plain, settings, prompts, ask), chosen.rounds)
    common.save(chosen.name, chosen, found)


def read_stream(client: httpx2.Client, url: str, body: dict[str, object]) -> str:
    """Return the text of a streamed answer."""
    pieces = []
    with client.stream("POST", url, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    return "".join(pieces)


if __name__ == "__main__":
    run_script(main)
