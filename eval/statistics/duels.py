"""Each drafter against the best of the others, prompt by prompt: what the intervals of two speedups
cannot say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.measure.records import Arm, Condition, Record
from eval.statistics.metrics import Interval, paired_bootstrap
from eval.statistics.schema import Row
from eval.statistics.units import pair_units
from jobs.drafter_use import ALONE


@dataclass(frozen=True)
class Duel:
    """A drafter's tokens a second over its best rival's on the same prompts."""

    row: Row
    rival: Row
    ratio: Interval


def duels(rows: Sequence[Row], records: Sequence[Record]) -> list[Duel]:
    """Of rows under one condition: each drafter, at its fastest, against the fastest other one,
    both resampled together by prompt.

    One that writes alone is none of them: its text is not the target's. Fewer than two drafters
    fight no duel.
    """
    ranked = sorted(
        (row for row in rows if row.schedule != ALONE), key=lambda row: -row.tokens_per_second
    )
    fastest: dict[str, Row] = {}
    for row in ranked:
        fastest.setdefault(row.drafter, row)
    rivals = list(fastest.values())
    found = []
    for row in rivals if len(rivals) > 1 else []:
        rival = rivals[1] if row is rivals[0] else rivals[0]
        units = pair_units(_of(row, records), _of(rival, records))
        ratio = paired_bootstrap(
            [unit.tokens for unit in units],
            [unit.seconds for unit in units],
            [unit.base_tokens for unit in units],
            [unit.base_seconds for unit in units],
            seed=row.seed,
        )
        found.append(Duel(row, rival, ratio))
    return found


def _of(row: Row, records: Sequence[Record]) -> list[Record]:
    mine = (
        row.part,
        Condition(row.temperature, row.batch_size),
        Arm(row.drafter, row.num_draft_tokens),
    )
    return [record for record in records if (record.part, record.condition, record.arm) == mine]
