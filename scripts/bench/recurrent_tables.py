"""Markdown tables of recurrent_show.py.

A comparison has two paired 95 % intervals: over prompts, with the counts of all seeds added up
(eval.statistics.metrics), and over seeds, by Student's t (part_journal.py), which is wide for
three seeds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.measure.records import AUTOREGRESSIVE, read_records
from eval.statistics.metrics import Interval, paired_bootstrap, paired_speedups
from scripts.bench.common import interval, table
from scripts.bench.part_journal import paired

Figures = Mapping[str, Any]  # name/seed -> figures
Columns = tuple[list[float], list[float]]  # by prompt: tokens, and rounds or seconds
Arm = tuple[float, str, int]  # temperature, drafter, draft length
COUNTS = ("tokens", "rounds", "seconds")


def figures_by_seed(figures: Figures, name: str) -> dict[str, Any]:
    """Return seed -> the figures of a side or part."""
    start = f"{name}/"
    found = {key[len(start) :]: value for key, value in figures.items() if key.startswith(start)}
    return dict(sorted(found.items()))


def pool_seeds(runs: Sequence[Sequence[Sequence[float]]]) -> Columns:
    """Return the tokens and rounds of every prompt, added up over runs with different seeds."""
    prompts = [[sum(column) for column in zip(*pairs)] for pairs in zip(*runs, strict=True)]
    return [tokens for tokens, _ in prompts], [rounds for _, rounds in prompts]


def tau_ratio(runs: Sequence[Any], base: Sequence[Any]) -> Interval:
    """Return the ratio of two block efficiencies with its interval over prompts.

    runs, base: the (tokens, rounds) of every prompt, a list for each seed.
    """
    return paired_bootstrap(*pool_seeds(runs), *pool_seeds(base))


def format_interval(found: Interval) -> str:
    """Format a value with its interval, `1.310 [1.200, 1.440]`."""
    return interval(found.value, found.low, found.high)


def training_table(figures: Figures, pairs: Mapping[str, str]) -> str:
    """Return the table of sides trained for equal seconds. pairs: side -> side compared with."""
    rows = [_row(figures, side, None) for side in dict.fromkeys(pairs.values())]
    rows += [_row(figures, side, against) for side, against in pairs.items()]
    titles = ["side", "compared with"]
    for way in ("greedy", "T=1"):
        titles += [f"tau {way}, by seed", "ratio, over prompts", "difference, over seeds"]
    return table([*titles, "seconds", "steps", "epochs"], [row for row in rows if row])


def _row(figures: Figures, side: str, against: str | None) -> list[Any]:
    """Return the table row of a side; [] if it shares no seed with the side compared with."""
    base = figures_by_seed(figures, side if against is None else against)
    found = {seed: one for seed, one in figures_by_seed(figures, side).items() if seed in base}
    if not found:
        return []
    row: list[Any] = [side, against]
    for way in ("greedy", "sampled"):
        mine, theirs = ({seed: of[seed][way] for seed in found} for of in (found, base))
        taus, base_taus = ({seed: _tau(run) for seed, run in of.items()} for of in (mine, theirs))
        row.append(" ".join(f"{value:.3f}" for value in taus.values()))
        by_seed = paired(taus, base_taus)
        difference = interval(by_seed["difference"], by_seed["low"], by_seed["high"])
        ratio = format_interval(tau_ratio([*mine.values()], [*theirs.values()]))
        row += [ratio, difference] if against else ["", ""]
    one = next(iter(found.values()))
    seconds = " ".join(f"{each['seconds']:.0f}" for each in found.values())
    return [*row, seconds, one["steps"], f"{one['epochs']:.2f}"]


def _tau(run: Sequence[Sequence[float]]) -> float:
    tokens, rounds = pool_seeds([run])
    return sum(tokens) / sum(rounds)


# -------------------------------------------------------------------------------------------- races
def read_generations(folder: Path) -> list[dict[str, Any]]:
    """Read the counts and seconds of every generation from a run folder of eval.run."""
    keys = ("drafter", "temperature", "num_draft_tokens", "prompt_id", "rounds")
    return [
        {key: getattr(one, key) for key in keys}
        | {"tokens": len(one.tokens), "seconds": one.decode_seconds}
        for one in read_records(folder / "records.jsonl")
    ]


def pool_arms(races: Sequence[Sequence[dict[str, Any]]]) -> dict[Arm, dict[str, list[float]]]:
    """Return each arm's tokens, rounds and seconds by prompt, added up over seeds."""
    sums: dict[Arm, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0] * 3))
    for one in (one for race in races for one in race):
        of_prompt = sums[one["temperature"], one["drafter"], one["num_draft_tokens"]]
        before = of_prompt[one["prompt_id"]]
        of_prompt[one["prompt_id"]] = [a + one[key] for a, key in zip(before, COUNTS, strict=True)]
    ids = sorted({prompt for of in sums.values() for prompt in of})
    return {
        arm: {key: [of[prompt][place] for prompt in ids] for place, key in enumerate(COUNTS)}
        for arm, of in sums.items()
    }


