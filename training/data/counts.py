"""Counts of a file's records: used, or skipped with a reason and a place."""

import sys
from dataclasses import dataclass, field

from decoding.errors import UserError
from jobs import ranks

SHOWN_PLACES = 5
TOO_DEEP = "values nested too deeply"
TOO_MANY_DIGITS = "a number of too many digits"  # for Python, which converts some thousand
NOT_UTF8 = "not UTF-8"
CONVERT = "Convert a file of another encoding, such as with iconv -f LATIN1 -t UTF-8 FILE"


class BadRecordError(Exception):
    """Reason for skipping a record; skipped records are counted by reason."""


def print_note(text: str) -> None:
    """Print a note on stderr, on the first rank only; jobs configure no logging to show it."""
    if ranks.rank() == 0:
        print(f"note: {text}", file=sys.stderr)


@dataclass
class Counts:
    """Number of used records, and places of skipped and of cut records by reason."""

    used: int = 0
    # reason -> places ("file:line") of the skipped records
    bad: dict[str, list[str]] = field(default_factory=dict)
    # the same for used records of which a part was removed
    cut: dict[str, list[str]] = field(default_factory=dict)

    @property
    def skipped(self) -> int:
        return sum(map(len, self.bad.values()))

    @property
    def read(self) -> int:
        return self.used + self.skipped

    def skip(self, reason: str, place: str) -> None:
        self.bad.setdefault(reason, []).append(place)

    def add(self, other: "Counts") -> None:
        """Add the counts of further records."""
        self.used += other.used
        for mine, more in ((self.bad, other.bad), (self.cut, other.cut)):
            for reason, places in more.items():
                mine.setdefault(reason, []).extend(places)

    def line(self, what: str) -> str:
        """Describe the counts in one line, with reasons and places of skipped and cut records."""
        line = f"{what}: {self.used:,} of {self.read:,} used"
        for fate, reasons in (("skipped", self.bad), ("cut", self.cut)):
            for reason, places in reasons.items():
                more = ", ..." if len(places) > SHOWN_PLACES else ""
                shown = ", ".join(places[:SHOWN_PLACES])
                line += f"; {len(places):,} {fate}: {reason} ({shown}{more})"
        return line

    def check(self, what: str, expected: str, max_bad: float) -> list[str]:
        """Print a note about skipped and cut records, if there are any, and return the notes.

        what: the kind of record. expected: the valid form of a record. Raises UserError if more
        than the share `max_bad` of the records was skipped.
        """
        if self.skipped > max_bad * self.read:
            # Jobs without training have no such key.
            remedy = "" if what == "prompts" else ", or raise data.max_bad"
            convert = f"{CONVERT}. " if NOT_UTF8 in self.bad else ""
            raise UserError(
                f"{self.line(what)}. Expected {expected}; more than {max_bad:.1%} are bad. "
                f"{convert}Fix or remove the skipped {what}{remedy}"
            )
        notes = [self.line(what)] if self.skipped or self.cut else []
        for note in notes:
            print_note(note)
        return notes
