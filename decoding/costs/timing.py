"""The parts of a round, timed back to back in one process at the shapes of real decoding.

Medians after a warm-up; the widths and the draft steps take turns, so that a noisy neighbour hits
them alike. Draft steps are timed a few in a row, as a chain takes them: the first one finds the
caches full of the target's weights, the others their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import numpy as np
import torch

from decoding import devices
from decoding.drafters.remote import RemoteChain
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.models.prefill import prefill
from decoding.rounds.claims import Claim

STEPS_IN_A_ROW = 3
# slots that a draft step may take behind the committed ones (a tree's level, a lookahead's window)
STEP_ROOM = 64


@dataclass(frozen=True)
class Parts:
    """Medians in milliseconds. t_draft_ms is None without a drafter, and of frontiers the widest
    step's.
    """

    t_draft_ms: float | None
    t_target_ms: dict[int, float]  # by new tokens a forward
    context: int  # committed tokens while timing
    batch_size: int
    # empty where all steps are alike
    t_draft_by_frontier_ms: dict[int, float] = field(default_factory=dict)

    @property
    def costs(self) -> RoundCosts:
        """What `stopping="cost_ratio"` and drafters weigh. Widths between two that were timed lie
        on the line through them.

        A forward over more tokens takes no less, nor does a step with a wider frontier, so where
        the clock says otherwise the neighbours' mean stands (isotonic regression): a choice of
        lengths and widths would follow the noise.
        """
        timed = sorted(self.t_target_ms)
        smooth = rising([self.t_target_ms[n] for n in timed])
        every = np.interp(range(1, timed[-1] + 1), timed, smooth)
        by_frontier = self.t_draft_by_frontier_ms
        steps = tuple(
            zip(sorted(by_frontier), rising([by_frontier[n] for n in sorted(by_frontier)]))
        )
        widest = steps[-1][1] if steps else self.t_draft_ms or 0.0
        return RoundCosts(
            widest, tuple(every.tolist()), rows=self.batch_size, t_draft_by_frontier_ms=steps
        )


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """The rising sequence nearest to `values` in squares (pool adjacent violators; Ayer et al.
    1955).
    """
    pools: list[tuple[float, int]] = []  # mean and how many
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, many), (before, few) = pools.pop(), pools.pop()
            pools.append(((last * many + before * few) / (many + few), many + few))
    return tuple(mean for mean, count in pools for _ in range(count))


@torch.inference_mode()
def time_parts(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    widths: Iterable[int] = range(1, 9),
    context: int | None = None,
    batch_size: int = 1,
    repeats: int = 30,
    warmup: int = 5,
) -> Parts:
    """t_draft and t_target(n) after `context` committed tokens (default: the prompt's), in rows
    that hold `prompt`.

    The prompt is repeated or cut to the context.
    """
    with Claim(target, drafter) as claim:
        claim.take()
        return _time_parts(
            target, drafter, prompt, sorted({1, *widths}), context, batch_size, repeats, warmup
        )


def _time_parts(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    sizes: list[int],
    context: int | None,
    batch_size: int,
    repeats: int,
    warmup: int,
) -> Parts:
    length = min(context or len(prompt), target.max_length - 1)
    filled = [prompt[i % len(prompt)] for i in range(length + 1)]
    capacity = length + max(sizes[-1], STEP_ROOM) + 2
    target.open(batch_size, capacity)
    if drafter is not None:
        drafter.prepare(target, None)
    wants_hidden = drafter is not None and drafter.capabilities.needs_hidden
    taps = drafter.capabilities.taps if drafter is not None else ()
    hidden_BNC = prefill(target, [filled[:-1]] * batch_size, wants_hidden, taps)
    if drafter is not None:
        drafter.open([filled] * batch_size, hidden_BNC, capacity)
    inputs = {n: torch.full((batch_size, n), filled[-1], device=target.device) for n in sizes}
    seconds: dict[int, list[float]] = {n: [] for n in sizes}
    draft_seconds: dict[int, list[float]] = (
        {n: [] for n in drafter.capabilities.frontiers} if drafter is not None else {}
    )
    in_a_row = (
        STEPS_IN_A_ROW if drafter is not None and drafter.capabilities.steps == "token" else 1
    )
    for turn in range(warmup + repeats):
        # whichever comes first is timed right after a wide forward
        for frontier in rotated(list(draft_seconds), turn):
            assert drafter is not None
            # each is to find the caches as full of the target's weights as the others do
            if len(draft_seconds) > 1:
                target.forward(inputs[1], None, taps)
            devices.synchronize(target.device)
            draft_seconds[frontier].append(
                _draft(drafter, in_a_row, frontier, target.device) / in_a_row
            )
        for n in sizes:
            devices.synchronize(target.device)
            began = perf_counter()
            target.forward(inputs[n], None, taps)
            devices.synchronize(target.device)
            seconds[n].append(perf_counter() - began)
    by_frontier = {n: 1e3 * median(taken[warmup:]) for n, taken in draft_seconds.items()}
    t_draft_ms = by_frontier[max(by_frontier)] if by_frontier else None
    t_target_ms = {n: 1e3 * median(seconds[n][warmup:]) for n in sizes}
    return Parts(
        t_draft_ms, t_target_ms, length, batch_size, by_frontier if len(by_frontier) > 1 else {}
    )


def rotated(values: list[int], by: int) -> list[int]:
    """The values in turn, another one first each time."""
    first = by % len(values) if values else 0
    return values[first:] + values[:first]


def _draft(drafter: Drafter, steps: int, frontier: int, device: torch.device) -> float:
    """Seconds of so many draft steps in a row. Those of a worker are by its own clock: its message
    is the rest of a round, and no part of a step.
    """
    if isinstance(drafter, RemoteChain):
        return drafter.time_steps(steps)
    began = perf_counter()
    for _ in range(steps):
        drafter.time_step(frontier)
    devices.synchronize(device)
    return perf_counter() - began
