"""Journal of answers that survives a killed run: JSON lines with checksums, flushed to the disk.

An incomplete last line is cut off and a damaged line is ignored. Their requests are answered again.
Every rank writes one file and reads all files, so a run can resume with another number of ranks.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jobs.files import write_bytes
from jobs.run_files import journal_bytes, read_journal_lines

Record = Mapping[str, Any]
AGAIN = "its answer is generated again"


class Journal:
    """Append-only journal that continues after the last complete line of an existing file."""

    def __init__(self, path: Path, make: Callable[[dict[str, Any]], Any] = dict) -> None:
        """Open the journal, and remove damaged lines from it.

        make: function that converts a record, and raises TypeError, ValueError or KeyError for a
        damaged one.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = read_journal_lines(path, make)
        lines.report(path, AGAIN)
        if lines.torn:
            print(
                f"{path}: the last line was incomplete ({lines.torn:,} bytes) and is cut off; "
                f"{AGAIN}"
            )
        if lines.wrong:
            write_bytes(path, lines.content)
        elif lines.torn:
            os.truncate(path, len(lines.content))
        self._file = path.open("ab")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, records: Iterable[Record]) -> None:
        """Write the records, one per line, and flush them to the disk."""
        self._file.write(journal_bytes(records))
        self._file.flush()
        os.fsync(self._file.fileno())


def read_journal(path: Path, make: Callable[[dict[str, Any]], Any] = dict) -> list[Any]:
    """Return the records of a journal, converted by `make`.

    Lines that are damaged, or that another rank is writing, are left out.
    """
    lines = read_journal_lines(path, make)
    lines.report(path, AGAIN)
    return lines.records
