"""What a round costs on this machine, measured before anything is decided by it: the parts, and the rest of a round beside them."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median

from decoding.batch import Settings
from decoding.drafter import Drafter
from decoding.loop import decode
from decoding.schedules import WALL
from decoding.stopping import RoundCosts
from decoding.target import Target
from decoding.timing import time_parts
from decoding.worker import RemoteChain, lanes


def own_cores(target: Target, drafter: Drafter, schedule: str) -> AbstractContextManager[None]:
    """What is timed inside has the cores that it will have: a drafter that works beside the target leaves it the others."""
    return lanes(drafter, target) if schedule in WALL and isinstance(drafter, RemoteChain) else nullcontext()


def measure_costs(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    settings: Settings,
    *,
    widths: Iterable[int] = range(1, 9),
    repeats: int = 3,
    runs: int = 2,
    tokens: int = 16,
) -> RoundCosts:
    """The costs of one row's rounds under these settings. repeats: of each part; runs, tokens: see `rest_of_a_round`."""
    with own_cores(target, drafter, settings.schedule):
        costs = time_parts(target, drafter, prompt, widths=widths, repeats=repeats, warmup=1).costs
    rest_ms = rest_of_a_round(target, drafter, prompt, settings, costs, runs=runs, tokens=tokens)
    return replace(costs, overhead_ms=rest_ms)


def rest_of_a_round(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    settings: Settings,
    costs: RoundCosts,
    *,
    batch_size: int = 1,
    runs: int,
    tokens: int,
) -> float:
    """Milliseconds that a serial round of fixed length takes beyond its parts: the median over `runs` generations of `tokens` tokens.

    A machine changes pace from second to second, so each generation is held against parts timed right before it, and the share that it took
    beyond them is put on the pace of `costs`.
    """
    brief = replace(
        settings,
        max_new_tokens=min(tokens, settings.max_new_tokens),
        schedule="serial",
        stopping="fixed",
        stopping_threshold=None,
        costs=costs,
        ignore_eos=True,
    )
    rest_ms = []
    with own_cores(target, drafter, settings.schedule):
        done = decode(target, drafter, [list(prompt)] * batch_size, brief)[
            0
        ]  # warms up, and shows the width of a round
        width = 1 + round(done.verified / done.rounds)
        for _ in range(runs):
            now = time_parts(target, drafter, prompt, widths=(width,), batch_size=batch_size, repeats=5, warmup=1)
            done = decode(target, drafter, [list(prompt)] * batch_size, brief)[0]
            assert now.t_draft_ms is not None
            drafted = done.draft_steps / done.rounds
            share = 1000 * done.decode_seconds / done.rounds / (drafted * now.t_draft_ms + now.t_target_ms[width]) - 1
            rest_ms.append(share * (drafted * costs.t_draft_ms + costs.target_ms(width)))
    return max(0.0, median(rest_ms))
