"""Speedups of PEARL's schedules, predicted from traces of accepted and rejected drafts.

The closed form (decoding.costs.prediction.pearl_round) assumes uniform acceptance; a trace keeps
the bursts of real acceptance. Each turn costs its longer lane, at the run's mean cost of a drafted
token and of a forward, so the machine's speed cancels. If measurement and prediction agree, the
schedule works; if they differ, the lanes did not overlap.

A trace has a character for each emitted token: `1` for an accepted draft, `0` for the target's
token in place of a rejected draft, `.` for the target's token where nothing was drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from decoding.costs.prediction import Costs
from decoding.schedules.by_name import SCHEDULES


@dataclass(frozen=True)
class Turn:
    """Round of an overlapped schedule."""

    drafted: int  # tokens of the new chunk
    width: int  # tokens of the target's forward; 0: no forward
    gained: int  # tokens emitted


def has_trace_turns(schedule: str) -> bool:
    """Return whether the trace alone determines the next turn; PEARL+ also uses costs."""
    return schedule in SCHEDULES and "plus" not in schedule


def turns(trace: str, gamma: int, limit: int, schedule: str) -> Iterator[Turn]:
    """Yield the rounds that produce this trace in chunks of at most `gamma` tokens.

    limit: max_new_tokens of the run, past which nothing is drafted. Raises ValueError if the
    schedule tests a token that the trace has no result for.
    """
    kind = SCHEDULES[schedule]
    done = assumed = 0
    while done < len(trace):
        may_draft = kind.post_verify or not assumed
        drafted = max(0, min(gamma, limit - done - assumed)) if may_draft else 0
        if drafted and not assumed and not kind.pre_verify:
            yield Turn(drafted, 0, 0)
            assumed = drafted
            continue
        window = assumed + (drafted > 0)
        passed = _accepted_from(trace, done, window)
        gained = passed if passed == window and drafted else passed + 1
        yield Turn(drafted, 1 + assumed, min(gained, len(trace) - done))
        done += gained
        assumed = drafted - 1 if passed == window and drafted else 0


def _accepted_from(trace: str, start: int, window: int) -> int:
    """Return the number of consecutive accepted tokens from `start` on, at most `window`.

    Tokens past the text's end count as accepted; they change nothing. Raises ValueError if a token
    to test has no result.
    """
    for offset, mark in enumerate(trace[start : start + window]):
        if mark == ".":
            raise ValueError(f"token {start + offset} was never tested, but the schedule tests it")
        if mark == "0":
            return offset
    return window


def lanes(turn: Turn, costs: Costs) -> float:
    """Return the time of a turn's longer lane, in target forwards over one token."""
    return max(turn.drafted * costs.cost_ratio, costs.V_at(turn.width) if turn.width else 0.0)


def mean_lanes(traces: Iterable[str], gamma: int, limit: int, schedule: str, costs: Costs) -> float:
    """Return the time of the longer lanes per target forward, in forwards over one token."""
    taken = [turn for trace in traces for turn in turns(trace, gamma, limit, schedule)]
    return sum(lanes(turn, costs) for turn in taken) / sum(turn.width > 0 for turn in taken)


def speedup_from_trace(taken: Sequence[Turn], costs: Costs) -> float:
    """Return the speedup if every turn costs its longer lane, and every forward the overhead."""
    spent = sum(lanes(turn, costs) + costs.overhead * (turn.width > 0) for turn in taken)
    return sum(turn.gained for turn in taken) * (1.0 + costs.baseline_overhead) / spent
