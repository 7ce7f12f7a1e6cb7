"""Part `generation` of recurrent.py: a head's speedup over autoregressive decoding.

Only held-out prompts whose greedy answer does not loop count; autoregressive decoding chooses them
before anything is measured. Every drafter drafts at its best length on `sweep_prompts` of them and
is judged on the others, interleaved by eval.run, with prompt lookup as the control.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoding.drafters.build import choose_drafter, make_drafter
from decoding.engine import Engine, load
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.load import AUTO
from decoding.rounds.settings import Settings
from decoding.rounds.stats import LOOPING_BELOW, distinct_n
from decoding.rounds.ties import TIE_GAP, choice_scores, first_difference, top_two_gap
from eval.config import BenchmarkConfig
from eval.statistics.schema import Row
from jobs.config import TargetConfig
from jobs.drafters import CONTROL
from jobs.files import write_text
from jobs.paths import resolve, resolve_model
from scripts.bench.common import (
    evaluate_drafters,
    fitting_prompts,
    goal,
    interval,
    row_figures,
    table,
)
from training.data.readers import Prompt, read_prompts

BATCH = 32  # prompts whose answers are decoded in one batch
BY_COST = "by cost"
Answered = tuple[Prompt, list[int], list[int]]  # a prompt, its ids, and the answer's ids


def measure_generation(chosen: Any) -> dict[str, Any]:
    """Measure speedups by beam width and compare greedy output with the target's."""
    if not chosen.head:
        raise UserError("head is empty. Set it to the folder of a recurrent head.")
    engine = load(resolve_model(chosen.target), device=chosen.device, dtype=chosen.decode_dtype)
    wanted = chosen.max_prompts + chosen.sweep_prompts
    prompts = read_prompts(resolve(chosen.prompts))
    asked, kept = find_prompts_without_loops(engine, prompts, wanted, chosen.max_new_tokens)
    print(f"prompts: {len(kept)} of the first {asked} do not loop when greedy", file=sys.stderr)
    same = compare_outputs(chosen, engine, [ids for _, ids, _ in kept][: chosen.exact_prompts])
    del engine
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen.work or temporary)
        file = write_prompts(folder / "prompts.jsonl", [prompt for prompt, _, _ in kept])
        for temperature in chosen.temperatures:
            found += race_drafters(
                chosen,
                folder / f"T{temperature:g}",
                file,
                make_arms(chosen, temperature),
                temperatures=[temperature],
                sweep=chosen.lengths,
                sweep_prompts=chosen.sweep_prompts,
                max_prompts=wanted,
            )
    return {
        "prompts": {"asked": asked, "kept": len(kept)},
        "greedy_output_by_beams": same,
        "goals": judge_goals(found, same),
        "rows": row_figures(found),
    }


def find_prompts_without_loops(
    engine: Engine, prompts: Sequence[Prompt], wanted: int, max_new_tokens: int
) -> tuple[int, list[Answered]]:
    """Find the first prompts whose greedy answer does not loop (distinct-4 of at least 0.5).

    Returns the number of prompts that were answered, and the prompts found.
    """
    settings = Settings(max_new_tokens, stop_token_ids=engine.stop_token_ids)
    found: list[Answered] = []
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        fitting = fitting_prompts(engine, batch, max_new_tokens)
        ids_B = [ids for _, ids in fitting]
        answers = decode(engine.target, None, ids_B, settings) if ids_B else []
        for (prompt, ids), one in zip(fitting, answers, strict=True):
            if distinct_n(one.tokens) >= LOOPING_BELOW:
                found.append((prompt, ids, one.tokens))
        if len(found) >= wanted:
            break
    return first + len(batch), found[:wanted]


def write_prompts(file: Path, prompts: Sequence[Prompt]) -> Path:
    """Write the first turns of prompts as an evaluation file."""
    records = [{"id": p.id, "category": p.category, "turns": p.turns[:1]} for p in prompts]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "\n".join(map(json.dumps, records)) + "\n")
    return file


