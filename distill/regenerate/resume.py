"""A journal of records that a killed run leaves whole: JSON lines with checksums, appended and
forced to the disk.

A torn last line is cut off, and one that was damaged is left out: what it held is asked again.
Every rank writes a file of its own and reads all of them, so that a run may go on with another
number of ranks.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jobs.files import write_bytes
from jobs.run_files import journal_bytes, read_journal_lines

Record = Mapping[str, Any]
AGAIN = "its answer is made again"


class Journal:
    """`with Journal(path, make) as journal: journal.append([...])`: goes on behind the last whole
    line of what is there.
    """

    def __init__(self, path: Path, make: Callable[[dict[str, Any]], Any] = dict) -> None:
        """make: raises TypeError, ValueError or KeyError for a record that is none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = read_journal_lines(path, make)
        lines.report(path, AGAIN)
        if lines.torn:
            print(
                f"{path}: the last line was half written ({lines.torn:,} bytes) and is cut off; "
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
        """Write the records, one a line, and force them to the disk."""
        self._file.write(journal_bytes(records))
        self._file.flush()
        os.fsync(self._file.fileno())


def read_journal(path: Path, make: Callable[[dict[str, Any]], Any] = dict) -> list[Any]:
    """The records of a journal as `make` gives them; a line that is damaged, or is being written by
    another rank, is passed over.
    """
    lines = read_journal_lines(path, make)
    lines.report(path, AGAIN)
    return lines.records
