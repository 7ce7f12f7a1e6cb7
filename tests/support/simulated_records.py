"""SIMULATED records for tests of tables and reports: no model runs, and nothing is measured.

A drafter is a probability of acceptance per token and a cost per round, so the correct alpha, tau
and speedup are known.
"""

from __future__ import annotations

import numpy as np

from eval.measure.parts import Slice
from eval.measure.records import AUTOREGRESSIVE, Record
from eval.report.page import Provenance
from eval.statistics.schema import DrafterFacts, RunFacts

T_TARGET_MS = {n: 5.0 * (1 + 0.06 * (n - 1)) for n in range(1, 10)}
Drafters = dict[str, tuple[float, DrafterFacts, float]]  # name -> (alpha, facts, t_draft in ms)
DRAFTERS: Drafters = {
    "simulated-good": (0.72, DrafterFacts("simulated-good", 1, 3_100_000, False), 0.6),
    "simulated-slow": (0.75, DrafterFacts("simulated-slow", 6, 14_000_000, False), 3.4),
    "prompt_lookup": (0.45, DrafterFacts("prompt_lookup", 0, 0, True), 0.05),
}


PROVENANCE = Provenance(
    command="python -m eval.run drafters=[simulated]",
    date="2026-01-01 00:00:00",
    versions={"torch": "0"},
    prompt_counts={"read": 40, "kept": 40},
    prompt_file="simulated.jsonl",
    revision="none",
    raw_data={"results.jsonl": "rows"},
    unmeasured=["Everything: these records are simulated."],
)


def run_facts(**changes: object) -> RunFacts:
    values = {
        "target": "simulated target",
        "target_layers": 12,
        "target_parameters": 24_000_000,
        "benchmark": "simulated prompts",
        "verify": "token",
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "allowed": "",
        "max_new_tokens": 128,
        "backend": "native",
        "dtype": "float32",
        "device": "cpu",
        "threads": 2,
        "hardware": "simulated processor",
        "seed": 0,
        "bootstrap_resamples": 500,
    }
    return RunFacts(**{**values, **changes})  # type: ignore[arg-type]


def slices(drafters: Drafters = DRAFTERS, *, slower: float = 1.0) -> list[Slice]:
    return [
        Slice(
            part,
            temperature,
            1,
            name,
            slower * t_draft,
            {n: slower * ms for n, ms in T_TARGET_MS.items()},
            160,
        )
        for part in ("sweep", "main")
        for temperature in (0.0, 1.0)
        for name, (_, _, t_draft) in drafters.items()
    ]


def generation(
    rng: np.random.Generator,
    *,
    drafter: str,
    gamma: int,
    temperature: float,
    unit: int,
    part: str,
    length: int = 128,
    drafters: Drafters = DRAFTERS,
    slower: float = 1.0,
) -> Record:
    """Simulate a generation of `length` tokens; `unit` seeds the prompt's difficulty and pace."""
    hard = np.random.default_rng(unit).normal(0, 0.05)
    pace = slower * (1 + 0.1 * np.random.default_rng(unit + 1).random())
    looping = unit % 7 == 3 and temperature == 0
    alpha, facts, t_draft = drafters.get(drafter, (0.0, DrafterFacts(drafter, 0, 0, False), 0.0))
    alpha = float(np.clip(alpha - 0.05 * (temperature > 0) + hard + 0.2 * looping, 0.02, 0.98))
    tested, accepted = [0] * gamma, [0] * gamma
    emitted, rounds, drafted, milliseconds, draft_ms, forward_ms = 0, 0, 0, 0.0, 0.0, 0.0
    while emitted < length:
        offered = gamma if drafter != "prompt_lookup" or rng.random() < 0.4 else 0
        passed = 0
        while passed < offered and rng.random() < alpha:
            passed += 1
        for depth in range(min(passed + 1, offered)):
            tested[depth] += 1
            accepted[depth] += depth < passed
        rounds, drafted, emitted = rounds + 1, drafted + offered, emitted + passed + 1
        draft_ms += t_draft if facts.one_pass else offered * t_draft
        forward_ms += T_TARGET_MS[offered + 1]
        milliseconds += T_TARGET_MS[offered + 1] + 0.2 + rng.random() * 0.1
    seconds = (milliseconds + draft_ms) * pace / 1000
    period = 5 if looping else 10_000
    tokens = [(7 * index + unit) % period for index in range(emitted)]
    return Record(
        part=part,
        temperature=temperature,
        batch_size=1,
        drafter=drafter,
        num_draft_tokens=gamma,
        unit=unit,
        prompt_id=f"simulated-{unit}",
        category=("writing", "code", "maths")[unit % 3],
        turn=0,
        prompt_tokens=40,
        tokens=tokens,
        finish="length",
        rounds=rounds,
        tested_by_depth=tested,
        accepted_by_depth=accepted,
        drafted=drafted,
        draft_steps=drafted,
        verified=drafted,
        prefill_seconds=0.01 * pace,
        decode_seconds=seconds,
        draft_seconds=draft_ms * pace / 1000,
        forward_seconds=forward_ms * pace / 1000,
        verify_seconds=0.1 * rounds * pace / 1000,
        cpu_seconds=seconds + 0.01 * pace,
        differs_at=None,
        gap=None,
    )


def run(
    *,
    prompts: int = 40,
    sweep_prompts: int = 6,
    gammas: tuple[int, ...] = (1, 2, 3, 4, 6, 8),
    gamma: int = 4,
    drafters: Drafters = DRAFTERS,
    seed: int = 0,
    slower: float = 1.0,
) -> list[Record]:
    """Simulate a run with a sweep and a main part, greedy and at temperature 1."""
    rng = np.random.default_rng(seed)
    records = []
    for temperature in (0.0, 1.0):
        for unit in range(prompts):
            part = "sweep" if unit < sweep_prompts else "main"
            arms = [(AUTOREGRESSIVE, 0)]
            arms += [
                (name, g) for name in drafters for g in (gammas if part == "sweep" else (gamma,))
            ]
            for name, g in arms:
                records.append(
                    generation(
                        rng,
                        drafter=name,
                        gamma=g,
                        temperature=temperature,
                        unit=unit,
                        part=part,
                        drafters=drafters,
                        slower=slower,
                    )
                )
    return records


def pick(rows, drafter, temperature=0.0, part="main"):
    return next(
        r for r in rows if (r.drafter, r.temperature, r.part) == (drafter, temperature, part)
    )
