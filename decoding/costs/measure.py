"""Measure the costs of a round on this machine: its parts, and the rest of its time."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from time import perf_counter

from decoding.costs.contention import UNDISTURBED, disturbance, with_share
from decoding.costs.timing import rising, time_parts
from decoding.drafters.remote import RemoteChain, separate_cores
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.schedules.by_name import WALL

CHEAPEST = 0.25  # minimum cost of a draft step, as a share of its time when timed alone
SPARED = 0.25  # maximum time that a round saves over its parts, in target steps
EVERY = 16  # draft length up to which every width is timed
DEEP = RoundCosts(0.01, (1.0,))  # costs at which a planner always drafts to its limit
LEAST_WINDOWS = 3  # minimum at which the median ignores one outlier
# Limits on measuring again: windows in which other processes used the processors (factor on their
# number and on their time), and costs that cannot be (times).
MOST_FACTOR, ATTEMPTS = 2, 2
NEGATIVE = "a round took less time than its parts alone"
# least time of a round with one drafted token over that of a round without, which does less
CHEAPEST_ROUND = 0.9
CHEAPER = "a round with a draft took less time than one without"


def bind_cores(target: Target, drafter: Drafter, schedule: str) -> AbstractContextManager[None]:
    """Bind target and drafter to the cores on which they decode, for timing.

    Only a drafter that overlaps with the target has separate cores.
    """
    if schedule in WALL and isinstance(drafter, RemoteChain):
        return separate_cores(drafter, target)
    return nullcontext()


def widths_to_time(drafter: Drafter, deepest: int) -> list[int]:
    """Return the numbers of new tokens at which to time the target, in increasing order.

    They are all the widths that chains of at most `EVERY` draft tokens need, and some of longer
    chains or wider trees. deepest: maximum draft length.
    """
    widest = max(deepest, drafter.width(deepest) if drafter.capabilities.needs_costs else 0) + 1
    sparse = {step * 2**power for power in range(1, widest.bit_length()) for step in (2, 3)}
    dense = min(deepest, EVERY) + 1
    return sorted({*range(1, dense + 1), *(n for n in sparse if dense < n < widest), widest})


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
    least_windows: int = LEAST_WINDOWS,
) -> RoundCosts:
    """Return the costs of a round under these settings, combined from several windows of time.

    There are `windows` windows, since a machine's speed changes from second to second; if `seconds`
    pass before, there are fewer, but at least `least_windows` of them. Each window times the parts
    (`repeats` of each, in turn) and then serial generations of `tokens` tokens: at the full draft
    length, at one draft token (serial schedule only) and without drafts. The rest of a round is
    the difference between its time and its parts (`add_rest`).

    A window during which other processes used the processors is replaced by another one, up to
    `windows` times and as long as `seconds` have not passed. After such a window none begins that
    would end after twice this time, if it took as long as the longest one: beside other processes
    a window takes many times as long, and more of them would not make the costs reliable. Costs
    that cannot be are measured once more within `seconds`: with a negative rest of a round, or a
    round that a draft shortens. Costs that remain so, or disturbed, are returned with the reason in
    `unreliable`.

    widths: numbers of new tokens at which the target is timed. context: committed tokens while the
    parts are timed, by default the prompt's length. A drafter with a frontier planner is measured
    at one node and at the planner's best frontier; the costs with the higher expected rate are
    returned.
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

    def window(frontier: int | None) -> RoundCosts:
        nonlocal brief
        brief = replace(brief, costs=replace(DEEP, frontier=frontier))
        costs = replace(timed(), frontier=frontier)
        plain = generation(None, 1)
        shallow = generation(drafter, 1) if settings.schedule == "serial" else None
        deep = generation(drafter, brief.num_draft_tokens)
        return add_rest(costs, drafter, deep, shallow, plain)

    with bind_cores(target, drafter, settings.schedule):
        generation(drafter, brief.num_draft_tokens)  # warms up
        planner = drafter.capabilities.frontier_planner
        frontiers: Sequence[int | None] = [None]
        if planner is not None:
            # The planner chooses by the parts alone. With the rest of a round another choice may be
            # better, so a frontier of one node is also measured.
            frontiers = sorted({1, planner.best_frontier(timed())})
        found = _measure_windows(
            lambda: with_share(target, drafter, lambda: [window(one) for one in frontiers]),
            windows,
            seconds,
            least_windows,
        )
    if planner is None:
        return found[0]
    return max(found, key=lambda costs: planner.expected_rate(costs) * costs.target_ms(1))


# Measures the costs of each frontier in one window of time. Returns the share of the time in which
# the measurement had its processors, and the costs.
Window = Callable[[], tuple[float, list[RoundCosts]]]


def _measure_windows(window: Window, most: int, seconds: float, least: int) -> list[RoundCosts]:
    """Return the combined costs of each frontier, with the reason if they are unreliable."""
    began = perf_counter()
    ends, latest = began + seconds, began + MOST_FACTOR * seconds
    for _ in range(ATTEMPTS):
        windows = _collect(window, most, ends, latest, min(most, least))
        found = [combine_windows(of) for of in zip(*(costs for _, costs in windows), strict=True)]
        if not any(map(_doubt, found)) or perf_counter() >= ends:
            break
    share = min(share for share, _ in windows)
    disturbed = "" if share >= UNDISTURBED else disturbance(share)
    return [replace(costs, unreliable=disturbed or _doubt(costs)) for costs in found]


