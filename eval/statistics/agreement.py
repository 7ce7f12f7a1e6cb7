"""Overlapped schedules beside their replay (eval.statistics.replay): does the schedule, at what its
lanes took, explain what was measured?

The replay prices each round by its longer lane. On two workers that is a promise about the machine:
where the lanes do not run at the same time, the measurement falls behind. On a virtual clock it
says whether mean times explain the rounds. The suite keeps no clock, so this verdict is given
wherever rows are shown.
"""

from __future__ import annotations

from decoding.schedules.by_name import WALL
from eval.statistics.schema import Row

WITHIN = 0.05  # share of the measurement by which its replay may differ


def ratio(row: Row) -> float | None:
    """Replay over measurement; None where there is no replay."""
    return None if row.replayed_speedup is None else row.replayed_speedup / row.speedup


def departs(row: Row) -> bool:
    """Whether there is a replay, and it is further from the measurement than WITHIN."""
    found = ratio(row)
    return found is not None and abs(found - 1) > WITHIN


def verdict(row: Row) -> str:
    """In a few plain words."""
    found = ratio(row)
    if found is None:
        return "no replay: costs or other rows decide what comes next, not the text alone"
    if not departs(row):
        return f"within {100 * WITHIN:.0f} %"
    apart = f"NOT within {100 * WITHIN:.0f} %: "
    if found < 1:
        return (
            f"{apart}rounds took less than their lanes' mean times say; these vary from round "
            f"to round"
        )
    if row.schedule in WALL:
        return (
            f"{apart}rounds took more than the longer of their lanes; the two did not run at "
            f"the same time as far as they should"
        )
    return (
        f"{apart}rounds took more than their lanes' mean times say; these vary from round to round"
    )


def sentence(row: Row) -> str:
    """Replay and measurement of a row that has both."""
    found = ratio(row)
    assert found is not None and row.replayed_speedup is not None
    return (
        f"Replayed over its own accept/reject trace: {row.replayed_speedup:.2f}x, {found:.2f} "
        f"of the measured ({verdict(row)})."
    )
