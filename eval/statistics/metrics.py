"""Acceptance, costs, speed and its interval as pure functions of counts and seconds.

alpha_k is the share of accepted draft tokens at depth k among those tested (the k-1 before them
were accepted); tau is tokens emitted per target forward. Predictions from these are in
decoding/costs/prediction.py.

Legend: D depths of a chain, P prompts (or groups of prompts decoded together), R bootstrap
resamples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A depth with fewer tests is not used to predict: its 95 % interval of alpha is wider than +-0.22.
MIN_TESTS = 20
# Fewer prompts have no interval: resampling them shows a spread that is far too small.
MIN_PROMPTS = 5
# Draws of a bootstrap that are computed at once, and those of several that are kept in memory.
RESAMPLES_AT_ONCE, MOST_KEPT = 64, 50_000_000


# --------------------------------------------------------------------------------------- acceptance
def alpha(tested_D: Sequence[int], accepted_D: Sequence[int]) -> float | None:
    """Return the acceptance rate over all depths; None if nothing was tested."""
    tested = sum(tested_D)
    return sum(accepted_D) / tested if tested else None


def alpha_by_depth(tested_D: Sequence[int], accepted_D: Sequence[int]) -> list[float | None]:
    """Return alpha_k = accepted_k / tested_k for k = 1 .. D; None at a depth that no round reached.

    Raises ValueError for lists of unequal length, and for counts that no chain can have: a depth
    that accepts more than it tests, or tests more than the depth before it accepted.
    """
    if len(tested_D) != len(accepted_D):
        raise ValueError(f"{len(tested_D)} tested counts but {len(accepted_D)} accepted counts")
    reached = None
    for depth, (tested, accepted) in enumerate(zip(tested_D, accepted_D, strict=True), start=1):
        if accepted > tested or (reached is not None and tested > reached):
            raise ValueError(
                f"depth {depth}: tested {tested}, accepted {accepted}, accepted one depth before "
                f"{reached}"
            )
        reached = accepted
    return [
        accepted / tested if tested else None
        for tested, accepted in zip(tested_D, accepted_D, strict=True)
    ]


def usable_alpha(tested_D: Sequence[int], accepted_D: Sequence[int]) -> list[float | None]:
    """Return alpha by depth for predictions; None at depths with too few tests.

    From the second depth on, at least MIN_TESTS tests are needed.
    """
    rates = alpha_by_depth(tested_D, accepted_D)
    return [
        rate if depth == 0 or tested_D[depth] >= MIN_TESTS else None
        for depth, rate in enumerate(rates)
    ]


def add_by_depth(counts: Sequence[Sequence[int]]) -> list[int]:
    """Return the sum of count lists of unequal length, depth by depth."""
    depths = max((len(count_D) for count_D in counts), default=0)
    return [sum(count_D[k] for count_D in counts if k < len(count_D)) for k in range(depths)]


def tau(tokens: int, rounds: int) -> float | None:
    """Return the block efficiency, tokens / rounds, prefill excluded; None without a round."""
    return tokens / rounds if rounds else None


# ----------------------------------------------------------------------------------- measured costs
def overhead(round_seconds: float, busy_seconds: float) -> float:
    """Return the overhead, 1 - busy_seconds / round_seconds.

    busy_seconds: draft steps x t_draft + t_target(n), timed back to back at the round's shapes. A
    small negative value is clock noise, since these parts are timed apart from the round.
    """
    return 1.0 - busy_seconds / round_seconds


def overlap(
    draft_seconds: float, target_seconds: float, both_seconds: float, shorter_seconds: float
) -> float | None:
    """Return (t_D + t_T - t_both) / min(t_D, t_T), each summed over rounds.

    This is the share of the shorter lane that ran during the longer one, from 0 up; clock noise
    below 0 is cut off. None if no round had two lanes.
    """
    if not shorter_seconds:
        return None
    return max(0.0, draft_seconds + target_seconds - both_seconds) / shorter_seconds


def cost_table(t_target_ms: Mapping[int, float]) -> dict[int, float]:
    """Return V(n) = t_target(n) / t_target(1). Raises KeyError if one new token was not timed."""
    single = t_target_ms[1]
    return {n: milliseconds / single for n, milliseconds in sorted(t_target_ms.items())}


# -------------------------------------------------------------------------------------------- speed
@dataclass(frozen=True)
class Interval:
    """Point estimate with a 95 % interval; low and high are None for too few prompts."""

    value: float
    low: float | None
    high: float | None


def interval_fields(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Return the interval as the fields `name`, `name_low` and `name_high` of a row."""
    values = (None, None, None) if interval is None else dataclasses.astuple(interval)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def paired_bootstrap(
    tokens_P: ArrayLike,
    seconds_P: ArrayLike,
    base_tokens_P: ArrayLike,
    base_seconds_P: ArrayLike,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return the speedup with a percentile 95 % interval; both sides of a prompt stay together.

    There is no interval for fewer than MIN_PROMPTS prompts. Slow prompts are slow on both sides,
    and pairing cancels that part of the noise. Few prompts vary less under resampling than new ones
    would, so the percentiles are moved outwards to those of Student's t.

    Sources: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13; Hesterberg
    (2015), "What Teachers Should Know About the Bootstrap", section 5.2, the expanded percentile
    interval.
    """
    return _bootstrap((tokens_P, seconds_P, base_tokens_P, base_seconds_P), _ratio, resamples, seed)


def bootstrap_tau(
    tokens_P: ArrayLike, rounds_P: ArrayLike, *, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Return tau, tokens / rounds, with its 95 % interval under resampling of prompts."""
    return _bootstrap((tokens_P, rounds_P), lambda tokens, rounds: tokens / rounds, resamples, seed)


def paired_speedups(
    one_P: Sequence[ArrayLike],
    other_P: Sequence[ArrayLike],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return one speedup over another on the same prompts, with the paired interval.

    Each argument is (tokens_P, seconds_P, base_tokens_P, base_seconds_P) with the baseline of its
    own run, so the two may have been measured at different times: a slower machine slows its
    baseline too. With one common baseline this is the ratio of tokens/s.
    """
    return _bootstrap(
        (*one_P, *other_P), lambda *sums: _ratio(*sums[:4]) / _ratio(*sums[4:]), resamples, seed
    )


def crossed_bootstrap(
    ours_KP: ArrayLike, base_KP: ArrayLike, *, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Return the ratio of two sides' sums over K passes of the same P requests, with its interval.

    Passes and requests are resampled independently, both sides of each together: a pass shares the
    machine's speed at its time, and a request its length. With one pass the interval covers
    requests alone. Few passes vary less under resampling than new ones would, so the percentiles
    are moved outwards as in `paired_bootstrap`, by the fewer of passes and requests: the interval
    is rather too wide than too narrow. There is none for fewer than MIN_PROMPTS requests. Raises
    ValueError for tables of different shapes.

    Source: Owen (2007), "The pigeonhole bootstrap".
    """
    ours, base = np.asarray(ours_KP, dtype=float), np.asarray(base_KP, dtype=float)
    if ours.shape != base.shape or ours.ndim != 2:
        raise ValueError(
            f"unpaired shapes {ours.shape} and {base.shape}, expected two equal (K, P)"
        )
    (passes, requests), value = ours.shape, float(ours.sum() / base.sum())
    if requests < MIN_PROMPTS:
        return Interval(value, None, None)
    requests_RP = _draws(requests, resamples, seed).astype(float)
    passes_RK = _draws(passes, resamples, seed + 1).astype(float)
    ours_R, base_R = (((passes_RK @ side) * requests_RP).sum(axis=1) for side in (ours, base))
    fewer = min(passes, requests) if passes > 1 else requests
    return Interval(value, *_expanded(ours_R / base_R, fewer))


def _ratio(tokens: Any, seconds: Any, base_tokens: Any, base_seconds: Any) -> Any:
    return tokens / seconds * base_seconds / base_tokens


def _bootstrap(
    columns_P: Sequence[ArrayLike], statistic: Callable[..., Any], resamples: int, seed: int
) -> Interval:
    """Return the statistic of the columns' sums, with its interval under resampling of prompts.

    Raises ValueError for columns of unequal length.
    """
    columns = [np.asarray(x, dtype=float) for x in columns_P]
    prompts = len(columns[0])
    if any(len(column) != prompts for column in columns):
        raise ValueError(f"unpaired lengths {[len(column) for column in columns]}")
    value = float(statistic(*(np.sum(column) for column in columns)))
    if prompts < MIN_PROMPTS:
        return Interval(value, None, None)
    few = prompts * resamples <= MOST_KEPT
    draws_RP = (_draws if few else _draws.__wrapped__)(prompts, resamples, seed)
    table_PC, starts = np.stack(columns, axis=1), range(0, resamples, RESAMPLES_AT_ONCE)
    parts = [draws_RP[r : r + RESAMPLES_AT_ONCE].astype(float) @ table_PC for r in starts]
    return Interval(value, *_expanded(statistic(*np.concatenate(parts).T), prompts))


def _expanded(found_R: NDArray[Any], units: int) -> tuple[float, float]:
    """Return the 95 % interval of resamples of so few units, by percentiles moved outwards."""
    outside = 100 * NormalDist().cdf(-(_student_t(units - 1) * (units / (units - 1)) ** 0.5))
    low, high = np.percentile(found_R, [outside, 100 - outside])
    return float(low), float(high)


@lru_cache(maxsize=32)  # the drafters of a run have the same prompts
def _draws(prompts: int, resamples: int, seed: int) -> NDArray[np.uint8]:
    """Return how often each resample draws each prompt: (R, P), each far below 256."""
    random, even_P = np.random.default_rng(seed), np.full(prompts, 1 / prompts)
    draws_RP = np.empty((resamples, prompts), np.uint8)
    for r in range(0, resamples, RESAMPLES_AT_ONCE):
        part_RP = draws_RP[r : r + RESAMPLES_AT_ONCE]
        part_RP[:] = random.multinomial(prompts, even_P, size=len(part_RP))
    return draws_RP


def _student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t by its expansion in 1 / freedom.

    Accurate to 0.1 % from 4 degrees of freedom, to 1 % with 2 (Abramowitz and Stegun, 26.7.5).
    """
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
