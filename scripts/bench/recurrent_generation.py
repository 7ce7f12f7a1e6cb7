"""Part `generation` of scripts/bench/recurrent.py: what a recurrent head gains over our own
autoregressive decoding, and whether it says the same.

Only held-out prompts count whose greedy answer does not loop: they are chosen by plain decoding,
before anything is measured. Every drafter drafts as long as is best for it on `sweep_prompts` of
them, and is judged on the others, interleaved by eval.run; prompt lookup, the control, stands
beside.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import eval.run
from decoding.devices import device_of
from decoding.drafters.registry import AUTO
from decoding.engine import Engine, encode, load
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.native.linear import draft_dtype
from decoding.rounds.settings import Settings
from decoding.rounds.stats import LOOPING_BELOW, distinct_n
from decoding.rounds.ties import TIE_GAP, choice_scores, first_difference, top_two_gap
from eval.config import BenchmarkConfig, EvalConfig
from eval.statistics.schema import Row, read_rows
from jobs.config import TargetConfig
from jobs.drafters import CONTROL
from jobs.files import write_text
from jobs.paths import resolve
from recurrent_drafting.drafter import RecurrentDrafter
from scripts.bench.common import interval, table
from training.data.readers import Prompt, read_prompts

ASKED_TOGETHER = 32  # prompts whose plain answers are decoded in one batch
BY_COST = "by cost"
ROW_KEYS = (
    "drafter",
    "temperature",
    "num_draft_tokens",
    "prompts",
    "alpha",
    "tau",
    "t_draft_ms",
    "cost_ratio",
    "speedup",
    "speedup_low",
    "speedup_high",
    "headline_prompts",
    "headline_speedup",
    "overhead",
    "lossless",
    "cpu_share",
)


def generation(chosen: Any) -> dict[str, Any]:
    """Speedups of heads of several beam widths, greedy and sampled, against the goals, and whether
    greedy output is the target's own.
    """
    if not chosen.head:
        raise UserError("head is empty: part=generation needs the folder of a recurrent head")
    engine = load(resolve(chosen.target), device=chosen.device, dtype=chosen.decode_dtype)
    wanted = chosen.max_prompts + chosen.sweep_prompts
    asked, chosen_prompts = unlooping(
        engine, read_prompts(resolve(chosen.prompts)), wanted, chosen.max_new_tokens
    )
    print(
        f"prompts: {len(chosen_prompts)} of the first {asked} do not loop when greedy",
        file=sys.stderr,
    )
    same = same_output(
        chosen, engine, [ids for _, ids, _ in chosen_prompts][: chosen.exact_prompts]
    )
    del engine
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen.work or temporary)
        file = write_prompts(folder / "prompts.jsonl", [prompt for prompt, _, _ in chosen_prompts])
        for temperature in chosen.temperatures:
            race = Race(chosen, file, chosen.max_prompts + chosen.sweep_prompts)
            found += race(folder / f"T{temperature:g}", arms(chosen, temperature), [temperature])
    return {
        "prompts": {"asked": asked, "kept": len(chosen_prompts)},
        "greedy_output_by_beams": same,
        "goals": goals(found, same),
        "rows": [{key: getattr(row, key) for key in ROW_KEYS} for row in found],
    }


def unlooping(
    engine: Engine, prompts: Sequence[Prompt], wanted: int, max_new_tokens: int
) -> tuple[int, list[tuple[Prompt, list[int], list[int]]]]:
    """The first prompts whose plain greedy answer does not loop (distinct-4 of 0.5 or more):
    (prompts asked, [(prompt, its ids, the answer)]).
    """
    settings = Settings(max_new_tokens, stop_token_ids=engine.stop_token_ids)
    found: list[tuple[Prompt, list[int], list[int]]] = []
    for start_at in range(0, len(prompts), ASKED_TOGETHER):
        batch = prompts[start_at : start_at + ASKED_TOGETHER]
        asked = [
            (one, encode(engine, [{"role": "user", "content": one.turns[0]}])) for one in batch
        ]
        fitting = [
            (one, ids) for one, ids in asked if len(ids) + max_new_tokens < engine.target.max_length
        ]
        if fitting:
            answers = decode(engine.target, None, [ids for _, ids in fitting], settings)
            pairs = zip(fitting, answers, strict=True)
            found += [
                (*pair, one.tokens)
                for pair, one in pairs
                if distinct_n(one.tokens) >= LOOPING_BELOW
            ]
        if len(found) >= wanted:
            break
    return start_at + len(batch), found[:wanted]


def write_prompts(file: Path, prompts: Sequence[Prompt]) -> Path:
    """The first turns of prompts as an evaluation file."""
    lines = [
        json.dumps({"id": one.id, "category": one.category, "turns": one.turns[:1]})
        for one in prompts
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "\n".join(lines) + "\n")
    return file


def same_output(
    chosen: Any, engine: Engine, prompts: Sequence[list[int]]
) -> dict[str, dict[str, int]]:
    """By beam width, how many greedy outputs are plain decoding's: equal, equal up to a tie
    (float32 rounds), or different.
    """
    settings = Settings(
        chosen.max_new_tokens,
        num_draft_tokens=chosen.beam_length,
        stop_token_ids=engine.stop_token_ids,
    )
    plain = [decode(engine.target, None, [ids], settings)[0].tokens for ids in prompts]
    found = {}
    for width in chosen.exact_widths:
        head = RecurrentDrafter(
            resolve(chosen.head), beam_width=width, dtype=head_dtype(chosen), device=chosen.device
        )
        counts = found[str(width)] = {"equal": 0, "tie": 0, "different": 0}
        for ids, tokens in zip(prompts, plain, strict=True):
            at = first_difference(decode(engine.target, head, [ids], settings)[0].tokens, tokens)
            if at is None:
                counts["equal"] += 1
                continue
            gap = top_two_gap(choice_scores(engine.target, [*ids, *tokens[:at]], settings, 0))
            counts["tie" if gap < TIE_GAP else "different"] += 1
    return found


def head_dtype(chosen: Any) -> str:
    """The dtype that the head drafts in."""
    if chosen.head_dtype != AUTO:
        return str(chosen.head_dtype)
    return draft_dtype(chosen.decode_dtype, torch.device(device_of(chosen.device)))


def arms(chosen: Any, temperature: float) -> list[dict[str, Any]]:
    """Heads of every width, and one whose width and length follow the costs; greedy decoding always
    picks, so that it needs no drawn ones.
    """
    found = []
    ways = {"picked": "top_k", "drawn": "sampled"} if temperature else {"picked": "top_k"}
    for way, children in ways.items():
        shared = {
            "use": "recurrent",
            "folder": chosen.head,
            "children": children,
            "dtype": chosen.head_dtype,
        }
        fixed = {**shared, "by_cost": False}
        found += [
            {**fixed, "beam_width": width, "name": f"{way} {width}"} for width in chosen.widths
        ]
        found.append(
            {
                **shared,
                "beam_width": max(chosen.widths),
                "by_cost": True,
                "name": f"{way} {BY_COST}",
            }
        )
    return found


@dataclass(frozen=True)
class Race:
    """Drafters and plain decoding in turn on the same prompts, by eval.run."""

    chosen: Any  # target, decode_dtype, device, threads, lengths, sweep_prompts, max_new_tokens
    prompts: Path
    max_prompts: int
    seed: int = 0

    def __call__(
        self,
        folder: Path,
        drafters: list[dict[str, Any]],
        temperatures: list[float],
        lengths: Sequence[int] = (),
        control: bool = True,
    ) -> list[Row]:
        """The rows that are judged. lengths: of drafts; none: each drafter's best of
        chosen.lengths, on prompts apart. control: prompt lookup too.
        """
        chosen = self.chosen
        eval.run.run(
            EvalConfig(
                job="eval.run",
                output_dir=str(folder),
                seed=self.seed,
                threads=chosen.threads,
                target=TargetConfig(
                    path=chosen.target, dtype=chosen.decode_dtype, device=chosen.device
                ),
                benchmark=BenchmarkConfig(path=str(self.prompts), too_long="skip"),
                drafters=drafters,
                prompt_lookup_control=control,
                temperatures=temperatures,
                num_draft_tokens=list(lengths),
                sweep=[] if lengths else chosen.lengths,
                sweep_prompts=0 if lengths else chosen.sweep_prompts,
                max_prompts=self.max_prompts,
                max_new_tokens=chosen.max_new_tokens,
            )
        )
        return [row for row in read_rows(folder / "results.jsonl") if row.part == "main"]


def goals(rows: Sequence[Row], same: dict[str, dict[str, int]]) -> dict[str, dict[str, Any]]:
    """Each goal with what was found: on prompts that do not loop, as the speedups of a headline are
    counted.
    """
    speedups = {
        (row.temperature, row.drafter): row.headline_speedup
        for row in rows
        if row.headline_speedup is not None
    }
    greedy = {name: value for (temperature, name), value in speedups.items() if temperature == 0}
    sampled = {name: value for (temperature, name), value in speedups.items() if temperature == 1}
    lookup = greedy.pop(CONTROL, None)
    sampled.pop(CONTROL, None)
    weighed = {name: value for name, value in sampled.items() if name.endswith(BY_COST)}
    found: dict[str, dict[str, Any]] = {
        "greedy output equal": {
            "found": same,
            "met": not any(one["different"] for one in same.values()),
        }
    }
    if greedy:
        best = max(greedy.values())
        found["greedy above 1.5"] = {"found": best, "met": best > 1.5}
        found["greedy above prompt lookup"] = {
            "found": [best, lookup],
            "met": lookup is not None and best > lookup,
        }
    if weighed:
        best, worst = max(weighed.values()), min(weighed.values())
        found["T=1 above 1.2, better of picked and drawn by cost"] = {
            "found": best,
            "met": best > 1.2,
        }
        found["T=1 by cost never below 0.97"] = {"found": worst, "met": worst >= 0.97}
    return found


def report(found: dict[str, Any]) -> str:
    """What `generation` found, as tables."""
    keys = ("drafter", "temperature", "num_draft_tokens", "alpha", "tau", "cost_ratio", "overhead")
    rows = [
        [
            *(row[key] for key in keys),
            interval(row["speedup"], row["speedup_low"], row["speedup_high"]),
        ]
        for row in found["rows"]
    ]
    met = [
        [name, _said(one["found"]), "yes" if one["met"] else "NO"]
        for name, one in found["goals"].items()
    ]
    return f"{table([*keys, 'speedup'], rows)}\n\n{table(['goal', 'found', 'met'], met)}"


def _said(found: Any) -> str:
    """What was found for a goal, in words: speedups, or outputs by width."""
    if isinstance(found, dict):
        return "; ".join(
            f"width {width}: {', '.join(f'{n} {kind}' for kind, n in of.items() if n)}"
            for width, of in found.items()
        )
    speedups = found if isinstance(found, list) else [found]
    return ", ".join("none" if one is None else f"{one:.2f}x" for one in speedups)
