"""Elements of a JSON array in a file, decoded one by one from a window of its text."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from decoding.errors import UserError
from training.data.counts import CONVERT, TOO_DEEP, TOO_MANY_DIGITS, BadRecordError

CHUNK_BYTES = 2**20
# The end of a window causes errors at most this close to it: the longest token, "-Infinity", has 9
# characters. Only the errors of _UNENDED are reported at the begin of a text or an element.
_NEAR_END = 16
_NO_END = "an element without an end"
_UNENDED = ("Unterminated string", _NO_END)
_BEFORE_ARRAY = re.compile(r"[^\[]*")
_BETWEEN_ELEMENTS = re.compile(r"[ \t\r\n,]*")
_BLANKS = re.compile(r"\s*")
# a text that the window's end cuts matches too, so that no bracket inside it is counted
_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


class _Window:
    """The text of a UTF-8 file from the place that is read next."""

    def __init__(self, stream: BinaryIO, chunk_bytes: int) -> None:
        self.text = ""
        self.place = 0
        # whether the text reaches the end of the file
        self.ended = False
        self.line = 1  # of the place
        self.read_bytes = 0
        self._dropped_characters = 0  # of the text's first line
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def position(self, place: int) -> tuple[int, int]:
        """Return the line and the column, from 1, of a place at or after the current one."""
        line = self.line + self.text.count("\n", self.place, place)
        line_break = self.text.rfind("\n", 0, place)
        dropped = self._dropped_characters if line_break < 0 else 0
        return line, dropped + place - line_break

    def move(self, place: int) -> None:
        """Make a later place the current one."""
        self.line += self.text.count("\n", self.place, place)
        self.place = place

    def skip(self, characters: re.Pattern[str]) -> None:
        """Move over all characters that match, up to the end of the file."""
        while True:
            match = characters.match(self.text, self.place)
            self.move(match.end() if match else self.place)
            if self.place < len(self.text) or self.ended:
                return
            self.read_more()

    def read_more(self) -> None:
        """Drop the text before the place, and append a chunk.

        The chunk is at least as long as the text that is kept, so that a long element is decoded
        anew only each time that its text has doubled. Raises UnicodeDecodeError.
        """
        self._dropped_characters = self.position(self.place)[1] - 1
        kept = self.text[self.place :]
        chunk = self._stream.read(max(self._chunk_bytes, len(kept)))
        self.read_bytes += len(chunk)
        self.ended = not chunk
        self.text = kept + self._decoder.decode(chunk, final=self.ended)
        self.place = 0


def read_array(
    file: Path, stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[str, Any]]:
    """Yield ("file:line", element or BadRecordError) for every element of a JSON array.

    Elements that share a line are numbered. At most some chunks, or the longest element, are in
    memory. Raises UserError for a broken array, after the elements before the break.
    """
    window = _Window(stream, chunk_bytes)
    last_line = number = 0
    try:
        window.skip(_BEFORE_ARRAY)
        window.move(window.place + 1)
        while True:
            window.skip(_BETWEEN_ELEMENTS)
            if window.text[window.place : window.place + 1] == "]":
                break
            line = window.line
            record = _read_element(window)
            number += 1
            yield f"{file}:{line}" + (f", record {number}" if line == last_line else ""), record
            last_line = line
        window.move(window.place + 1)
        window.skip(_BLANKS)
        if window.place < len(window.text):
            message = "text after the end of the array"
            raise json.JSONDecodeError(message, window.text, window.place)
    except UnicodeDecodeError as error:
        # the decoder's bytes are the last ones that were read
        byte = window.read_bytes - len(error.object) + error.start
        raise UserError(
            f"{file} is not UTF-8 at byte {byte}; expected a JSON array in UTF-8. {CONVERT}"
        ) from error
    except json.JSONDecodeError as error:
        line, column = window.position(error.pos)
        raise UserError(
            f"{file}:{line}: broken JSON array: {error.msg} (column {column}). "
            f"Fix the file, or write one object per line (.jsonl), so that bad ones can be skipped"
        ) from error


def _read_element(window: _Window) -> Any:
    """Return the element at the window's place, or a BadRecordError, and move to its end."""
    while True:
        try:
            element, end = _decode_element(window.text, window.place)
        except json.JSONDecodeError as error:
            is_cut = len(window.text) - error.pos <= _NEAR_END or error.msg.startswith(_UNENDED)
            if window.ended or not is_cut:
                raise
        else:
            # a number near the window's end may have further digits
            if window.ended or len(window.text) - end > _NEAR_END:
                window.move(end)
                return element
        window.read_more()


def _decode_element(text: str, place: int) -> tuple[Any, int]:
    """Return the value that begins at a place, or a BadRecordError, and its end."""
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        reason = TOO_DEEP
    except ValueError:
        reason = TOO_MANY_DIGITS
    return BadRecordError(reason), _find_value_end(text, place)


def _find_value_end(text: str, place: int) -> int:
    """Return the end of the array or object at a place, ignoring brackets inside strings."""
    depth = 0
    for match in _TEXT_OR_BRACKET.finditer(text, place) if text[place] in "[{" else ():
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    raise json.JSONDecodeError(_NO_END, text, place)
