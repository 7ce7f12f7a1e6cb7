"""Test folders of mapped arrays: complete or absent, and altered ones are refused."""

import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from decoding.errors import UserError
from training.data.mapped_tensors import ArrayWriter, check_arrays, lock_path, map_arrays

DTYPES = {"tokens": "<i4", "lengths": "<i8", "none": "<i4"}


def write(folder: Path, tokens: int = 1000) -> None:
    with lock_path(folder, "Remedy."), ArrayWriter(folder, DTYPES, "Remedy.") as writer:
        for start in range(0, tokens, 100):
            writer.append("tokens", np.arange(start, start + 100))
        writer.append("lengths", np.asarray([3, 4]))
        writer.finish({"used": 2})


def test_arrays_written_in_pieces_are_mapped_as_one(tmp_path: Path) -> None:
    assert map_arrays(tmp_path / "cache") is None
    write(tmp_path / "cache")
    arrays, metadata = map_arrays(tmp_path / "cache") or ({}, {})
    assert metadata == {"used": 2}
    assert arrays["tokens"].tolist() == list(range(1000))
    assert arrays["lengths"].tolist() == [3, 4] and len(arrays["none"]) == 0
    check_arrays(tmp_path / "cache", "Remedy.")


@pytest.mark.parametrize("damage", ["truncated", "no index", "half an index", "a missing file"])
def test_an_incomplete_folder_counts_as_absent_and_is_replaced(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "cache"
    write(folder)
    if damage == "truncated":
        (folder / "tokens").write_bytes((folder / "tokens").read_bytes()[:-4])
    elif damage == "no index":
        (folder / "index.json").unlink()
    elif damage == "half an index":
        (folder / "index.json").write_text((folder / "index.json").read_text()[:40])
    else:
        (folder / "lengths").unlink()
    assert map_arrays(folder) is None
    write(folder, 200)
    arrays, _ = map_arrays(folder) or ({}, {})
    assert len(arrays["tokens"]) == 200


def test_an_altered_file_of_the_same_size_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "cache")
    content = bytearray((tmp_path / "cache/tokens").read_bytes())
    content[7] ^= 1
    (tmp_path / "cache/tokens").write_bytes(content)
    with pytest.raises(UserError, match=r"tokens was altered after it was written.*Remedy\."):
        check_arrays(tmp_path / "cache", "Remedy.")


def test_a_write_that_the_disk_refuses_leaves_nothing(tmp_path: Path) -> None:
    """Check a failed write with a limit on the size of files, which fails as a full disk does."""
    usual, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, usual[1]))
    try:
        with pytest.raises(UserError, match=r"could not write .*MB are free there.*Remedy\."):
            write(tmp_path / "cache", 10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == [".cache.lock"]


def test_a_folder_that_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    left = ArrayWriter(tmp_path / "cache", DTYPES, "Remedy.").__enter__()
    left.append("tokens", np.arange(10))
    assert map_arrays(tmp_path / "cache") is None
    write(tmp_path / "cache")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache.lock", "cache"]
