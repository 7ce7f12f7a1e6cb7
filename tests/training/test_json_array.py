"""Test JSON arrays read in windows: records, places and errors are those of the whole text."""

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from training.data.counts import BadRecordError
from training.data.json_array import read_array
from training.data.records import read_records

FILE = Path("chats.json")
WINDOWS = (1, 2, 3, 5, 7, 16, 64, 2**20)
ELEMENTS = [
    {"a": 'quotes " and \\ and [brackets]}', "é😀\u2028": ["\n\t", "\\u0041", ""]},
    -25000000000.5,
    -1.5e-10,
    12345678901234567890,
    True,
    None,
    float("inf"),
    [],
    [[{}], {"": {"b": [1, 2.25, "]"]}}],
    "half a character: \ud83d",
]
TRICKY = {
    "compact": json.dumps(ELEMENTS, separators=(",", ":")),
    "indented": json.dumps(ELEMENTS, indent=30),
    "not ASCII": json.dumps(ELEMENTS[:-1], ensure_ascii=False),
    "byte order mark": "\ufeff" + json.dumps(ELEMENTS),
    "Windows": json.dumps(ELEMENTS, indent=1).replace("\n", "\r\n"),
    "spaces around": "\n\n  " + json.dumps(ELEMENTS) + "  \n",
    "empty": " [ ] ",
}
BROKEN = {
    "cut in a text": '[\n{"a": "b"},\n{"a": "bc',
    "cut after an element": '[{"a": "b"},\n1.5',
    "cut after a comma": "[1,\n2,",
    "a missing quote": '[1,\n{"a: 2},\n{"a": 3}]',
    "a wrong word": "[1,\nture, 2, 3, 4, 5, 6, 7, 8]",
    "text after the end": "[1]\n\n{}",
    "too deep and cut": "[1,\n" + "[" * 100_000 + '"]]',
}


def read(content: str | bytes, chunk_bytes: int) -> list[tuple[str, Any]]:
    stream = io.BytesIO(content if isinstance(content, bytes) else content.encode())
    return list(read_array(FILE, stream, chunk_bytes))


def error_of(content: str | bytes, chunk_bytes: int) -> str:
    with pytest.raises(UserError) as error:
        read(content, chunk_bytes)
    return str(error.value)


@pytest.mark.parametrize("chunk_bytes", WINDOWS)
@pytest.mark.parametrize("name", TRICKY)
def test_elements_are_those_of_the_whole_text(name: str, chunk_bytes: int) -> None:
    text = TRICKY[name]
    found = read(text, chunk_bytes)
    assert [element for _, element in found] == json.loads(text.removeprefix("\ufeff"))
    assert found == read(text, 2**20)


@pytest.mark.parametrize("chunk_bytes", WINDOWS)
def test_places_are_lines_and_numbers(chunk_bytes: int) -> None:
    found = read('\n[{"a":\n1}, 2,\n\n"x", [\n]]', chunk_bytes)
    assert [place.removeprefix(f"{FILE}:") for place, _ in found] == ["2", "3", "5", "5, record 4"]


@pytest.mark.parametrize("chunk_bytes", WINDOWS)
def test_commas_may_trail_or_lack(chunk_bytes: int) -> None:
    assert [element for _, element in read("[1,,2 3,]", chunk_bytes)] == [1, 2, 3]


@pytest.mark.parametrize("chunk_bytes", WINDOWS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_array_has_the_error_of_the_whole_text(name: str, chunk_bytes: int) -> None:
    text = BROKEN[name]
    message = error_of(text, chunk_bytes)
    assert message == error_of(text, 2**20)
    line = text.count("\n") + 1 if name not in ("a missing quote", "cut after a comma") else 2
    assert message.startswith(f"{FILE}:{line}: broken JSON array: ")


def test_every_cut_of_an_array_is_an_error() -> None:
    text = json.dumps(ELEMENTS, indent=1)
    for end in range(1, len(text)):
        assert error_of(text[:end], 5) == error_of(text[:end], 2**20)


@pytest.mark.parametrize("chunk_bytes", WINDOWS)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_an_invalid_byte_is_named(mark: bytes, chunk_bytes: int) -> None:
    content = mark + '["é", "'.encode()
    named = f"{FILE} is not UTF-8 at byte {len(content)};"
    assert error_of(content + b'\xff"]', chunk_bytes).startswith(named)
    assert error_of(content + b"\xc3", chunk_bytes).startswith(named)


@pytest.mark.parametrize("chunk_bytes", WINDOWS)
def test_an_element_that_cannot_be_decoded_is_a_bad_record(chunk_bytes: int) -> None:
    deep = "[" * 2000 + '"]"' + "]" * 2000
    many_digits = '{"a": ' + "1" * 5000 + "}"
    found = read(f"[1, {deep}, {many_digits}, 2]", chunk_bytes)
    elements = [element for _, element in found]
    assert elements[0] == 1 and elements[3] == 2
    for element, reason in zip(elements[1:3], ("too deeply", "too many digits"), strict=True):
        assert isinstance(element, BadRecordError) and reason in str(element)


class CountingStream(io.BytesIO):
    """Bytes that count how often they were read."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        return super().read(size)


def test_a_long_element_is_decoded_anew_only_when_the_text_has_doubled() -> None:
    stream = CountingStream(json.dumps([{"a": "x" * 2**20}]).encode())
    assert len(list(read_array(FILE, stream, 2**10))) == 1
    assert stream.reads < 20


def test_what_follows_a_break_is_not_read() -> None:
    stream = io.BytesIO(b"[1, {2}," + b" " * 2**20)
    with pytest.raises(UserError, match="broken JSON array"):
        list(read_array(FILE, stream, 2**10))
    assert stream.tell() <= 2**12


def peak_of_reading(file: Path) -> int:
    tracemalloc.start()
    try:
        assert all(isinstance(record, dict) for _, record in read_records(file))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    file, record = tmp_path / "chats.json", json.dumps({"text": "x" * 2000})
    peaks = []
    for number in (4_000, 16_000):
        file.write_text("[" + ",\n".join([record] * number) + "]")
        peaks.append(peak_of_reading(file))
    assert peaks[1] < 1.1 * peaks[0] < 8e6 < file.stat().st_size / 2
