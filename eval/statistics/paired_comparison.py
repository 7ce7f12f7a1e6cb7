"""Paired comparison of drafters within a run, which is tighter than two separate intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from eval.measure.records import Record
from eval.statistics.lossless import LOSSY
from eval.statistics.metrics import Interval, paired_bootstrap
from eval.statistics.paired_samples import unit_speeds
from eval.statistics.schema import Row
from jobs.drafter_use import ALONE


@dataclass(frozen=True)
class PairedComparison:
    """Ratio of a drafter's tokens/s to its best rival's, on the same prompts."""

    row: Row
    rival: Row
    ratio: Interval


def paired_comparisons(rows: Sequence[Row], records: Sequence[Record]) -> list[PairedComparison]:
    """Compare each drafter, at its fastest, with the fastest other one under the same condition.

    rows: of one condition. Both sides of a prompt are resampled together. Rows with schedule=alone
    are excluded: they decode another model's text. So are lossy rows. Returns [] for fewer than two
    drafters.
    """
    fastest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: -row.tokens_per_second):
        if row.schedule != ALONE and row.lossless != LOSSY:
            fastest.setdefault(row.drafter, row)
    rivals = list(fastest.values())
    found = []
    for row in rivals if len(rivals) > 1 else []:
        rival = rivals[1] if row is rivals[0] else rivals[0]
        mine, theirs = (unit_speeds(_records_of(one, records)) for one in (row, rival))
        assert mine.keys() == theirs.keys(), "rows of a condition have the same prompts"
        columns = [
            zip(*(side[unit] for unit in sorted(mine)), strict=True) for side in (mine, theirs)
        ]
        ratio = paired_bootstrap(*columns[0], *columns[1], seed=row.seed)
        found.append(PairedComparison(row, rival, ratio))
    return found


def _records_of(row: Row, records: Sequence[Record]) -> list[Record]:
    names = ("part", "temperature", "batch_size", "drafter", "num_draft_tokens")
    same = attrgetter(*names)
    place = same(row)
    return [record for record in records if same(record) == place]
