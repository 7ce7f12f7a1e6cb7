"""PEARL's state machine run over logged accept/reject traces: what an overlapped schedule should
take, round by round.

The closed form (eval.statistics.prediction.pearl_round) takes acceptance as equal everywhere; real
acceptance comes in bursts, of which a trace keeps every one. Each turn is priced by its longer
lane, at what a drafted token and a forward took on average in that run, so the machine's pace drops
out. Where measurement and replay agree, the schedule does what it should; where they differ, the
lanes did not overlap.

A trace has a character for each emitted token: `1` a draft that passed, `0` the target's own in
place of one that failed, `.` the target's own where nothing was drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from decoding.schedules.by_name import SCHEDULES
from eval.statistics.prediction import Costs


@dataclass(frozen=True)
class Turn:
    """One round of the schedule."""

    drafted: int  # tokens of the new chunk
    width: int  # tokens that the target's forward runs over; 0: it rests
    gained: int  # tokens emitted


def can_replay(schedule: str) -> bool:
    """Whether the next turn follows from the trace alone; PEARL+ also weighs costs."""
    return schedule in SCHEDULES and "plus" not in schedule


def turns(trace: str, gamma: int, limit: int, schedule: str) -> Iterator[Turn]:
    """The turns that decode a text with this trace, in chunks of `gamma`, when at most `limit`
    tokens may come.

    Raises ValueError where the schedule tests a token of which the trace does not know whether it
    passes.
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
        passed = _run(trace, done, window)
        gained = passed if passed == window and drafted else passed + 1
        yield Turn(drafted, 1 + assumed, min(gained, len(trace) - done))
        done += gained
        assumed = drafted - 1 if passed == window and drafted else 0


def _run(trace: str, start: int, window: int) -> int:
    """How many of the `window` tokens from `start` on pass in a row. What lies behind the text's
    end changes nothing: it passes.
    """
    for offset, mark in enumerate(trace[start : start + window]):
        if mark == ".":
            raise ValueError(f"token {start + offset} was never tested, but the schedule tests it")
        if mark == "0":
            return offset
    return window


def lanes(turn: Turn, costs: Costs) -> float:
    """The longer lane of a turn, in target steps."""
    return max(turn.drafted * costs.cost_ratio, costs.V_at(turn.width) if turn.width else 0.0)


def mean_lanes(traces: Iterable[str], gamma: int, limit: int, schedule: str, costs: Costs) -> float:
    """The longer lanes over the target's forwards, in target steps a forward."""
    taken = [turn for trace in traces for turn in turns(trace, gamma, limit, schedule)]
    return sum(lanes(turn, costs) for turn in taken) / sum(turn.width > 0 for turn in taken)


def replayed_speedup(taken: Sequence[Turn], costs: Costs) -> float:
    """Tokens a second over the baseline's: every turn costs its longer lane, and each of the
    target's forwards the rest (costs.overhead).
    """
    spent = sum(lanes(turn, costs) + costs.overhead * (turn.width > 0) for turn in taken)
    return sum(turn.gained for turn in taken) * (1.0 + costs.baseline_overhead) / spent
