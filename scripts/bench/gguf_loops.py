"""A GGUF file in our loop beside llama.cpp's own server: plain, and with the best drafts of each.

    python scripts/bench/gguf_loops.py target=SmolLM2.Q4_1.gguf drafters=[PRUNED,prompt_lookup] \\
      their_drafter=FULL prompts=$SHALLOW_DRAFT_DATA/data/eval/mt_bench.jsonl

Both sides run the same file with the same cache, threads and prompts, one prompt at a time, and
times include the prompts. On `choosing_prompts` every way to draft runs once with every length, and
each side's fastest is chosen. Then plain and chosen ways take turns on the other prompts, each in
`rounds` rounds, of which the median counts. The server drafts with `their_drafter` and with its own
n-gram lookup. Where it samples, it accepts a drafted token that equals the one it samples; ours
tests the token by p / q. The machine must be idle, which is checked first.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import decoding
from decoding.drafters.build import choose_drafter, make_drafter
from decoding.drafters.registry import DRAFTERS
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.loop import decode
from decoding.models.native.linear import native_dtype
from decoding.rounds.settings import Settings
from eval.report.text import with_interval
from eval.statistics.metrics import paired_bootstrap
from jobs.paths import resolve_model
from scripts.bench import common
from scripts.bench.engines import check_idle
from scripts.usage import run_script
from serving.engines.conversion import prepare
from serving.engines.interface import EngineConfig, Method, Sampling
from serving.engines.process import EngineProcess
from serving.engines.registry import ENGINES, python_of

PAUSE_SECONDS = 0.3  # until the threads of the side before have stopped spinning
WAKING_PROMPT, WAKING_ANSWER = 8, 4  # tokens decoded untimed before each measured text
THEIRS = "llama_cpp"
PLAIN = {"ours": "ours, plain", THEIRS: "llama.cpp, plain"}


@dataclass
class Options(common.BenchOptions):
    target: str = ""  # GGUF file
    drafters: list[str] = field(default_factory=lambda: ["prompt_lookup"])  # of our loop
    their_drafter: str = ""  # folder or GGUF file of the server's draft model; empty: lookup alone
    prompts: str = "embedded:prompts"  # evaluation JSONL
    dtype: str = "float16"  # of both caches of keys and values
    lengths: list[int] = field(default_factory=lambda: [1, 2, 4])  # of drafts
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # 0: greedy
    choosing_prompts: int = 4  # prompts that choose each side's way to draft
    max_prompts: int = 12  # prompts that are measured
    max_new_tokens: int = 64  # of an answer
    rounds: int = 3  # rounds of measurement
    busy: bool = False  # measure on a machine that is not idle too
    name: str = "gguf_loops"  # name of the results file


# prompt ids and sampling -> tokens, seconds
Side = Callable[[list[int], Sampling], tuple[list[int], float]]


def our_sides(chosen: Options, engine: Engine) -> dict[str, Side]:
    """Return name -> plain decoding and each drafter with each length in our loop."""
    found = {PLAIN["ours"]: our_side(engine, None, 1)}
    for entry in chosen.drafters:
        asked: dict[str, str] = {"use": entry}
        if entry not in DRAFTERS:
            asked = {"use": str(resolve_model(entry)), "dtype": native_dtype(torch.device("cpu"))}
        drafter = make_drafter(
            choose_drafter(asked),
            resolve_model(chosen.target),
            backend="native",
            dtype=chosen.dtype,
            device="cpu",
            execution="auto",
        )
        for length in chosen.lengths:
            found[f"ours, {Path(entry).name} {length}"] = our_side(engine, drafter, length)
    return found


def our_side(engine: Engine, drafter: Drafter | None, length: int) -> Side:
    """Return a function that decodes one prompt in our loop."""

    def run(ids: list[int], sampling: Sampling) -> tuple[list[int], float]:
        settings = Settings(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            num_draft_tokens=length,
            stopping="fixed",
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
        )
        began = time.perf_counter()
        [row] = decode(engine.target, drafter, [ids], settings)
        return row.tokens, time.perf_counter() - began

    return run


def their_sides(
    chosen: Options, max_length: int, folder: Path, stack: ExitStack
) -> dict[str, Side]:
    """Start a server for each of llama.cpp's ways to decode, and return them by name."""
    methods = {PLAIN[THEIRS]: Method()}
    for length in chosen.lengths:
        methods[f"llama.cpp, n-gram {length}"] = Method("ngram", "", length)
        if chosen.their_drafter:
            model = resolve_model(chosen.their_drafter)
            methods[f"llama.cpp, {model.name} {length}"] = Method(
                "draft_model", str(model.resolve()), length
            )
    return {
        name: their_side(chosen, one, max_length, folder, stack) for name, one in methods.items()
    }


