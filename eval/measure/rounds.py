"""rounds.jsonl: a line for each round of each drafter, saved with the records of its unit.

The lines of a generation sum up to its record. Those of a unit are written before its records, so a
unit that has records also has its rounds; a resumed run removes all other lines.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.measure.records import BASELINE, COUPLED, Record
from jobs.run_files import WRONG, journal_bytes, parse_record

FILE = "rounds.jsonl"
# Fields that a line shares with the record of its generation.
OF_UNIT = ("part", "temperature", "batch_size", "unit")
OF_GENERATION = (*OF_UNIT, "drafter", "num_draft_tokens", "prompt_id", "sample", "turn")
DIGITS = 6  # of seconds, after the point
Unit = tuple[Any, ...]  # values of OF_UNIT


def unit_of(record: Record) -> Unit:
    """Return what distinguishes a record's unit from the others of the run."""
    return tuple(vars(record)[name] for name in OF_UNIT)


def lines_of(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the lines of a generation. A baseline has none.

    Seconds are wall time of the batch's round. The parts, which sum up to it, are missing where
    they were not measured: in overlapped schedules and on GPUs.
    """
    if record.arm in (BASELINE, COUPLED):
        return
    place = {name: vars(record)[name] for name in OF_GENERATION}
    for number, one in enumerate(record.by_round):
        line = {**place, "round": number, "drafted": one.drafted, "tested": one.tested}
        line |= {"accepted": one.accepted, "emitted": one.emitted, "seconds": one.seconds}
        if one.forward_seconds:
            parts = (one.draft_seconds, one.forward_seconds, one.verify_seconds)
            names = ("propose_seconds", "forward_seconds", "verify_seconds", "rest_seconds")
            line |= zip(names, (*parts, one.seconds - sum(parts)), strict=True)
        yield {
            name: round(value, DIGITS) if name.endswith("seconds") else value
            for name, value in line.items()
        }


@dataclass(frozen=True)
class RoundsFile:
    """The rounds of a run folder."""

    path: Path

    def append(self, records: Iterable[Record]) -> None:
        """Append the rounds of a unit in one write."""
        with self.path.open("ab") as file:
            file.write(journal_bytes(line for record in records for line in lines_of(record)))

    def lacking(self, records: Sequence[Record]) -> set[Unit]:
        """Return the units of records whose rounds are not all here; none if there is no file.

        A run folder of an earlier version has no file.
        """
        if not self.path.is_file():
            return set()
        found = Counter(tuple(line[name] for name in OF_GENERATION) for _, line in self._lines())
        expected: Counter[tuple[Any, ...]] = Counter()
        for one in records:
            if one.arm not in (BASELINE, COUPLED):
                expected[tuple(vars(one)[name] for name in OF_GENERATION)] += one.rounds
        wrong = (place for place, rounds in expected.items() if found[place] != rounds)
        return {place[: len(OF_UNIT)] for place in wrong}

    def keep(self, units: Collection[Unit]) -> None:
        """Remove the lines of all other units, and damaged lines."""
        if not self.path.is_file():
            return
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as kept:
            for content, line in self._lines():
                if tuple(line[name] for name in OF_UNIT) in units:
                    kept.write(content)
        partial.rename(self.path)

    def join(self, shards: Iterable[Path]) -> None:
        """Write the rounds of several run folders, one after the other."""
        files = [folder / FILE for folder in shards if (folder / FILE).is_file()]
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as joined:
            for file in files:
                with file.open("rb") as one:
                    shutil.copyfileobj(one, joined)
        partial.rename(self.path)

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield each intact line, as it is and parsed. The file may not fit into memory."""
        with self.path.open("rb") as file:
            for content in file:
                try:
                    line = parse_record(content) if content.endswith(b"\n") else {}
                except WRONG:
                    continue
                if set(OF_GENERATION) <= line.keys():
                    yield content, line
