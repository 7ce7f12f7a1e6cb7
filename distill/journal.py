"""A journal of records that a killed run leaves whole: JSON lines, appended and forced to the disk, and a torn last one cut off.

Every rank writes a file of its own and reads all of them, so that a run may go on with another number of ranks.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from decoding.errors import UserError

Record = Mapping[str, Any]


class Journal:
    """`with Journal(path) as journal: journal.append([...])`: goes on behind the last whole line of what is there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            _, whole = _whole_lines(path)
            torn = path.stat().st_size - whole
            if torn:
                print(
                    f"{path}: the last line was half written ({torn:,} bytes) and is cut off; its answer is made again"
                )
                os.truncate(path, whole)
        self._file = path.open("ab")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, records: Iterable[Record]) -> None:
        """Write the records, one a line, and force them to the disk."""
        self._file.write(b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records))
        self._file.flush()
        os.fsync(self._file.fileno())


def read_journal(path: Path) -> list[Record]:
    """The records of a journal; a last line that is not whole (another rank may be writing it) is passed over.

    Raises UserError naming a broken line before the last.
    """
    return _whole_lines(path)[0]


def _whole_lines(path: Path) -> tuple[list[Record], int]:
    """(records, bytes that they take): up to the last line that ends and is JSON."""
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    records: list[Record] = []
    whole = 0
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
            if number == len(lines):  # a power cut can leave a line of zeros
                break
            raise UserError(
                f"{path}:{number}: no JSON, found {line[:40]!r}. The journal was changed by something else: take this line out, and its "
                "answer is made again"
            ) from error
        whole += len(line)
    return records, whole