def compare_outputs(
    chosen: Any, engine: Engine, prompts: Sequence[list[int]]
) -> dict[str, dict[str, int]]:
    """Return beam width -> numbers of greedy outputs by kind: equal, tie or different.

    At a `tie` the target's two best tokens are equal up to rounding where the output first differs.
    """
    settings = Settings(
        chosen.max_new_tokens,
        num_draft_tokens=chosen.beam_length,
        stop_token_ids=engine.stop_token_ids,
    )
    plain = [decode(engine.target, None, [ids], settings)[0].tokens for ids in prompts]
    options = {"use": "recurrent", "folder": resolve_model(chosen.head), "dtype": chosen.head_dtype}
    shared = {
        "backend": "native",
        "dtype": chosen.decode_dtype,
        "device": chosen.device,
        "execution": getattr(engine.target, "execution", AUTO),
    }
    found = {}
    for width in chosen.exact_widths:
        counts = found[str(width)] = {"equal": 0, "tie": 0, "different": 0}
        choice = choose_drafter({**options, "by_cost": False, "beam_width": width})
        head = make_drafter(choice, resolve_model(chosen.target), **shared)
        for ids, tokens in zip(prompts, plain, strict=True):
            at = first_difference(decode(engine.target, head, [ids], settings)[0].tokens, tokens)
            kind = "equal"
            if at is not None:
                gap = top_two_gap(choice_scores(engine.target, [*ids, *tokens[:at]], settings, 0))
                kind = "tie" if gap < TIE_GAP else "different"
            counts[kind] += 1
    return found


def make_arms(chosen: Any, temperature: float) -> list[dict[str, Any]]:
    """Return drafter entries: the head at every width, and with a width chosen from its costs.

    At temperatures above 0 there are entries with sampled beams too.
    """
    found = []
    shared = {"use": "recurrent", "folder": chosen.head, "dtype": chosen.head_dtype}
    for way, children in {"picked": "top_k", "drawn": "sampled"}.items():
        if children == "top_k" or temperature:
            sizes = [(f"{way} {width}", width, False) for width in chosen.widths]
            sizes.append((f"{way} {BY_COST}", max(chosen.widths), True))
            found += [
                {**shared, "children": children, "name": name, "beam_width": n, "by_cost": by_cost}
                for name, n, by_cost in sizes
            ]
    return found


def race_drafters(
    chosen: Any, folder: Path, prompts: Path, drafters: list[dict[str, Any]], **fields: Any
) -> list[Row]:
    """Decode the same prompts with all drafters and without one, interleaved; return the rows.

    chosen: options with target, decode_dtype, device, threads and max_new_tokens. fields: further
    fields of eval.run's configuration.
    """
    return evaluate_drafters(
        folder,
        threads=chosen.threads,
        target=TargetConfig(path=chosen.target, dtype=chosen.decode_dtype, device=chosen.device),
        benchmark=BenchmarkConfig(path=str(prompts), too_long="skip"),
        drafters=drafters,
        max_new_tokens=chosen.max_new_tokens,
        **fields,
    )


def judge_goals(rows: Sequence[Row], same: dict[str, dict[str, int]]) -> dict[str, dict[str, Any]]:
    """Compare every goal with the speedups on prompts that do not loop.

    same: output counts of `compare_outputs`.
    """
    speedups: dict[float, dict[str, float]] = {0: {}, 1: {}}
    for row in rows:
        if row.headline_speedup is not None:
            speedups.setdefault(row.temperature, {})[row.drafter] = row.headline_speedup
    lookup, greedy = speedups[0].pop(CONTROL, None), speedups[0].values()
    by_cost = [value for name, value in speedups[1].items() if name.endswith(BY_COST)]
    equal = not any(one["different"] for one in same.values())
    found = {"greedy output equal": goal(same, equal)}
    if greedy:
        best = max(greedy)
        found["greedy above 1.5"] = goal(best, best > 1.5)
        above = lookup is not None and best > lookup
        found["greedy above prompt lookup"] = goal([best, lookup], above)
    if by_cost:
        best, worst = max(by_cost), min(by_cost)
        found["T=1 above 1.2, better of picked and drawn by cost"] = goal(best, best > 1.2)
        found["T=1 by cost never below 0.97"] = goal(worst, worst >= 0.97)
    return found


def report(found: dict[str, Any]) -> str:
    """Return the figures of this part as Markdown tables."""
    keys = ("drafter", "temperature", "num_draft_tokens", "alpha", "tau", "cost_ratio", "overhead")
    speedup = ("speedup", "speedup_low", "speedup_high")
    rows = [
        [*(row[key] for key in keys), interval(*(row[key] for key in speedup))]
        for row in found["rows"]
    ]
    met = [
        [name, _format_found(one["found"]), "yes" if one["met"] else "NO"]
        for name, one in found["goals"].items()
    ]
    return f"{table([*keys, 'speedup'], rows)}\n\n{table(['goal', 'found', 'met'], met)}"


def _format_found(found: Any) -> str:
    """Format the speedups of a goal, or its output counts by width."""
    if isinstance(found, dict):
        return "; ".join(
            f"width {width}: {', '.join(f'{n} {kind}' for kind, n in of.items() if n)}"
            for width, of in found.items()
        )
    speedups = found if isinstance(found, list) else [found]
    return ", ".join("none" if one is None else f"{one:.2f}x" for one in speedups)
