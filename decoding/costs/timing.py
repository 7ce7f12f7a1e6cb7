"""Time the parts of a round, back to back in one process at the shapes of real decoding.

The results are medians after a warm-up. Widths and draft steps take turns, so other processes
disturb them equally. A forward finds in the processor's caches what it finds while decoding: a
forward over one token follows another one, as without a drafter, and every wider one follows draft
steps. Draft steps are timed several in a row, as in a chain: the first one finds the target's
weights in the caches, the others the drafter's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
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
THREAD_TRIALS = 9  # steps with each number of threads
# cache slots of a draft step after the committed ones (a tree's level, a lookahead's window)
STEP_ROOM = 64


@dataclass(frozen=True)
class Parts:
    """Median times of a round's parts, in milliseconds."""

    t_draft_ms: float | None  # a draft step at the widest frontier; None without a drafter
    t_target_ms: dict[int, float]  # number of new tokens -> a target forward
    context: int  # committed tokens per row while timing
    batch_size: int
    # frontier -> a draft step; empty if only one frontier was timed
    t_draft_by_frontier_ms: dict[int, float] = field(default_factory=dict)

    @property
    def costs(self) -> RoundCosts:
        """The costs for stopping policies and drafters, linear between timed widths.

        Isotonic regression keeps the time of a forward from decreasing with its tokens, and that
        of a draft step with its frontier. Otherwise the choice of lengths would follow the noise.
        """
        timed = sorted(self.t_target_ms)
        smooth = rising([self.t_target_ms[n] for n in timed])
        every = np.interp(range(1, timed[-1] + 1), timed, smooth)
        frontiers = sorted(self.t_draft_by_frontier_ms)
        steps_ms = rising([self.t_draft_by_frontier_ms[n] for n in frontiers])
        widest_ms = steps_ms[-1] if steps_ms else self.t_draft_ms or 0.0
        steps = tuple(zip(frontiers, steps_ms))
        return RoundCosts(
            widest_ms, tuple(every.tolist()), rows=self.batch_size, t_draft_by_frontier_ms=steps
        )


def choose_threads(target: Target) -> int:
    """Return and set the number of threads with which a decode step of an idle target is faster.

    It is one or PyTorch's default: beside busy processes two threads may be slower than one.
    """
    most = torch.get_num_threads()
    if most == 1 or devices.runs_ahead(torch.device(target.device)):
        return most
    seconds: dict[int, list[float]] = {1: [], most: []}
    with Claim(target, None) as claim, torch.inference_mode():
        claim.take()
        target.open(1, STEP_ROOM)
        token = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(THREAD_TRIALS):
            for threads, taken in seconds.items():
                torch.set_num_threads(threads)
                target.forward(token)  # the first step wakes the threads
                began = perf_counter()
                target.forward(token)
                taken.append(perf_counter() - began)
    fastest = min(seconds, key=lambda threads: median(seconds[threads]))
    torch.set_num_threads(fastest)
    return fastest


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """Return the nondecreasing sequence nearest to `values` in least squares.

    The algorithm is pool adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, int]] = []  # mean and count
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, n), (before, m) = pools.pop(), pools.pop()
            pools.append(((last * n + before * m) / (n + m), n + m))
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
    """Return the times of a draft step and of target forwards over `widths` new tokens per row.

    Width 1 is always timed. context: the number of committed tokens, by default the prompt's
    length, limited by the target's. The prompt is repeated or truncated to this length in every
    row. repeats, warmup: how often each part is timed, and how often it is run before.
    """
    with Claim(target, drafter) as claim:
        claim.take()
        sizes = sorted({1, *widths})
        length = min(context or len(prompt), target.max_length - 1)
        filled = [prompt[i % len(prompt)] for i in range(length + 1)]
        step_kinds = _open(target, drafter, [filled] * batch_size, max(sizes[-1], STEP_ROOM) + 2)
        taps = drafter.capabilities.taps if drafter is not None else ()
        inputs = {n: torch.full((batch_size, n), filled[-1], device=target.device) for n in sizes}
        seconds: dict[int, list[float]] = {n: [] for n in sizes}
        draft_seconds: dict[int, list[float]] = {n: [] for n in step_kinds}
        frontiers = cycle(step_kinds)
        verified = sizes[1:] or sizes

        def forward_seconds(n: int) -> float:
            devices.synchronize(target.device)
            began = perf_counter()
            target.forward(inputs[n], None, taps)
            devices.synchronize(target.device)
            return perf_counter() - began

        for repeat in range(warmup + repeats):
            if repeat == warmup:
                for taken in (*seconds.values(), *draft_seconds.values()):
                    taken.clear()
            forward_seconds(1)
            seconds[1].append(forward_seconds(1))
            for n in islice(cycle(verified), max(len(verified), len(step_kinds))):
                if drafter is not None:
                    frontier = next(frontiers)
                    draft_seconds[frontier].append(_step_seconds(drafter, frontier, target.device))
                after_drafts = forward_seconds(n)
                if n > 1:
                    seconds[n].append(after_drafts)
    by_frontier = {n: 1e3 * median(taken) for n, taken in draft_seconds.items()}
    return Parts(
        by_frontier[max(by_frontier)] if by_frontier else None,
        {n: 1e3 * median(seconds[n]) for n in sizes},
        length,
        batch_size,
        by_frontier if len(by_frontier) > 1 else {},
    )


def _open(
    target: Target, drafter: Drafter | None, prompts_B: list[list[int]], room: int
) -> list[int]:
    """Read the prompts without their last tokens; return the frontiers to time.

    room: cache slots for uncommitted tokens.
    """
    capacity = len(prompts_B[0]) - 1 + room
    target.open(len(prompts_B), capacity)
    if drafter is None:
        prefill(target, [prompt[:-1] for prompt in prompts_B])
        return []
    drafter.prepare(target, None)
    needs = drafter.capabilities
    hidden_BNC = prefill(
        target, [prompt[:-1] for prompt in prompts_B], needs.needs_hidden, needs.taps
    )
    drafter.open(prompts_B, hidden_BNC, capacity)
    return list(needs.frontiers)


def _step_seconds(drafter: Drafter, frontier: int, device: torch.device) -> float:
    """Return the mean seconds of a draft step.

    Steps that draft one token each are timed STEPS_IN_A_ROW at a time. A remote drafter is timed by
    its worker's clock, since its messages count as overhead of the round and not as drafting.
    """
    steps = STEPS_IN_A_ROW if drafter.capabilities.steps == "token" else 1
    if isinstance(drafter, RemoteChain):
        return drafter.time_steps(steps) / steps
    began = perf_counter()
    for _ in range(steps):
        drafter.time_step(frontier)
    devices.synchronize(device)
    return (perf_counter() - began) / steps
