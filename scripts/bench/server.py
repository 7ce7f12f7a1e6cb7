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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

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
from serving.api.service import make_service
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


def main() -> None:
    """Measure all sides and save the figures."""
    chosen = common.read_options(Options)
    plain, served = (load_engine(chosen, chosen.drafter) for _ in range(2))
    settings = settings_of(plain, chosen)
    prompts = [
        ids for _, ids in common.fitting_prompts(plain, chosen.prompts, chosen.max_new_tokens)
    ][: chosen.max_prompts]
    cfg = ApiConfig(job="serving.api", output_dir="")
    shared = replace(settings, text_of=lambda ids: text_of(served, ids))
    service = make_service(ChatModels(served, shared, "", ""), cfg, Keys())
    texts: dict[str, list[str]] = {}
    cpu: dict[str, list[float]] = {}
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        thread = threading.Thread(target=service.run, args=[listener])
        thread.start()
        try:
            with httpx2.Client(timeout=600) as client:
                asked = [
                    {
                        "model": service.limits.model,
                        "prompt": prompt,
                        "max_tokens": chosen.max_new_tokens,
                        "temperature": chosen.temperature,
                        "seed": 1,
                    }
                    for prompt in prompts
                ]

                def direct() -> list[str]:
                    done = [
                        decode(plain.target, plain.drafter, [prompt], settings)[0]
                        for prompt in prompts
                    ]
                    return [text_of(plain, one.tokens) for one in done]

                def whole() -> list[str]:
                    answers = [client.post(url, json=body).json() for body in asked]
                    return [answer["choices"][0]["text"] for answer in answers]

                def stream() -> list[str]:
                    return [read_stream(client, url, body) for body in asked]

                def timed(name: str, side: Callable[[], list[str]]) -> Callable[[], float]:
                    def measure() -> float:
                        before = process_time()
                        seconds = common.measure_seconds(lambda: texts.__setitem__(name, side()))
                        cpu.setdefault(name, []).append(process_time() - before)
                        return seconds

                    return measure

                sides = {"direct": direct, "stream": stream, "whole": whole}
                figures = common.take_turns(
                    {name: timed(name, side) for name, side in sides.items()}, chosen.rounds
                )
        finally:
            service.server.should_exit = True
            thread.join()
    cpu = {name: values[-chosen.rounds :] for name, values in cpu.items()}  # without the warm-up
    ratios, cpu_ratios = (
        {name: common.ratio(found, name, "direct") for name in ("stream", "whole")}
        for found in (figures, cpu)
    )
    common.save(
        chosen.name,
        chosen,
        {
            "seconds": common.medians(figures),
            "over_direct": ratios,
            "cpu_over_direct": cpu_ratios,
            "equal_texts": texts["direct"] == texts["stream"] == texts["whole"],
            "goals": {
                name: common.goal(found["median"], found["median"] <= GOAL)
                for name, found in ratios.items()
            },
        },
    )


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
