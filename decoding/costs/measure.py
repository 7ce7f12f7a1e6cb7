"""Measure what a round costs on this machine: its parts, and the rest of a round."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import TypeVar

from decoding.costs.timing import rising, time_parts
from decoding.drafters.remote import RemoteChain, lanes
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.schedules.by_name import WALL

# The least that a draft step costs, as a share of its time when timed alone.
CHEAPEST = 0.25
# The most that a round may cost less than its parts, in target steps.
SPARED = 0.25
EVERY = 16  # drafted tokens up to which every width is timed
DEEP = RoundCosts(0.01, (1.0,))  # costs by which a planner always drafts to its limit
LEAST_WINDOWS = 3  # so that the median ignores a bad one

Window = TypeVar("Window")


def own_cores(target: Target, drafter: Drafter, schedule: str) -> AbstractContextManager[None]:
    """Give target and drafter the cores that they have while they decode, for timing.

    A drafter that works at the same time as the target leaves it the other cores.
    """
    if schedule in WALL and isinstance(drafter, RemoteChain):
        return lanes(drafter, target)
    return nullcontext()


def weighed_widths(drafter: Drafter, deepest: int) -> list[int]:
    """Return the numbers of new tokens at which the target is timed for a drafter's decisions.

    They are all widths of a usual chain, and some of longer or wider drafts.
    """
    widest = max(deepest, drafter.width(deepest) if drafter.capabilities.needs_costs else 0) + 1
    some = {step * 2**power for power in range(1, widest.bit_length()) for step in (2, 3)}
    every = min(deepest, EVERY) + 1
    return sorted({*range(1, every + 1), *(n for n in some if every < n < widest), widest})


def measure_costs(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    settings: Settings,
    *,
    widths: Iterable[int] = range(1, 9),
    context: int | None = None,
    batch_size: int = 1,
    windows: int = 3,
    repeats: int = 3,
    tokens: int = 32,
    seconds: float = math.inf,
) -> RoundCosts:
    """Return the costs of a round under these settings, from several windows of time.

    There are `windows` of them, or as many as `seconds` allow, but at least three: the speed of a
    machine changes from second to second, and one bad window would decide everything. Each window
    times the parts (`repeats` of each, in turn) and then serial generations of `tokens` tokens at
    fixed length: at the full draft length, at one token and without a draft. Their rounds take
    longer than their parts by the rest (`with_rest`). `settled` combines the windows.
    """
    brief = replace(
        settings,
        max_new_tokens=min(tokens, settings.max_new_tokens),
        schedule="serial",
        stopping="fixed",
        stopping_threshold=None,
        costs=DEEP,
        ignore_eos=True,
    )
    prompts = [list(prompt)] * batch_size

    def generation(drafter: Drafter | None, num_draft_tokens: int) -> Generation:
        limited = replace(brief, num_draft_tokens=num_draft_tokens)
        return decode(target, drafter, prompts, limited)[0]

    def timed() -> RoundCosts:
        return time_parts(
            target,
            drafter,
            prompt,
            widths=widths,
            context=context,
            batch_size=batch_size,
            repeats=repeats,
            warmup=1,
        ).costs

    def window(frontier: int | None = None) -> RoundCosts:
        nonlocal brief
        brief = replace(brief, costs=replace(DEEP, frontier=frontier))
        costs = replace(timed(), frontier=frontier)
        plain = generation(None, 1)
        shallow = generation(drafter, 1) if settings.schedule == "serial" else None
        deep = generation(drafter, brief.num_draft_tokens)
        return with_rest(costs, drafter, deep, shallow, plain)

    with own_cores(target, drafter, settings.schedule):
        generation(drafter, brief.num_draft_tokens)  # warms up
        planner = drafter.capabilities.frontier_planner
        if planner is None:
            return settled(_collect(window, windows, seconds))
        # The planner chooses by the parts alone. The rest of a round may decide otherwise, so a
        # frontier of one node is measured too, in turn.
        frontiers = sorted({1, planner.best_frontier(timed())})
        found = _collect(lambda: [window(frontier) for frontier in frontiers], windows, seconds)
        return max(
            (settled(of) for of in zip(*found, strict=True)),
            key=lambda costs: planner.expected_rate(costs) * costs.target_ms(1),
        )


def _collect(window: Callable[[], Window], most: int, seconds: float) -> list[Window]:
    """Return windows measured one after another, until there are `most` or the time is over."""
    ends, found = time.perf_counter() + seconds, [window() for _ in range(min(most, LEAST_WINDOWS))]
    while len(found) < most and time.perf_counter() < ends:
        found.append(window())
    return found


def with_rest(
    costs: RoundCosts,
    drafter: Drafter,
    deep: Generation,
    shallow: Generation | None,
    plain: Generation,
) -> RoundCosts:
    """Return the costs of the parts with the rest that rounds of serial generations took.

    What `deep` rounds have more of it than `shallow` ones is charged to their additional steps.
    Where lanes overlap there is no shallow generation: part of the difference belongs to
    verification, and a drafter's lane that is estimated too slow gets chunks that are too short.
    A draft step of a worker costs its time in the deep generation by the worker's own clock, which
    includes its samples; the message there and back is part of the rest, once a round.
    """
    if isinstance(drafter, RemoteChain) and drafter.seconds_a_step is not None:
        costs = replace(costs, t_draft_ms=1000 * drafter.seconds_a_step)
    rest_ms = _rest_ms(costs, deep)
    # A smaller difference in steps would measure noise.
    if shallow is not None and _steps(deep) - _steps(shallow) >= 0.5:
        # It may be negative, as noise has both signs, and as consecutive steps find more of the
        # drafter's weights in the caches than the timed ones did.
        step_ms = (rest_ms - _rest_ms(costs, shallow)) / (_steps(deep) - _steps(shallow))
        step_ms = max(step_ms, (CHEAPEST - 1) * costs.step_ms(1))
        rest_ms -= step_ms * _steps(deep)
        costs = costs.with_slower_steps(step_ms)
    return replace(costs, overhead_ms=rest_ms, plain_overhead_ms=_rest_ms(costs, plain))


def _steps(done: Generation) -> float:
    """Return the draft steps of a mean round."""
    return done.draft_steps / done.rounds


def _rest_ms(costs: RoundCosts, done: Generation) -> float:
    """Return the time of a mean round that its parts do not explain."""
    verified = costs.target_ms(1 + round(done.verified / done.rounds))
    draft_ms = _steps(done) * costs.step_ms(done.draft_frontiers / max(1, done.draft_steps))
    return 1000 * done.decode_seconds / done.rounds - draft_ms - verified


def settled(windows: Sequence[RoundCosts]) -> RoundCosts:
    """Return costs that combine several windows.

    They are the medians of the ratios that do not depend on the machine's speed (c, V(n), the rest
    over t_target(1)), times the median of t_target(1).
    """
    pace_ms = median(window.t_target_ms[0] for window in windows)

    def middle(*ms: float) -> float:
        """Return the median over the windows of a time, at the median speed."""
        pairs = zip(ms, windows, strict=True)
        return pace_ms * median(part / window.t_target_ms[0] for part, window in pairs)

    def middles(columns: Iterable[Sequence[float]]) -> tuple[float, ...]:
        return rising([middle(*column) for column in zip(*columns, strict=True)])

    steps = middles([ms for _, ms in window.t_draft_by_frontier_ms] for window in windows)
    frontiers = [frontier for frontier, _ in windows[0].t_draft_by_frontier_ms]
    least = -SPARED * pace_ms  # negative where the parts were overestimated: whole rounds count
    return RoundCosts(
        steps[-1] if steps else middle(*(window.t_draft_ms for window in windows)),
        middles(window.t_target_ms for window in windows),
        max(least, middle(*(window.overhead_ms for window in windows))),
        max(least, middle(*(window.plain_ms - window.t_target_ms[0] for window in windows))),
        windows[0].rows,
        tuple(zip(frontiers, steps, strict=True)),
        windows[0].frontier,
    )