def _doubt(costs: RoundCosts) -> str:
    """Return what cannot be true of measured costs, as a clause; "" if nothing is found."""
    if costs.overhead_ms < 0:
        return NEGATIVE
    return CHEAPER if costs.round_ms(1, 1) < CHEAPEST_ROUND * costs.plain_ms else ""


def _collect(
    window: Window, most: int, ends: float, latest: float, least: int
) -> list[tuple[float, list[RoundCosts]]]:
    """Return `most` undisturbed windows, or fewer but at least `least` if time ends before.

    If fewer than LEAST_WINDOWS are undisturbed, return the LEAST_WINDOWS least disturbed ones.
    ends: end of the time, by `perf_counter`. latest: by when further windows are expected to end
    if one was disturbed; there may then be fewer than `least`, but never none.
    """
    found = list[tuple[float, list[RoundCosts]]]()
    undisturbed, longest = 0, 0.0
    while undisturbed < most and len(found) < MOST_FACTOR * most:
        began = perf_counter()
        if len(found) >= least and began >= ends:
            break
        if undisturbed < len(found) and began + longest > latest:
            break
        found.append(window())
        longest = max(longest, perf_counter() - began)
        undisturbed += found[-1][0] >= UNDISTURBED
    by_share = sorted(found, key=lambda pair: pair[0], reverse=True)
    return by_share[: max(min(most, LEAST_WINDOWS), undisturbed)]


def add_rest(
    costs: RoundCosts,
    drafter: Drafter,
    deep: Generation,
    shallow: Generation | None,
    plain: Generation,
) -> RoundCosts:
    """Return the costs with the rest of a round, measured by serial generations.

    deep, shallow, plain: generations at the full draft length, at one draft token and without
    drafts. The rest of a deep round exceeds the rest of a shallow one; the difference is charged to
    the additional draft steps. shallow is None for overlapped schedules: part of their difference
    belongs to verification, and overestimated draft steps would make chunks too short. A worker's
    draft step costs its time in the deep generation on the worker's clock, sampling included; the
    messages belong to the rest of a round.
    """
    if isinstance(drafter, RemoteChain) and drafter.seconds_a_step is not None:
        costs = replace(costs, t_draft_ms=1000 * drafter.seconds_a_step)
    rest_ms = _rest_ms(costs, deep)
    # A smaller difference in steps would measure noise.
    if shallow is not None and _steps(deep) - _steps(shallow) >= 0.5:
        # Noise can make it negative, and so can consecutive steps, which find more of the
        # drafter's weights in the caches than the timed steps.
        step_ms = (rest_ms - _rest_ms(costs, shallow)) / (_steps(deep) - _steps(shallow))
        step_ms = max(step_ms, (CHEAPEST - 1) * costs.step_ms(1))
        rest_ms -= step_ms * _steps(deep)
        costs = costs.with_slower_steps(step_ms)
    return replace(costs, overhead_ms=rest_ms, plain_overhead_ms=_rest_ms(costs, plain))


def _steps(done: Generation) -> float:
    """Return the mean number of draft steps per round."""
    return done.draft_steps / done.rounds


def _rest_ms(costs: RoundCosts, done: Generation) -> float:
    """Return the mean milliseconds per round that its parts do not account for."""
    verified = costs.target_ms(1 + round(done.verified / done.rounds))
    draft_ms = _steps(done) * costs.step_ms(done.draft_frontiers / max(1, done.draft_steps))
    return 1000 * done.decode_seconds / done.rounds - draft_ms - verified


def combine_windows(windows: Sequence[RoundCosts]) -> RoundCosts:
    """Return the combined costs of several windows.

    Each time is the median of its ratio to t_target(1), which does not depend on the machine's
    speed in a window, times the median of t_target(1).
    """
    pace_ms = median(window.t_target_ms[0] for window in windows)

    def middle(*ms: float) -> float:
        """Return the median ratio of a time to t_target(1), times the median of t_target(1)."""
        pairs = zip(ms, windows, strict=True)
        return pace_ms * median(part / window.t_target_ms[0] for part, window in pairs)

    def middles(columns: Iterable[Sequence[float]]) -> tuple[float, ...]:
        return rising([middle(*column) for column in zip(*columns, strict=True)])

    steps = middles([ms for _, ms in window.t_draft_by_frontier_ms] for window in windows)
    frontiers = [frontier for frontier, _ in windows[0].t_draft_by_frontier_ms]
    least = -SPARED * pace_ms  # below 0, since the parts may be overestimated
    return RoundCosts(
        steps[-1] if steps else middle(*(window.t_draft_ms for window in windows)),
        middles(window.t_target_ms for window in windows),
        max(least, middle(*(window.overhead_ms for window in windows))),
        max(least, middle(*(window.plain_ms - window.t_target_ms[0] for window in windows))),
        windows[0].rows,
        tuple(zip(frontiers, steps, strict=True)),
        windows[0].frontier,
    )
