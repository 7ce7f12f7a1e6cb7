"""Markdown tables of recurrent_show.py.

A comparison has two paired 95 % intervals: over prompts, with the counts of all seeds added up
(eval.statistics.metrics), and over seeds, by Student's t (kept.py), which is wide for three seeds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.measure.records import AUTOREGRESSIVE, read_records
from eval.statistics.metrics import Interval, paired_bootstrap, paired_speedups
from scripts.bench.common import interval, table
from scripts.bench.kept import paired

Figures = Mapping[str, Any]
Columns = tuple[list[float], list[float]]  # by prompt: tokens, and rounds or seconds


def of_seeds(figures: Figures, name: str) -> dict[str, Any]:
    """Return the figures of a name by seed."""
    found = {
        key.removeprefix(f"{name}/"): value
        for key, value in figures.items()
        if key.startswith(f"{name}/")
    }
    return dict(sorted(found.items()))


def pooled(runs: Sequence[Sequence[Sequence[float]]]) -> Columns:
    """Return tokens and rounds of every prompt, added up over seeds."""
    tokens, rounds = (
        [sum(pair[part] for pair in prompt) for prompt in zip(*runs, strict=True)]
        for part in (0, 1)
    )
    return tokens, rounds


def tau(pairs: Sequence[Sequence[float]]) -> float:
    """Return the tokens a round."""
    return sum(tokens for tokens, _ in pairs) / sum(rounds for _, rounds in pairs)


def over(runs: Sequence[Any], base: Sequence[Any]) -> Interval:
    """Return the ratio of two block efficiencies with its interval over prompts."""
    return paired_bootstrap(*pooled(runs), *pooled(base))


def trained(figures: Figures, pairs: Mapping[str, str]) -> str:
    """Return the table of sides trained for equal seconds. pairs: side -> side compared with."""
    rows = [_row(figures, side, None) for side in dict.fromkeys(pairs.values())]
    rows += [_row(figures, side, against) for side, against in pairs.items()]
    titles = ["side", "compared with"]
    for way in ("greedy", "T=1"):
        titles += [f"tau {way}, by seed", "ratio, over prompts", "difference, over seeds"]
    return table([*titles, "seconds", "steps", "epochs"], [row for row in rows if row])


def _row(figures: Figures, side: str, against: str | None) -> list[Any]:
    base = of_seeds(figures, side if against is None else against)
    found = {seed: one for seed, one in of_seeds(figures, side).items() if seed in base}
    row: list[Any] = [side, against]
    for way in ("greedy", "sampled") if found else ():
        mine, theirs = ({seed: of[seed][way] for seed in found} for of in (found, base))
        taus, base_taus = (
            {seed: tau(pairs) for seed, pairs in of.items()} for of in (mine, theirs)
        )
        row.append(" ".join(f"{value:.3f}" for value in taus.values()))
        ratio, by_seed = over([*mine.values()], [*theirs.values()]), paired(taus, base_taus)
        both = [
            interval(ratio.value, ratio.low, ratio.high),
            interval(by_seed["difference"], by_seed["low"], by_seed["high"]),
        ]
        row += both if against else ["", ""]
    if not found:
        return []
    one = next(iter(found.values()))
    seconds = " ".join(f"{each['seconds']:.0f}" for each in found.values())
    return [*row, seconds, one["steps"], f"{one['epochs']:.2f}"]


# -------------------------------------------------------------------------------------------- races
def generations(folder: Path) -> list[dict[str, Any]]:
    """Read the counts and seconds of every generation of a race."""
    keys = ("drafter", "temperature", "num_draft_tokens", "prompt_id", "rounds")
    return [
        {
            **{key: getattr(one, key) for key in keys},
            "tokens": len(one.tokens),
            "seconds": one.decode_seconds,
        }
        for one in read_records(folder / "records.jsonl")
    ]


Arm = tuple[float, str, int]  # temperature, drafter, draft length


def by_arm(races: Sequence[Sequence[dict[str, Any]]]) -> dict[Arm, dict[str, list[float]]]:
    """Return tokens, rounds and seconds of every prompt, added up over seeds."""
    found: dict[Arm, dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0.0, 0.0, 0.0])
    )
    for one in (one for race in races for one in race):
        sums = found[one["temperature"], one["drafter"], one["num_draft_tokens"]][one["prompt_id"]]
        for place, key in enumerate(("tokens", "rounds", "seconds")):
            sums[place] += one[key]
    ids = sorted({prompt for of in found.values() for prompt in of})
    return {
        arm: {
            key: [of[prompt][place] for prompt in ids]
            for place, key in enumerate(("tokens", "rounds", "seconds"))
        }
        for arm, of in found.items()
    }


def raced(races: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return the table of block efficiencies and speedups of every arm."""
    arms = by_arm(races)
    rows = []
    for (temperature, name, length), mine in sorted(arms.items()):
        if name == AUTOREGRESSIVE:
            continue
        speedup = paired_bootstrap(*_speed(mine), *_speed(arms[temperature, AUTOREGRESSIVE, 0]))
        efficiency = sum(mine["tokens"]) / sum(mine["rounds"])
        rows.append(
            [
                temperature,
                name,
                length,
                efficiency,
                interval(speedup.value, speedup.low, speedup.high),
            ]
        )
    return table(["T", "drafter", "length", "tau", "speedup"], rows)


def _speed(mine: Mapping[str, list[float]]) -> Columns:
    return mine["tokens"], mine["seconds"]


def head_over_pruned(races: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return the table of the faster head against the faster pruned drafter."""
    arms = by_arm(races)
    rows = []
    for temperature in sorted({arm[0] for arm in arms}):
        plain = arms[temperature, AUTOREGRESSIVE, 0]
        rate = {
            arm: sum(of["tokens"]) / sum(of["seconds"])
            for arm, of in arms.items()
            if arm[0] == temperature
        }
        best = [
            max((arm for arm in rate if arm[1].startswith(kind)), key=lambda arm: rate[arm])
            for kind in ("head", "pruned")
        ]
        sides = [(*_speed(arms[arm]), *_speed(plain)) for arm in best]
        ratio = paired_speedups(*sides)
        rows.append(
            [temperature, best[0][1], best[1][1], interval(ratio.value, ratio.low, ratio.high)]
        )
    return table(["T", "head", "against", "speed over it"], rows)


def report(chosen: Any, figures: Figures, parts: Mapping[str, Mapping[str, str]]) -> str:
    """Return all tables whose figures exist."""
    found = [f"{chosen.seconds:g} s of training each, {chosen.threads} threads"]
    for part, pairs in parts.items():
        if any(of_seeds(figures, side) for side in pairs):
            found.append(f"### {part}\n\n{trained(figures, pairs)}")
    for part in ("shape", "pruned"):
        races = [one["generations"] for one in of_seeds(figures, part).values()]
        if races:
            found.append(f"### {part}\n\n{raced(races)}")
            if part == "pruned":
                cuts = {
                    layers: of_seeds(figures, f"pruned {layers}") for layers in chosen.pruned_layers
                }
                spent = [
                    f"{n} layers {one['cut_seconds']:.0f} s"
                    for n, of in cuts.items()
                    for one in [*of.values()][:1]
                ]
                found += [
                    head_over_pruned(races),
                    f"Cutting, not counted in the seconds of training: {', '.join(spent)}.",
                ]
    return "\n\n".join(found)
