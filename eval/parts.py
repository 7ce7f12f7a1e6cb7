"""What the parts of a round cost, timed in slices all through the run, next to the generations that they explain.

A machine changes pace from minute to minute, so parts that are timed once at the start explain little of what follows.
A slice takes a few repeats of every part before every few units; a row takes the medians over the slices of its
condition. The draft length is chosen from the slices of the sweep alone, which lie in the run folder before the first
prompt of the main part, so that a run taken up again chooses the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from decoding.loop import time_parts
from decoding.schedules import WALL
from decoding.stopping import RoundCosts
from decoding.worker import RemoteChain, lanes
from eval.measure import Bench
from eval.records import Condition
from eval.schema import PartTimes
from training.checkpoint import write_text

UNITS_A_SLICE = 4  # about a tenth of a run goes into timing
WARM_UP = 1


@dataclass(frozen=True)
class Slice:
    """One drafter's parts, timed once between two units."""

    part: str  # sweep | main: the part of the run in which it was timed
    temperature: float
    batch_size: int
    drafter: str
    t_draft_ms: float
    t_target_ms: dict[int, float]
    context: int


def time_slice(
    bench: Bench, condition: Condition, part: str, prompt: Sequence[int], widths: Iterable[int], repeats: int
) -> list[Slice]:
    """Time every drafter's step, and the target at every width, after half of max_new_tokens; `repeats` each."""
    slices = []
    for name, drafter in bench.drafters.items():
        times = time_parts(
            bench.target,
            drafter,
            prompt,
            widths=widths,
            context=len(prompt) + bench.settings.max_new_tokens // 2,
            batch_size=condition.batch_size,
            repeats=repeats,
            warmup=WARM_UP,
        )
        assert times.t_draft_ms is not None, "a drafter was timed"
        place = (part, condition.temperature, condition.batch_size, name)
        slices.append(Slice(*place, times.t_draft_ms, times.t_target_ms, times.context))
    return slices


def frozen_costs(bench: Bench, batch_size: int, prompt: Sequence[int], widths: Sequence[int], path: Path) -> None:
    """Fill bench.costs for the policies and drafters that weigh costs: from the run folder, or measured and written there first.

    So a run that is taken up again decides as it did before.
    """
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name, use in bench.uses.items():
        drafter = bench.drafters[name]
        if use.stopping != "cost_ratio" and "plus" not in use.schedule and not drafter.caps.needs_costs:
            continue
        key = f"{name}, batch {batch_size}"
        if key not in known:
            # A drafter with cores of its own is weighed against a target on the others.
            with (
                lanes(drafter, bench.target)
                if use.schedule in WALL and isinstance(drafter, RemoteChain)
                else nullcontext()
            ):
                times = time_parts(
                    bench.target,
                    drafter,
                    prompt,
                    widths=widths,
                    context=len(prompt) + bench.settings.max_new_tokens // 2,
                    batch_size=batch_size,
                )
            known[key] = dataclasses.asdict(times.costs)
            write_text(path, json.dumps(known, indent=1))
        entry = known[key]
        bench.costs[name, batch_size] = RoundCosts(
            entry["t_draft_ms"], tuple(entry["t_target_ms"]), entry["overhead_ms"]
        )


def median_parts(slices: Sequence[Slice], drafter: str, condition: Condition) -> PartTimes:
    """Medians over slices: of the drafter's own for its step, of all drafters' for the target, which they share.

    Raises ValueError without a slice of this drafter under this condition.
    """
    here = [s for s in slices if (s.temperature, s.batch_size) == (condition.temperature, condition.batch_size)]
    own = [s.t_draft_ms for s in here if s.drafter == drafter]
    if not own:
        raise ValueError(f"{drafter} was not timed at {condition.label}")
    t_target_ms = {n: median(s.t_target_ms[n] for s in here) for n in here[0].t_target_ms}
    return PartTimes(median(own), t_target_ms, here[0].context)


def append_slices(path: Path, slices: Iterable[Slice]) -> None:
    """Add one line a slice, in one write."""
    text = "".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in slices)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read_slices(path: Path) -> list[Slice]:
    """The slices of a run so far; a torn last line (a killed run) is passed over."""
    if not path.exists():
        return []
    slices = []
    for line in path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines():
        values = json.loads(line)
        values["t_target_ms"] = {int(n): milliseconds for n, milliseconds in values["t_target_ms"].items()}
        slices.append(Slice(**values))
    return slices
