"""Two commands in one run folder: the second is refused by name, a dead owner's lock is taken over,
and nothing else is.
"""

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from decoding.errors import UserError
from jobs import run_lock
from jobs.config import JobConfig
from jobs.run_folder import RunFolder
from jobs.run_lock import LOCK, hold, lock_folder


def forked(action: Callable[[], object]) -> int:
    """A process that knows nothing of our locks, runs `action` and then waits; returns its number
    when `action` has ended.
    """
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for lock in run_lock.held_descriptors():
                os.close(lock)
            run_lock._locks.clear()
            os.environ.pop("SHALLOW_DRAFT_HELD", None)
            kept = action()
            os.write(done, b"." if kept is not None else b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b".", "the child took the lock"
    os.close(ready)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextmanager
def another_command(folder: Path) -> Iterator[int]:
    """Another process that holds the folder, and is killed in the end."""
    pid = forked(lambda: hold(folder))
    try:
        yield pid
    finally:
        kill(pid)


def test_a_second_command_is_refused_by_name_and_a_killed_one_is_followed(tmp_path: Path):
    with another_command(tmp_path) as pid, pytest.raises(UserError) as error:
        RunFolder(JobConfig(job="a.b", output_dir=str(tmp_path)))
    owner = json.loads((tmp_path / LOCK).read_text())
    words = (
        f"{tmp_path} is in use by process {pid} on {socket.gethostname()}, since {owner['since']}"
    )
    assert words in str(error.value) and "give another output_dir=" in str(error.value)
    assert owner["pid"] == pid, "SIGKILL left the file"
    lock = hold(tmp_path)
    assert lock is not None and json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_what_a_killed_command_started_still_holds_the_folder(tmp_path: Path):
    """Ranks go on for a while after their launcher was killed."""
    ready, done = os.pipe()

    def start_a_rank() -> object:
        lock = hold(tmp_path)
        if (rank := os.fork()) == 0:
            signal.pause()
        os.write(done, f"{rank}\n".encode())
        return lock

    owner = forked(start_a_rank)
    rank = int(os.read(ready, 20))
    kill(owner)
    with pytest.raises(
        UserError, match=rf"process {owner} .*has ended, but a process that it started still runs"
    ):
        hold(tmp_path)
    os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            lock = hold(tmp_path)
        except UserError:  # the kernel is still taking the rank down
            time.sleep(0.01)
            continue
        assert lock is not None
        return
    raise AssertionError("the folder stayed locked")


def named(host: str, pid: int, started: str) -> str:
    return json.dumps(
        {
            "host": host,
            "pid": pid,
            "process_started": started,
            "since": "long ago",
            "command": "train",
        }
    )


HERE, OURS = socket.gethostname(), run_lock._started(os.getpid())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            named("elsewhere", 1, "1"),
            r"in use by process 1 on elsewhere, since long ago .*delete .*\.lock and run again",
        ),
        (named(HERE, os.getpid(), OURS), r"in use by process"),
        (named(HERE, os.getpid(), "another time"), ""),  # its number is another process's now
        (named(HERE, 2**22 + 1, "1"), ""),  # no such process
        ("", ""),
        ('{"host": "elsewh', ""),
        ("[1, 2]", ""),
        ('{"pid": "one"}', ""),
    ],
    # Workers must collect the same names, and process numbers differ.
    ids=[
        "another host",
        "this process",
        "a reused number",
        "dead",
        "empty",
        "torn",
        "a list",
        "no number",
    ],
)
@pytest.mark.parametrize("locks", [True, False])
def test_what_a_lock_file_says_decides(
    content: str, words: str, locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where locks do not reach another host, and where the file system has none."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refused)
    (tmp_path / LOCK).write_text(content)
    if words:
        with pytest.raises(UserError, match=words):
            hold(tmp_path)
        assert (tmp_path / LOCK).read_text() == content
    else:
        lock = hold(tmp_path)
        assert lock is not None and json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_the_lock_goes_with_its_block_with_an_error_and_with_its_owner(tmp_path: Path):
    with lock_folder(tmp_path):
        assert (tmp_path / LOCK).is_file()
    assert not (tmp_path / LOCK).exists() and str(tmp_path) not in os.environ["SHALLOW_DRAFT_HELD"]
    with pytest.raises(KeyboardInterrupt), lock_folder(tmp_path):
        raise KeyboardInterrupt
    assert not (tmp_path / LOCK).exists()
    folder = RunFolder(JobConfig(job="a.b", output_dir=str(tmp_path)))
    # a job may open its own folder twice
    again = RunFolder(JobConfig(job="a.b", output_dir=str(tmp_path)))
    del folder
    assert (tmp_path / LOCK).is_file()
    del again
    assert not (tmp_path / LOCK).exists()


def test_ranks_and_stages_are_not_locked_out_by_what_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with another_command(tmp_path) as pid:
        assert pid
        monkeypatch.setenv("RANK", "1")
        assert hold(tmp_path) is None, "the first rank holds it for all"
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(UserError, match="in use"):
            hold(tmp_path)
        monkeypatch.setenv(
            "SHALLOW_DRAFT_HELD", os.pathsep.join(["/another", str(tmp_path.resolve())])
        )
        assert hold(tmp_path) is None
        assert RunFolder(JobConfig(job="a.b", output_dir=str(tmp_path))).path == tmp_path


def test_what_a_killed_run_left_half_written_goes_when_it_is_begun_again_and_only_there(
    tmp_path: Path,
):
    inner, mine = tmp_path / "distill.train", tmp_path / "checkpoints"
    left = [
        mine / ".step_000003.partial" / "model.safetensors",
        tmp_path / "records.partial",
        tmp_path / ".x.0.partial",
    ]
    others = [
        inner / ".step_000003.partial" / "model.safetensors",
        tmp_path / "partial",
        mine / "step_000002" / "x",
    ]
    for file in (*left, *others, inner / "config.yaml"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    with another_command(tmp_path), pytest.raises(UserError):
        hold(tmp_path)
    for file in left:
        assert not file.exists(), "the command that held it had begun it again"
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    with lock_folder(tmp_path):
        assert (
            not any(file.exists() for file in left) and not (mine / ".step_000003.partial").exists()
        )
        assert all(file.exists() for file in others)


def test_a_name_too_long_for_the_file_system_is_refused(tmp_path: Path):
    with pytest.raises(
        UserError,
        match=r"^output_dir=.*n\.\.\. cannot be created: File name too long\. Give another",
    ) as error:
        hold(tmp_path / ("n" * 300))
    assert len(str(error.value)) < 400
