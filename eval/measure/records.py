"""Raw records of generations, lines of records.jsonl, from which all numbers are computed."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from decoding.errors import UserError
from decoding.rounds.stats import Round, distinct_n
from jobs.malloc import without_collector
from jobs.run_files import journal_bytes, read_journal_lines

STALL = 3.0
AUTOREGRESSIVE = "autoregressive"  # name of the baseline in place of a drafter's


@dataclass(frozen=True)
class Condition:
    """Settings that drafter and baseline must share to be compared."""

    temperature: float
    batch_size: int

    @property
    def label(self) -> str:
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        return f"T={self.temperature:g}{batch}"


@dataclass(frozen=True)
class Arm:
    """A drafter at a draft length, or the baseline (gamma 0), run on every prompt."""

    drafter: str
    num_draft_tokens: int


BASELINE = Arm(AUTOREGRESSIVE, 0)
# Baseline with coupled sampling, used if only some drafters are coupled: their text must equal its
# text. Its time does not count.
COUPLED = Arm(f"{AUTOREGRESSIVE}, coupled", 0)


@dataclass(frozen=True)
class Record:
    """One turn of a prompt decoded by one arm."""

    part: str  # sweep | main
    temperature: float
    batch_size: int
    drafter: str
    num_draft_tokens: int
    unit: int  # prompts decoded together share it; the bootstrap resamples units
    prompt_id: str
    category: str
    turn: int
    prompt_tokens: int
    tokens: list[int]
    finish: str  # stop | length
    rounds: int  # target forwards, prefill excluded
    tested_by_depth: list[int]
    accepted_by_depth: list[int]
    drafted: int
    draft_steps: int  # forwards of the drafter's model, of the batch
    # nodes in the target's forwards besides the tips, in one row, padding included
    verified: int
    prefill_seconds: float  # of the batch
    # wall time of the batch from the end of the prefill to this row's last token
    decode_seconds: float
    draft_seconds: float  # of these, the drafter's
    # in which decoding had its processors, during prefill and decoding of the batch
    # (see decoding.costs.contention)
    cpu_seconds: float
    # index of the first token that differs from the baseline's; None: equal, or not compared
    differs_at: int | None
    gap: float | None  # at differs_at, the target's best score minus the second best
    # overlapped schedules: the longer lane of each round, part of decode_seconds
    lanes_seconds: float = 0.0
    target_seconds: float = 0.0  # of these, the target's lane
    shorter_seconds: float = 0.0  # of these, the shorter lane of each round
    sample: int = 0  # number of the generation, of several of one prompt
    trace: str = ""  # see Generation.trace
    draft_beams: int = 0  # sum over draft steps of the beams they started from; 0: one each
    # number of times that its unit was measured, after stalls and disturbances of the machine
    attempt: int = 1
    # parts of decode_seconds: the target's forwards, and verification; 0: not measured
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    # each round's numbers, until they are saved (see eval.measure.rounds)
    by_round: Sequence[Round] = ()

    @property
    def condition(self) -> Condition:
        return Condition(self.temperature, self.batch_size)

    @property
    def arm(self) -> Arm:
        return Arm(self.drafter, self.num_draft_tokens)

    @cached_property
    def distinct_4(self) -> float:
        """Share of distinct 4-token sequences in the text."""
        return distinct_n(self.tokens)

    @property
    def round_seconds(self) -> float:
        return self.decode_seconds / self.rounds


def stalled(unit: Sequence[Record], before: Sequence[Record]) -> bool:
    """Return whether the machine stalled during a unit: a round took STALL times its usual time.

    An arm's usual time is its median over the units `before`, of the same part; arms with fewer
    than three records there are not judged. A slow prompt is not a stall, since the cost of a round
    hardly depends on the text.
    """
    for arm in {record.arm for record in unit}:
        usual = [record.round_seconds for record in before if record.arm == arm]
        slowest = max(record.round_seconds for record in unit if record.arm == arm)
        if len(usual) >= 3 and slowest > STALL * median(usual):
            return True
    return False


def undisturbed_share(unit: Sequence[Record]) -> float:
    """Return the share of a unit's time in which decoding had its processors."""
    batches: dict[tuple[Arm, int, int], list[Record]] = defaultdict(list)
    for record in unit:
        batches[record.arm, record.sample, record.turn].append(record)
    seconds = sum(
        rows[0].prefill_seconds + max(row.decode_seconds for row in rows)
        for rows in batches.values()
    )
    return sum(rows[0].cpu_seconds for rows in batches.values()) / seconds


_TOKENS: dict[int, int] = {}


def record_from(values: dict[str, Any]) -> Record:
    """Return the record of a line of records.jsonl; raise TypeError for other or missing fields.

    Equal token ids of all records are one object: 40,000 texts then take a third of the memory.
    """
    record = Record(**values)
    record.tokens[:] = map(_TOKENS.setdefault, record.tokens, record.tokens)
    return record


def append_lines(path: Path, items: Iterable[Any]) -> None:
    """Append records or slices in one write: a killed run leaves at most one torn line."""
    with path.open("ab") as file:
        file.write(journal_bytes(map(_saved, items)))


def _saved(item: Any) -> dict[str, Any]:
    values = dataclasses.asdict(item)
    values.pop("by_round", None)
    return values


@without_collector()
def read_records(path: Path) -> list[Record]:
    """Read all records of a run, skipping a torn last line.

    Raises UserError for any other damage.
    """
    lines = read_journal_lines(path, record_from)
    if lines.wrong:
        raise UserError(
            f"{path} does not hold records of eval.run ({lines.wrong[0]}). Remove the output "
            f"folder, or set another output_dir=, and measure again."
        )
    return lines.records


def write_records(path: Path, records: Iterable[Any]) -> None:
    """Replace the file with these records in one atomic step."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    append_lines(partial, records)
    partial.rename(path)