def _speed(arm: Mapping[str, list[float]]) -> Columns:
    return arm["tokens"], arm["seconds"]


def race_table(races: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return the table of every arm's block efficiency and speedup."""
    arms, rows = pool_arms(races), []
    for (temperature, name, length), arm in sorted(arms.items()):
        if name != AUTOREGRESSIVE:
            plain = arms[temperature, AUTOREGRESSIVE, 0]
            speedup = format_interval(paired_bootstrap(*_speed(arm), *_speed(plain)))
            tau = sum(arm["tokens"]) / sum(arm["rounds"])
            rows.append([temperature, name, length, tau, speedup])
    return table(["T", "drafter", "length", "tau", "speedup"], rows)


def head_against_pruned_table(races: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return the table that compares the fastest head with the fastest pruned drafter."""
    arms, rows = pool_arms(races), []
    rate = {arm: sum(of["tokens"]) / sum(of["seconds"]) for arm, of in arms.items()}
    for temperature in sorted({arm[0] for arm in arms}):
        here = [arm for arm in arms if arm[0] == temperature]
        best = [
            max((arm for arm in here if arm[1].startswith(kind)), key=lambda arm: rate[arm])
            for kind in ("head", "pruned")
        ]
        plain = _speed(arms[temperature, AUTOREGRESSIVE, 0])
        speedup = format_interval(paired_speedups(*[(*_speed(arms[arm]), *plain) for arm in best]))
        rows.append([temperature, *(name for _, name, _ in best), speedup])
    return table(["T", "head", "against", "speed over it"], rows)


def report(chosen: Any, figures: Figures, parts: Mapping[str, Mapping[str, str]]) -> str:
    """Return the tables of all parts that have figures. parts: `TRAINED` of recurrent_show.py."""
    found = [f"{chosen.seconds:g} s of training each, {chosen.threads} threads"]
    for part, pairs in parts.items():
        if any(figures_by_seed(figures, side) for side in pairs):
            found.append(f"### {part}\n\n{training_table(figures, pairs)}")
    for part in ("shape", "pruned"):
        races = [one["generations"] for one in figures_by_seed(figures, part).values()]
        if races:
            found.append(f"### {part}\n\n{race_table(races)}")
        if races and part == "pruned":
            cuts = {n: figures_by_seed(figures, f"pruned {n}") for n in chosen.pruned_layers}
            first = {n: next(iter(of.values())) for n, of in cuts.items() if of}
            spent = ", ".join(f"{n} layers {one['cut_seconds']:.0f} s" for n, one in first.items())
            found.append(head_against_pruned_table(races))
            found.append(f"Cutting, not counted in the seconds of training: {spent}.")
    return "\n\n".join(found)
