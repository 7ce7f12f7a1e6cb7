"""Locks of run folders: a second command is refused, and the lock of a dead owner is taken over."""

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
from jobs.run_lock import CONFIG, LOCK, hold, lock_folder


def run_in_fork(action: Callable[[], object]) -> int:
    """Run `action` in a forked process that holds none of this process's locks.

    The process then waits until it is killed. Returns its id. `action` must not return None.
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
    """Kill a child process and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextmanager
def hold_in_another_process(folder: Path) -> Iterator[int]:
    """Hold a folder in another process, yield its id, and kill it at the end of the block."""
    pid = run_in_fork(lambda: hold(folder))
    try:
        yield pid
    finally:
        kill(pid)


def test_a_second_command_is_refused_until_the_first_is_killed(tmp_path: Path):
    with hold_in_another_process(tmp_path) as pid, pytest.raises(UserError) as error:
        RunFolder(JobConfig(job="a.b", output_dir=str(tmp_path)))
    owner = json.loads((tmp_path / LOCK).read_text())
    words = (
        f"{tmp_path} is in use by process {pid} on {socket.gethostname()}, since {owner['since']}"
    )
    assert words in str(error.value) and "set another output_dir=" in str(error.value)
    assert owner["pid"] == pid, "SIGKILL leaves the file"
    lock = hold(tmp_path)
    assert lock is not None and json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_rank_of_a_killed_command_keeps_the_lock(tmp_path: Path):
    """Check that a folder stays locked while a rank of its killed owner still runs.

    Ranks run for a while after their launcher was killed.
    """
    ready, done = os.pipe()

    def start_a_rank() -> object:
        lock = hold(tmp_path)
        if (rank := os.fork()) == 0:
            signal.pause()
        os.write(done, f"{rank}\n".encode())
        return lock

    owner = run_in_fork(start_a_rank)
    rank = int(os.read(ready, 20))
    kill(owner)
    words = rf"process {owner} .*has ended, but a process that it started still runs.*fuser"
    with pytest.raises(UserError, match=words):
        hold(tmp_path)
    os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            lock = hold(tmp_path)
        except UserError:  # the kernel has not ended the rank yet
            time.sleep(0.01)
            continue
        assert lock is not None
        return
    raise AssertionError("the folder stayed locked")


def lock_content(host: str, pid: int, started: str) -> str:
    """Return the text of a lock file."""
    return json.dumps(
        {
            "host": host,
            "pid": pid,
            "process_started": started,
            "since": "long ago",
            "command": "train",
        }
    )


HERE, STARTED = socket.gethostname(), run_lock._started(os.getpid())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            lock_content("elsewhere", 1, "1"),
            r"in use by process 1 on elsewhere, since long ago .*delete .*\.lock and run again",
        ),
        (lock_content(HERE, os.getpid(), STARTED), r"in use by process"),
        (lock_content(HERE, os.getpid(), "another time"), ""),  # another process reuses its id
        (lock_content(HERE, 2**22 + 1, "1"), ""),  # no such process
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
def test_the_owner_in_the_lock_file_decides_without_flock(
    content: str, words: str, locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that the owner in the lock file decides if no process holds the file lock.

    A file lock may not be visible from another host, and the file system may have none
    (locks=False). words: the expected error, or "" if the folder is free.
    """

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


def test_the_lock_is_released_with_its_block_and_its_owner(tmp_path: Path):
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


def test_ranks_and_stages_share_the_lock_of_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with hold_in_another_process(tmp_path) as pid:
        assert pid
        monkeypatch.setenv("RANK", "1")
        assert hold(tmp_path) is None, "the first rank holds the lock for all"
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(UserError, match="in use"):
            hold(tmp_path)
        monkeypatch.setenv(
            "SHALLOW_DRAFT_HELD", os.pathsep.join(["/another", str(tmp_path.resolve())])
        )
        assert hold(tmp_path) is None
        assert RunFolder(JobConfig(job="a.b", output_dir=str(tmp_path))).path == tmp_path


def test_half_written_files_of_a_killed_run_are_deleted(
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
    with hold_in_another_process(tmp_path), pytest.raises(UserError):
        hold(tmp_path)
    for file in left:
        assert not file.exists(), "the other process deleted it before it held the folder"
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    with lock_folder(tmp_path):
        assert (
            not any(file.exists() for file in left) and not (mine / ".step_000003.partial").exists()
        )
        assert all(file.exists() for file in others)


def test_a_name_that_is_too_long_is_refused(tmp_path: Path):
    with pytest.raises(
        UserError,
        match=r"^output_dir=.*n\.\.\. cannot be created: File name too long\. Set another",
    ) as error:
        hold(tmp_path / ("n" * 300))
    assert len(str(error.value)) < 400


# ------------------------------------------------------------------ a command that leaves nothing
def configured(folder: Path) -> JobConfig:
    return JobConfig(job="a.b", output_dir=str(folder))


def test_a_folder_with_nothing_but_its_configuration_is_deleted(tmp_path: Path):
    inner = tmp_path / "sweep" / "member"
    folder = RunFolder(configured(inner))
    assert sorted(os.listdir(inner)) == [LOCK, CONFIG]
    del folder
    assert os.listdir(tmp_path) == [], "parents that it created are deleted too"
    (tmp_path / "sweep").mkdir()
    folder = RunFolder(configured(inner))
    (tmp_path / "sweep" / "other").mkdir()
    del folder
    assert os.listdir(tmp_path / "sweep") == ["other"]


def test_files_from_before_and_finished_work_are_kept(tmp_path: Path):
    (tmp_path / "notes").write_text("")
    folder = RunFolder(configured(tmp_path))
    del folder
    assert os.listdir(tmp_path) == ["notes"]
    for name in ("answers.jsonl", "manifest.json"):  # controls: work, and a run that resumes
        run = tmp_path / name.split(".")[0]
        folder = RunFolder(configured(run))
        (run / name).write_text(json.dumps({"job": "a.b"}))
        del folder
        kept = sorted([CONFIG, name])
        assert sorted(os.listdir(run)) == kept
        folder = RunFolder(configured(run))  # is refused the second time
        del folder
        assert sorted(os.listdir(run)) == kept


def test_a_refused_second_command_deletes_nothing(tmp_path: Path):
    run = tmp_path / "run"
    with hold_in_another_process(run):
        with pytest.raises(UserError, match="in use"):
            RunFolder(configured(run))
        assert os.listdir(run) == [LOCK]
    folder = RunFolder(configured(run))  # takes over the lock that SIGKILL left, and deletes it
    del folder
    assert os.listdir(run) == []


def test_a_stage_leaves_the_folder_of_its_experiment_to_it(tmp_path: Path):
    experiment = tmp_path / "experiment"
    with lock_folder(experiment):
        pid = run_in_fork(lambda: RunFolder(configured(experiment / "stage")))
        kill(pid)  # the stage deletes nothing
    assert os.listdir(experiment) == ["stage"]
    with lock_folder(experiment):
        stage = RunFolder(configured(experiment / "stage"))
        del stage
        assert experiment.is_dir()
