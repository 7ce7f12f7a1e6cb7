"""Tables of scripts/bench/recurrent_show.py, in Markdown, from its figures.

Two intervals of a comparison, both paired, both of 95 %: over prompts, all seeds' counts of a prompt together (eval.metrics), and over seeds, by
Student's t (scripts/bench/mixing.py), which with three seeds is wide.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.metrics import Interval, paired_bootstrap, paired_speedups
from eval.records import AUTOREGRESSIVE, read_records
from scripts.bench.common import interval, table
from scripts.bench.mixing import paired
from scripts.bench.recurrent_sides import BASE

Figures = Mapping[str, Any]
Columns = tuple[list[float], list[float]]  # by prompt: tokens, and rounds or seconds


def of_seeds(figures: Figures, name: str, seeds: int) -> list[Any]:
    """A name's figures, seed by seed, as far as they are there."""
    return [figures[f"{name}/{seed}"] for seed in range(seeds) if f"{name}/{seed}" in figures]


def pooled(runs: Sequence[Sequence[Sequence[float]]]) -> Columns:
    """(tokens, rounds) of every prompt, added up over seeds."""
    tokens, rounds = ([sum(pair[part] for pair in prompt) for prompt in zip(*runs, strict=True)] for part in (0, 1))
    return tokens, rounds


def tau(pairs: Sequence[Sequence[float]]) -> float:
    """Tokens a round."""
    return sum(tokens for tokens, _ in pairs) / sum(rounds for _, rounds in pairs)


def over(runs: Sequence[Any], base: Sequence[Any]) -> Interval:
    """Block efficiency over the base's, over prompts."""
    return paired_bootstrap(*pooled(runs), *pooled(base))


def trained(figures: Figures, sides: Sequence[str], seeds: int) -> str:
    """Sides that were trained for equal seconds."""
    rows = []
    base = of_seeds(figures, BASE, seeds)
    for side in sides:
        found = of_seeds(figures, side, seeds)
        count = min(len(found), len(base))
        if not count:
            continue
        row: list[Any] = [side]
        for way in ("greedy", "sampled"):
            mine, theirs = ([one[way] for one in runs[:count]] for runs in (found, base))
            row.append(" ".join(f"{tau(pairs):.3f}" for pairs in mine))
            if side == BASE:
                row += ["", ""]
                continue
            ratio, by_seed = over(mine, theirs), paired(list(map(tau, mine)), list(map(tau, theirs)))
            row += [
                interval(ratio.value, ratio.low, ratio.high),
                interval(by_seed["difference"], by_seed["low"], by_seed["high"]),
            ]
        row += [" ".join(f"{one['seconds']:.0f}" for one in found), found[0]["steps"], f"{found[0]['epochs']:.2f}"]
        rows.append(row)
    titles = ["side"]
    for way in ("greedy", "T=1"):
        titles += [f"tau {way}, by seed", "over base, prompts", "less base, seeds"]
    return table([*titles, "seconds", "steps", "epochs"], rows)


# ------------------------------------------------------------------------------------------------------------ races
def generations(folder: Path) -> list[dict[str, Any]]:
    """What a race's records say of every generation."""
    keys = ("drafter", "temperature", "num_draft_tokens", "prompt_id", "rounds")
    return [
        {**{key: getattr(one, key) for key in keys}, "tokens": len(one.tokens), "seconds": one.decode_seconds}
        for one in read_records(folder / "records.jsonl")
    ]


Arm = tuple[float, str, int]  # temperature, drafter, draft length


def by_arm(races: Sequence[Sequence[dict[str, Any]]]) -> dict[Arm, dict[str, list[float]]]:
    """Tokens, rounds and seconds of every prompt, in one order, added up over seeds."""
    found: dict[Arm, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
    for one in (one for race in races for one in race):
        sums = found[one["temperature"], one["drafter"], one["num_draft_tokens"]][one["prompt_id"]]
        for place, key in enumerate(("tokens", "rounds", "seconds")):
            sums[place] += one[key]
    ids = sorted({prompt for of in found.values() for prompt in of})
    return {
        arm: {key: [of[prompt][place] for prompt in ids] for place, key in enumerate(("tokens", "rounds", "seconds"))}
        for arm, of in found.items()
    }


def raced(races: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Block efficiency and speedup of every arm, over plain decoding."""
    arms = by_arm(races)
    rows = []
    for (temperature, name, length), mine in sorted(arms.items()):
        if name == AUTOREGRESSIVE:
            continue
        speedup = paired_bootstrap(*_speed(mine), *_speed(arms[temperature, AUTOREGRESSIVE, 0]))
        efficiency = sum(mine["tokens"]) / sum(mine["rounds"])
        rows.append([temperature, name, length, efficiency, interval(speedup.value, speedup.low, speedup.high)])
    return table(["T", "drafter", "length", "tau", "speedup"], rows)


def _speed(mine: Mapping[str, list[float]]) -> Columns:
    return mine["tokens"], mine["seconds"]


def head_over_pruned(races: Sequence[Sequence[dict[str, Any]]]) -> str:
    """The faster way of drawing beams over the faster pruned drafter, at each temperature."""
    arms = by_arm(races)
    rows = []
    for temperature in sorted({arm[0] for arm in arms}):
        plain = arms[temperature, AUTOREGRESSIVE, 0]
        rate = {arm: sum(of["tokens"]) / sum(of["seconds"]) for arm, of in arms.items() if arm[0] == temperature}
        best = [
            max((arm for arm in rate if arm[1].startswith(kind)), key=lambda arm: rate[arm])
            for kind in ("head", "pruned")
        ]
        sides = [(*_speed(arms[arm]), *_speed(plain)) for arm in best]
        ratio = paired_speedups(*sides)
        rows.append([temperature, best[0][1], best[1][1], interval(ratio.value, ratio.low, ratio.high)])
    return table(["T", "head", "against", "speed over it"], rows)


def report(chosen: Any, figures: Figures, parts: Mapping[str, Sequence[str]]) -> str:
    """All tables of the parts that were asked for, as far as their figures are there."""
    found = [f"{chosen.seeds} seeds, {chosen.seconds:g} s of training each, {chosen.threads} threads"]
    for part, sides in parts.items():
        if part in chosen.parts and f"{BASE}/0" in figures:
            found.append(f"### {part}\n\n{trained(figures, sides, chosen.seeds)}")
    for part in ("shape", "pruned"):
        races = of_seeds(figures, part, chosen.seeds)
        if part in chosen.parts and races:
            found.append(f"### {part}\n\n{raced(races)}")
            if part == "pruned":
                found.append(head_over_pruned(races))
                spent = [f"{n} layers {figures[f'pruned {n}/0']['cut_seconds']:.0f} s" for n in chosen.pruned_layers]
                found.append(f"Cutting, not counted in the seconds of training: {', '.join(spent)}.")
    return "\n\n".join(found)
