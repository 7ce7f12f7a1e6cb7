"""Readers of run folders: a damaged file raises an error with a remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decoding.costs.machine_limits import Limits
from decoding.errors import UserError
from eval.measure.deadline import Deadline
from eval.measure.records import record_from
from eval.statistics.schema import read_rows
from jobs.config import TrackerConfig
from jobs.run_files import journal_line, read_journal_lines, read_object
from jobs.run_folder import read_manifest
from jobs.saved_config import add_stamp, read_config
from jobs.tracker import Tracker
from training import checkpoint

WRONG = {
    "empty": b"",
    "blank": b" \n",
    "zeros": b"\0" * 64,
    "binary": bytes(range(256)),
    "no UTF-8": b'{"a": "\xff"}',
    "torn": b'{"job": "a", "inp',
    "a list": b"[1]",
    "a number": b"7",
    "a text": b'"x"',
    "null": b"null",
    "an object": b"{}",
    "other fields": b'{"what": 1}',
    "other types": b'{"job": 1, "finished": true, "inputs": 3, "hashes": 4, "artefacts": []}',
    "nested": b"[" * 2000,
    "other seconds": b'{"seconds": "x", "longest_block": {}}',
    "a long number": b'{"job": ' + b"9" * 5000 + b"}",
}
# parts of Python's messages for a wrong type, which do not help a user
PYTHON_LEAKS = (
    "has no attribute",
    "__init__",
    "not iterable",
    "not subscriptable",
    "argument after **",
    "NoneType",
)
READERS: dict[str, Callable[[Path], Any]] = {
    "manifest": read_manifest,
    "configuration": lambda path: read_config(path, "Delete it"),
    "results": read_rows,
    "a checkpoint": lambda path: checkpoint.load(path.parent),
    "an object": lambda path: read_object(path, "Delete it", lambda values: values["needed"]),
    "a dataclass": lambda path: read_object(path, "Delete it", lambda values: Limits(**values)),
    "an attribute": lambda path: read_object(
        path, "Delete it", lambda values: values["inputs"].items()
    ),
    "the seconds": lambda path: Deadline(1.0, path.parent),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("reader", READERS)
def test_the_error_for_a_damaged_file_names_it(reader: str, kind: str, tmp_path: Path):
    path = tmp_path / ("seconds.json" if reader == "the seconds" else "state.json")
    path.write_bytes(WRONG[kind])
    with pytest.raises(UserError) as error:
        READERS[reader](path)
    assert str(path) in str(error.value)
    assert any(way in str(error.value) for way in ("Delete", "Evaluate again"))
    assert not any(leak in str(error.value) for leak in PYTHON_LEAKS)


@pytest.mark.parametrize("kind", WRONG)
def test_a_damaged_line_of_a_journal_is_skipped(kind: str, tmp_path: Path):
    path = tmp_path / "records.jsonl"
    line = WRONG[kind].replace(b"\n", b"")
    path.write_bytes(
        journal_line({"a": 1}) + line + b"\n" + journal_line({"a": 2}) + b'{"a": 3, "torn'
    )
    found = read_journal_lines(path, lambda values: values["a"])
    assert (
        found.records == [1, 2]
        and found.content == journal_line({"a": 1}) + journal_line({"a": 2})
        and found.torn == 14
    )
    assert [words.partition(":")[0] for words in found.wrong] == (
        ["line 2"] if line.strip() else []
    )
    path.write_bytes(line + b"\n")
    assert read_journal_lines(path, record_from).records == []


@pytest.mark.parametrize("kind", WRONG)
def test_a_damaged_record_of_training_is_an_error_unless_it_is_the_last(kind: str, tmp_path: Path):
    line = WRONG[kind].replace(b"\n", b"").replace(b"\r", b"")
    path = tmp_path / "metrics.jsonl"
    first, third = b'{"step": 1, "loss": 2.0}\n', b'{"step": 3, "loss": 1.0}\n'
    path.write_bytes(first + line)
    tracker = Tracker(tmp_path, TrackerConfig(), "run", {})
    tracker.rewind(5)
    assert path.read_bytes() == first
    path.write_bytes(first + line + b"\n" + third)
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged: line 2: .*Remove this line"):
        tracker.rewind(5)
    tracker.close()


def test_every_flipped_bit_and_truncation_of_a_configuration_is_found(tmp_path: Path):
    path = tmp_path / "config.yaml"
    complete = add_stamp("job: a.b\noutput_dir: runs/x\nseed: 3\n").encode()
    path.write_bytes(complete)
    assert read_config(path, "") == {"job": "a.b", "output_dir": "runs/x", "seed": 3}
    first = complete.index(b"\n") + 1
    for place in range(8 * first, 8 * len(complete)):
        changed = bytearray(complete)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(UserError, match="config.yaml is damaged"):
            read_config(path, "")
    for size in range(1, len(complete) - 1):
        path.write_bytes(complete[:size])
        with pytest.raises(UserError, match="config.yaml is damaged"):
            read_config(path, "")


def test_a_checkpoint_with_a_changed_state_is_refused(tmp_path: Path):
    """Check that a state.json that does not match its checksum is refused.

    A checkpoint of an earlier version, without a checksum, is read.
    """
    folder = checkpoint.save(
        tmp_path / "step_000001", {"step": 1, "data": {"rows": {3: 4}}}, {}, {}, {}
    )
    assert checkpoint.load(folder).state == {"step": 1, "data": {"rows": {"3": 4}}}
    file = folder / checkpoint.STATE
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "step": 2}))
    with pytest.raises(
        UserError, match=r"state.json is damaged: its values have changed since it was written"
    ):
        checkpoint.load(folder)
    del values["checksum"]
    file.write_text(json.dumps(values))
    assert checkpoint.load(folder).state["step"] == 1
