"""Readers of the files of a run folder. A damaged file raises a UserError with a remedy.

A journal is a JSONL file. Each line ends in the CRC-32 of the text before it, which reveals a
flipped bit. Lines of earlier versions, without a checksum, are read too.
"""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from decoding.errors import UserError, without_stop

Made = TypeVar("Made")
_QUOTED = 40  # bytes of a damaged file in a message
_CHECKSUM = re.compile(rb', "crc32": "([0-9a-f]{8})"\}$')
# exceptions that dataclasses and readers raise for wrong values
WRONG = (TypeError, ValueError, KeyError, AttributeError, RecursionError)


class DamagedLineError(ValueError):
    """A line of a journal that is not a record; the message is the reason."""


# names of Python's types in JSON
_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def json_kind(value: Any) -> str:
    """Return the kind of a value in JSON's terms."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def read_object(path: Path, remedy: str, make: Callable[[dict[str, Any]], Made]) -> Made:
    """Return the JSON object in a file, converted by `make`.

    Raises UserError, which ends with the remedy, for a file that is not a JSON object or that
    `make` rejects.
    """
    try:
        content = path.read_bytes()
        if not content.strip():
            raise ValueError("it is empty")
        return make(_parse_object(content))
    except WRONG as error:
        raise damaged(path, error, remedy, content) from error


def damaged(path: Path, error: Exception, remedy: str, content: bytes | None = None) -> UserError:
    """Return the error for a damaged file.

    error: the exception of the reader. content: the bytes of the file; None if it was not read.
    """
    reason = without_stop(reason_of(error, content)[:200])
    return UserError(f"{path} is damaged: {reason}. {remedy}")


def reason_of(error: Exception, content: bytes | None) -> str:
    """Describe the damage that an exception found, without Python's messages about types.

    content: the damaged bytes; None if they were not read.
    """
    if isinstance(error, RecursionError):
        return "values nested too deeply"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if content is not None and isinstance(error, TypeError | AttributeError):
        return f"found {content[:_QUOTED]!r}, expected the keys and types that were written"
    return " ".join(str(error).split())


def _parse_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("values nested too deeply") from error
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise ValueError(f"not JSON, found {content[:_QUOTED]!r} ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {content[:_QUOTED]!r}")
    return value


def journal_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a journal line: its JSON with the checksum as the last key."""
    body = json.dumps(record).encode()
    return body[:-1] + b', "crc32": "%08x"}\n' % zlib.crc32(body)


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the record in a line of a journal.

    Raises DamagedLineError for a line that is not a JSON object or has another checksum.
    """
    line = line.strip()
    found = _CHECKSUM.search(line)
    if found:
        line = line[: found.start()] + b"}"
        if int(found[1], 16) != zlib.crc32(line):
            raise DamagedLineError(f"its checksum does not match, found {line[:_QUOTED]!r}")
    try:
        return _parse_object(line)
    except ValueError as error:
        raise DamagedLineError(str(error)) from error


@dataclass(frozen=True)
class JournalContent(Generic[Made]):
    """Records of a journal, and its damaged lines."""

    records: list[Made]
    # the lines of the records
    lines: list[bytes]
    # reason for every damaged line ("line 3: ...")
    wrong: list[str]
    # number of bytes of an incomplete last line, after a kill or during a write
    torn: int

    @property
    def content(self) -> bytes:
        """The lines of the records, as the file has them."""
        return b"".join(self.lines)

    def report(self, path: Path, again: str) -> None:
        """Print the first damaged line and the number of others.

        again: end of the sentence, which states what happens to the records of these lines.
        """
        if self.wrong:
            more = f" and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
            print(f"{path}, {self.wrong[0]}{more}: left out, and {again}")


def read_journal_lines(path: Path, make: Callable[[dict[str, Any]], Made]) -> JournalContent[Made]:
    """Return the complete records of a journal, converted by `make`; none for a missing file."""
    found = JournalContent[Made]([], [], [], 0)
    if not path.is_file():
        return found
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return dataclasses.replace(found, torn=len(line))
            if not line.strip():
                continue
            try:
                found.records.append(make(parse_record(line)))
                found.lines.append(line)
            except WRONG as error:  # DamagedLineError is one of them
                found.wrong.append(f"line {number}: {reason_of(error, line[:-1])}")
    return found


def journal_bytes(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Return records as the content of a journal."""
    return b"".join(map(journal_line, records))