def their_side(
    chosen: Options, method: Method, max_length: int, folder: Path, stack: ExitStack
) -> Side:
    """Start a server, and return a function that decodes one prompt there."""
    python = python_of(THEIRS, {})
    config = EngineConfig(
        target=str(resolve_model(chosen.target).resolve()),
        dtype=chosen.dtype,
        device="cpu",
        threads=chosen.threads,
        max_length=max_length,
        batch_size=1,
        method=method,
    )
    config, variables = prepare(THEIRS, config, folder / "models", python)
    log = folder / f"{method.name}-{method.num_draft_tokens}.log"
    process = stack.enter_context(
        EngineProcess(ENGINES[THEIRS].worker, config, log, python, environment=variables)
    )

    def run(ids: list[int], sampling: Sampling) -> tuple[list[int], float]:
        result = process.decode([ids], sampling)
        return result.answers[0].tokens, result.seconds

    return run


def measure(
    sides: dict[str, Side], prompts: Sequence[list[int]], samplings: Sequence[Sampling], rounds: int
) -> dict[str, tuple[list[int], list[float]]]:
    """Return side -> the tokens of each answer, and its seconds, the median of all rounds."""
    names = list(sides)
    tokens: dict[str, list[int]] = {name: [0] * len(prompts) for name in names}
    times: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in names}
    for again in range(rounds):
        for place, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            shift = (again + place) % len(names)
            for name in names[shift:] + names[:shift]:
                time.sleep(PAUSE_SECONDS)
                waking = dataclasses.replace(sampling, max_new_tokens=WAKING_ANSWER)
                sides[name](ids[-WAKING_PROMPT:], waking)
                answer, seconds = sides[name](ids, sampling)
                tokens[name][place] = len(answer)
                times[name][place].append(seconds)
        print(f"  round {again + 1}/{rounds}", file=sys.stderr, flush=True)
    return {name: (tokens[name], [statistics.median(row) for row in times[name]]) for name in names}


def rates(found: dict[str, tuple[list[int], list[float]]]) -> dict[str, float]:
    """Return the tokens/s of each side."""
    return {name: sum(tokens) / sum(seconds) for name, (tokens, seconds) in found.items()}


def fastest(speeds: dict[str, float], side: str) -> str:
    """Return the fastest way to draft of our loop or of the server."""
    start = PLAIN[side].split(",")[0]
    drafts = {name: one for name, one in speeds.items() if name.startswith(f"{start},")}
    del drafts[PLAIN[side]]
    return max(drafts, key=lambda name: drafts[name])


def compare(
    chosen: Options,
    sides: dict[str, Side],
    prompts: list[list[int]],
    stops: tuple[int, ...],
    heat: float,
) -> dict[str, object]:
    """Print and return the speeds at one temperature, and the ratios of ours to llama.cpp's."""
    samplings = [
        Sampling(chosen.max_new_tokens, heat, seed=place, stop_token_ids=stops)
        for place in range(len(prompts))
    ]
    few = chosen.choosing_prompts
    tried = rates(measure(sides, prompts[:few], samplings[:few], 1))
    best = {side: fastest(tried, side) for side in PLAIN}
    used = {name: sides[name] for name in (*PLAIN.values(), *best.values())}
    found = measure(used, prompts[few:], samplings[few:], chosen.rounds)
    speeds, ratios = rates(found), {}
    for what, ours, theirs in (
        ("plain", PLAIN["ours"], PLAIN[THEIRS]),
        ("best drafts", best["ours"], best[THEIRS]),
        ("gain of our drafts", best["ours"], PLAIN["ours"]),
        ("gain of llama.cpp's drafts", best[THEIRS], PLAIN[THEIRS]),
    ):
        one = paired_bootstrap(*found[ours], *found[theirs])
        ratios[what] = with_interval(one.value, one.low, one.high)
    print(f"\ntemperature {heat:g}, {len(prompts) - few} prompts, median of {chosen.rounds} rounds")
    rows = [[name, one, speeds.get(name)] for name, one in tried.items()]
    print(common.table(("", "tokens/s while choosing", "tokens/s"), rows))
    print("\n".join(f"{what}: {one}" for what, one in ratios.items()))
    return {"choosing": tried, "tokens_per_second": speeds, "ratios": ratios}


def main() -> None:
    """Print and save the speeds and ratios at each temperature."""
    chosen = common.read_options(Options)
    if not chosen.busy:
        check_idle()
    engine = decoding.load(resolve_model(chosen.target), dtype=chosen.dtype)
    asked = common.fitting_prompts(engine, chosen.prompts, chosen.max_new_tokens)
    count = chosen.choosing_prompts + chosen.max_prompts
    if len(asked) < count or chosen.choosing_prompts < 1:
        raise UserError(f"{count} prompts are needed, 1 or more to choose, and {len(asked)} fit.")
    prompts = [ids for _, ids in asked[:: len(asked) // count]][:count]
    max_length = max(map(len, prompts)) + chosen.max_new_tokens + max(chosen.lengths) + 1
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sides = our_sides(chosen, engine) | their_sides(chosen, max_length, Path(folder), stack)
        for side in sides.values():  # the first call is slow
            side(prompts[0], Sampling(WAKING_ANSWER, stop_token_ids=engine.stop_token_ids))
        for heat in chosen.temperatures:
            figures[f"temperature {heat:g}"] = compare(
                chosen, sides, prompts, engine.stop_token_ids, heat
            )
    common.save(chosen.name, chosen, figures, show=False)


if __name__ == "__main__":
    run_script(main)
