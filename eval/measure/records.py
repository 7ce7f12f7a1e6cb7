"""Raw records of generations, lines of records.jsonl, from which all numbers are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from decoding.errors import UserError
from jobs.run_files import journal_bytes, read_journal_lines

STALL = 3.0
AUTOREGRESSIVE = "autoregressive"  # the baseline's name where a drafter's would stand


@dataclass(frozen=True)
class Condition:
    """Condition that drafter and baseline share when they are compared."""

    temperature: float
    batch_size: int

    @property
    def label(self) -> str:
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        return f"T={self.temperature:g}{batch}"


@dataclass(frozen=True)
class Arm:
    """Drafter at a draft length, or the baseline (gamma 0), run on every prompt."""

    drafter: str
    num_draft_tokens: int


BASELINE = Arm(AUTOREGRESSIVE, 0)
# The same under coupled sampling, where some drafters alone are coupled: their text has to be this
# one's. Its time counts nowhere.
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
    draft_steps: int  # the drafter's model's forwards, of the batch
    verified: int  # nodes of the target's forwards besides the tips, of one row, padding included
    prefill_seconds: float  # of the batch
    # wall time from the end of the prefill to this row's last token, of the whole batch
    decode_seconds: float
    draft_seconds: float  # the drafter's part of it
    # that decoding had its processors, over prefill and decoding of the batch
    # (eval/measure/cpu_contention.py)
    cpu_seconds: float
    differs_at: int | None  # first token that is not the baseline's; None: equal, or not comparable
    gap: float | None  # there, the target's best score minus its second best
    # under an overlapped schedule: the longer lane of every round, part of decode_seconds
    lanes_seconds: float = 0.0
    target_seconds: float = 0.0  # there, the target's lane
    shorter_seconds: float = 0.0  # there, the shorter lane of every round
    sample: int = 0  # of several generations of one prompt
    # a character a token: 1 a draft that passed, 0 in place of one that failed, . none tested
    trace: str = ""
    draft_beams: int = 0  # that the draft steps started from, summed; 0: one each
    attempt: int = 1  # times its unit was measured, stalls of the machine included

    @property
    def condition(self) -> Condition:
        return Condition(self.temperature, self.batch_size)

    @property
    def arm(self) -> Arm:
        return Arm(self.drafter, self.num_draft_tokens)


def stalled(unit: Sequence[Record], before: Sequence[Record]) -> bool:
    """Return whether the machine stalled during a unit: a round took STALL times its usual time.

    The usual time is the median over the units `before` of the same part; with fewer than three of
    them the result is False. All arms are judged alike. A prompt that is merely slow does not come
    near, since the cost of a round hardly depends on the text.
    """
    for arm in {record.arm for record in unit}:
        usual = [_round_seconds(record) for record in before if record.arm == arm]
        if len(usual) >= 3 and max(
            _round_seconds(record) for record in unit if record.arm == arm
        ) > STALL * median(usual):
            return True
    return False


def _round_seconds(record: Record) -> float:
    return record.decode_seconds / record.rounds


def record_from(values: dict[str, Any]) -> Record:
    """Make a record from the values of a line. Raises TypeError for other fields."""
    return Record(**values)


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Add lines in one write, so that a killed run leaves at most one torn line, at the end."""
    with path.open("ab") as file:
        file.write(journal_bytes(map(dataclasses.asdict, records)))


def read_records(path: Path) -> list[Record]:
    """Read all records of a run, skipping a torn last line.

    Raises UserError for any other damage.
    """
    lines = read_journal_lines(path, record_from)
    if lines.wrong:
        raise UserError(
            f"{path}, {lines.wrong[0]}: not a record of eval.run. Remove the output folder, or "
            f"choose another output_dir, and measure again."
        )
    return lines.records


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Replace the file atomically."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    append_records(partial, records)
    partial.rename(path)
