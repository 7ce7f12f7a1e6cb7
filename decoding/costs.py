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
    """Milliseconds that a serial round of fixed length takes beyond its parts: the median over `runs` generations of `tokens` tokens."""
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
        for _ in range(runs):
            done = decode(target, drafter, [list(prompt)] * batch_size, brief)[0]
            parts_ms = done.draft_steps * costs.t_draft_ms
            parts_ms += done.rounds * costs.target_ms(1 + round(done.verified / done.rounds))
            rest_ms.append((1000 * done.decode_seconds - parts_ms) / done.rounds)
    return max(0.0, median(rest_ms))
