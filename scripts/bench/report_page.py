"""Seconds and memory that an evaluation's rows and page take, for many prompts.

    python scripts/bench/report_page.py prompts=10000

The generations are simulated: each drafter accepts a token with one probability. A fresh process
reads them from a run folder, as a resumed eval.run does, computes the rows with their bootstrap
intervals, and writes the page. Start-up, with the imports, counts for its memory, not its seconds.
"""

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from eval.measure.parts import Slice, read_slices
from eval.measure.records import AUTOREGRESSIVE, Record, append_lines, read_records
from eval.report.page import Provenance, evaluation_page
from eval.statistics.rows import build_rows
from eval.statistics.schema import DrafterFacts, RunFacts
from scripts.bench import common
from scripts.usage import run_script

SECONDS, MEGABYTES = 20.0, 1000.0  # goals for 10,000 prompts
# name -> acceptance rate and milliseconds of a draft step
DRAFTERS = {"shallow": (0.7, 0.6), "deep": (0.8, 2.4), "prompt_lookup": (0.4, 0.05)}
STEP_MS, VERIFY_MS, REST_MS = 5.0, 0.2, 0.1  # of the target, of the rule, of the rest of a round
WIDER = 0.06  # cost of each further token of a forward, over that of one
CATEGORIES = 8


@dataclass
class Options(common.BenchOptions):
    prompts: int = 10_000  # prompts of the main part
    max_new_tokens: int = 128  # of each generation
    num_draft_tokens: int = 4  # of the main part
    sweep_prompts: int = 24  # prompts of the sweep, at draft lengths 1 to 8
    seed: int = 0  # of the simulated texts
    name: str = "report_page"  # name of the results file


def facts_of(name: str) -> DrafterFacts:
    """Return what rows state about a simulated drafter."""
    layers = {"shallow": 1, "deep": 4}.get(name, 0)
    return DrafterFacts(name, layers, 3_000_000 * layers, one_pass=not layers)


def simulate(
    random: np.random.Generator, drafter: str, gamma: int, part: str, unit: int, length: int
) -> Record:
    """Return a generation of `length` tokens by a drafter, or by the baseline at gamma 0."""
    alpha, step_ms = DRAFTERS.get(drafter, (0.0, 0.0))
    passes = random.random((length, max(gamma, 1))) < alpha
    accepted_R = passes[:, :gamma].cumprod(1).sum(1)
    rounds = 1 + int(np.searchsorted((accepted_R + 1).cumsum(), length))
    accepted_R = accepted_R[:rounds]
    accepted = [int((accepted_R > depth).sum()) for depth in range(gamma)]
    tested = [rounds, *accepted[:-1]] if gamma else []
    forward_ms = rounds * STEP_MS * (1 + WIDER * gamma)
    draft_ms = rounds * step_ms * (gamma if facts_of(drafter).layers else 1) * (gamma > 0)
    pace = 1 + 0.1 * random.random()
    seconds = pace * (forward_ms + draft_ms + rounds * (VERIFY_MS + REST_MS)) / 1000
    return Record(
        part=part,
        temperature=0.0,
        batch_size=1,
        drafter=drafter,
        num_draft_tokens=gamma,
        unit=unit,
        prompt_id=f"simulated-{unit}",
        category=f"category {unit % CATEGORIES}",
        turn=0,
        prompt_tokens=40,
        tokens=random.integers(0, 32_000, length).tolist(),
        finish="length",
        rounds=rounds,
        tested_by_depth=tested,
        accepted_by_depth=accepted,
        drafted=rounds * gamma,
        draft_steps=rounds * gamma,
        verified=rounds * gamma,
        prefill_seconds=0.01 * pace,
        decode_seconds=seconds,
        draft_seconds=pace * draft_ms / 1000,
        cpu_seconds=seconds + 0.01 * pace,
        differs_at=None,
        gap=None,
        trace="1" * (length - rounds) + "0" * rounds,
        forward_seconds=pace * forward_ms / 1000,
        verify_seconds=pace * rounds * VERIFY_MS / 1000,
    )


def write_run(folder: Path, chosen: Options) -> None:
    """Write the records and part times of a simulated run."""
    random = np.random.default_rng(chosen.seed)
    forwards = {n: STEP_MS * (1 + WIDER * (n - 1)) for n in range(1, 10)}
    for part, first, last, lengths in (
        ("sweep", 0, chosen.sweep_prompts, range(1, 9)),
        ("main", chosen.sweep_prompts, chosen.sweep_prompts + chosen.prompts, None),
    ):
        times = [
            Slice(part, 0.0, 1, name, step_ms, forwards, 100)
            for name, (_, step_ms) in DRAFTERS.items()
        ]
        append_lines(folder / "parts.jsonl", times)
        for unit in range(first, last):
            arms = [(AUTOREGRESSIVE, 0)]
            arms += [
                (name, gamma) for name in DRAFTERS for gamma in lengths or [chosen.num_draft_tokens]
            ]
            new = [simulate(random, *arm, part, unit, chosen.max_new_tokens) for arm in arms]
            append_lines(folder / "records.jsonl", new)


def build(folder: Path, length: int) -> dict[str, float]:
    """Build the page of a run folder; return seconds, processor seconds, and peak memory in MB."""
    began, cpu = time.perf_counter(), time.process_time()
    records = read_records(folder / "records.jsonl")
    read = time.perf_counter()
    run = RunFacts(
        target="simulated target",
        target_layers=12,
        target_parameters=24_000_000,
        benchmark="simulated prompts",
        verify="token",
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        allowed="",
        max_new_tokens=length,
        backend="native",
        dtype="float32",
        device="cpu",
        threads=2,
        hardware="simulated processor",
        seed=0,
        bootstrap_resamples=2000,
    )
    facts = {name: facts_of(name) for name in DRAFTERS}
    rows = build_rows(run, facts, read_slices(folder / "parts.jsonl"), records)
    built = time.perf_counter()
    made = Provenance("scripts/bench/report_page.py", "", "", unmeasured=["It is simulated."])
    page = evaluation_page(rows, records, made)
    (folder / "report.html").write_text(page, encoding="utf-8")
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": ended - began,
        "of_these_reading": read - began,
        "of_these_rows": built - read,
        "of_these_page": ended - built,
        "processor_seconds": time.process_time() - cpu,
        "peak_megabytes": peak / (1e6 if sys.platform == "darwin" else 1e3),
        "page_megabytes": len(page.encode()) / 1e6,
    }


def main() -> None:
    """Print and save the figures and, for 10,000 prompts, whether the goals are met."""
    chosen = common.read_options(Options)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        write_run(folder, chosen)
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=fresh) as pool:
            found = pool.submit(build, folder, chosen.max_new_tokens).result()
    print(f"{chosen.prompts} prompts, {len(DRAFTERS)} drafters")
    print(common.table(("figure", "value"), list(found.items())))
    goals = {
        "seconds": common.goal(found["seconds"], found["seconds"] <= SECONDS),
        "memory": common.goal(found["peak_megabytes"], found["peak_megabytes"] <= MEGABYTES),
    }
    common.save(chosen.name, chosen, {**found, "goals": goals}, show=False)
    print(json.dumps(goals))


if __name__ == "__main__":
    run_script(main)
