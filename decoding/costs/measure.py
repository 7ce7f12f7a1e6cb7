"""What a round costs on this machine, measured before anything is decided by it: the parts, and the
rest of a round beside them.
"""

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

CHEAPEST = 0.25  # of what a step took by itself: a step of a draft is not thought cheaper
SPARED = 0.25  # of a target's step: a round is not thought cheaper than its parts by more
EVERY = 16  # drafted tokens up to which every length is timed
DEEP = RoundCosts(0.01, (1.0,))  # by which a drafter that weighs costs drafts, and deep
LEAST_WINDOWS = 3  # of which the median passes over a bad one

Window = TypeVar("Window")


def own_cores(target: Target, drafter: Drafter, schedule: str) -> AbstractContextManager[None]:
    """What is timed inside has the cores that it will have: a drafter that works beside the target
    leaves it the others.
    """
    return (
        lanes(drafter, target)
        if schedule in WALL and isinstance(drafter, RemoteChain)
        else nullcontext()
    )


def weighed_widths(drafter: Drafter, deepest: int) -> list[int]:
    """Numbers of new tokens at which the target is timed for what a drafter weighs: all of a usual
    chain's, and of longer or wider drafts' a few.
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
    """The costs of a round under these settings, from several windows of time: `windows`, or as
    many as `seconds` allow, three at least.

    A machine changes pace from second to second, and one bad window would decide all that follows.
    So each window times the parts (`repeats` of each, in turn) and right behind them serial
    generations of `tokens` tokens at fixed length, whose rounds take more than their parts by the
    rest: at the full draft length, at one token and without a draft (`with_rest`). `settled` puts
    the windows together.
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
        return decode(target, drafter, prompts, replace(brief, num_draft_tokens=num_draft_tokens))[
            0
        ]

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
        return with_rest(
            costs, drafter, generation(drafter, brief.num_draft_tokens), shallow, plain
        )

    with own_cores(target, drafter, settings.schedule):
        generation(drafter, brief.num_draft_tokens)  # warms up
        planner = drafter.capabilities.frontier_planner
        if planner is None:
            return settled(_taken(window, windows, seconds))
        # The planner's choice is by the parts alone. What rounds take beside them may decide
        # otherwise, so a single node is measured as well, in turn.
        frontiers = sorted({1, planner.best_frontier(timed())})
        found = _taken(lambda: [window(frontier) for frontier in frontiers], windows, seconds)
        return max(
            (settled(of) for of in zip(*found, strict=True)),
            key=lambda costs: planner.expected_rate(costs) * costs.target_ms(1),
        )


def _taken(window: Callable[[], Window], most: int, seconds: float) -> list[Window]:
    """Windows one after another, until there are `most` or the time is over."""
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
    """The costs of the parts, and the rest that serial generations' rounds took beside them.

    What the rest of a `deep` round is more than that of a `shallow` one is done for each of its
    steps: it is theirs. Not where lanes overlap (there is no shallow one then): part of it is
    verification's, and a drafter's lane that is thought too slow is given too short chunks. A
    drafted token of a worker costs what it took in the deep generation, by the worker's clock: its
    lane holds the draws too. The message there and back is the rest, once a round.
    """
    if isinstance(drafter, RemoteChain) and drafter.seconds_a_step is not None:
        costs = replace(costs, t_draft_ms=1000 * drafter.seconds_a_step)
    rest_ms = _rest_ms(costs, deep)
    # less says nothing but noise of a step
    if shallow is not None and _steps(deep) - _steps(shallow) >= 0.5:
        # Below nothing too, as noise goes both ways, and as steps behind one another find the
        # drafter's weights nearer than those that were timed.
        step_ms = (rest_ms - _rest_ms(costs, shallow)) / (_steps(deep) - _steps(shallow))
        step_ms = max(step_ms, (CHEAPEST - 1) * costs.step_ms(1))
        rest_ms -= step_ms * _steps(deep)
        costs = costs.with_slower_steps(step_ms)
    return replace(costs, overhead_ms=rest_ms, plain_overhead_ms=_rest_ms(costs, plain))


def _steps(done: Generation) -> float:
    """Draft steps of a mean round."""
    return done.draft_steps / done.rounds


def _rest_ms(costs: RoundCosts, done: Generation) -> float:
    """What a mean round of a generation took beside its parts."""
    verified = costs.target_ms(1 + round(done.verified / done.rounds))
    draft_ms = _steps(done) * costs.step_ms(done.draft_frontiers / max(1, done.draft_steps))
    return 1000 * done.decode_seconds / done.rounds - draft_ms - verified


def settled(windows: Sequence[RoundCosts]) -> RoundCosts:
    """The costs that several timing windows agree on: the medians of the ratios that do not depend
    on the machine's pace (c, V(n), the rest over t_target(1)), at the median pace.
    """
    pace_ms = median(window.t_target_ms[0] for window in windows)
    ratios = [[part / window.t_target_ms[0] for part in window.t_target_ms] for window in windows]
    steps = [
        [ms / window.t_target_ms[0] for _, ms in window.t_draft_by_frontier_ms]
        for window in windows
    ]
    step_ms = [
        pace_ms * ratio for ratio in rising([median(column) for column in zip(*steps, strict=True)])
    ]
    return RoundCosts(
        step_ms[-1]
        if step_ms
        else pace_ms * median(window.t_draft_ms / window.t_target_ms[0] for window in windows),
        tuple(
            pace_ms * ratio
            for ratio in rising([median(column) for column in zip(*ratios, strict=True)])
        ),
        # Below nothing where the parts were timed too dear: it is whole rounds that have to come
        # out right.
        pace_ms
        * max(-SPARED, median(window.overhead_ms / window.t_target_ms[0] for window in windows)),
        pace_ms * max(-SPARED, median(_plain_share(window) for window in windows)),
        windows[0].rows,
        tuple(
            (frontier, ms)
            for (frontier, _), ms in zip(windows[0].t_draft_by_frontier_ms, step_ms, strict=True)
        ),
        windows[0].frontier,
    )


def _plain_share(window: RoundCosts) -> float:
    """The rest of a round that does not draft, over t_target(1)."""
    return window.plain_ms / window.t_target_ms[0] - 1
