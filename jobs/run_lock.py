"""One run folder, one command: a lock file that names its owner, and goes when the owner ends.

The owner holds the file's `flock` as long as it lives, and so do the ranks and stages that it
starts. The kernel drops that lock with the last of them, so a file that SIGKILL left behind is
taken over. What the file says decides where locks do not reach from host to host (some network file
systems) or do not exist: an owner on another host is never judged dead.
"""

import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from jobs import ranks

LOCK = ".lock"
CONFIG = "config.yaml"  # what marks a folder as a run's
_PARTIAL = ".partial"
_SHOWN = 200  # characters of a path that a message quotes
_HELD = "SHALLOW_DRAFT_HELD"  # folders that this process, or what started it, holds
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system without flock


class RunLock:
    """A run folder that this process holds until the object is dropped or the process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError naming the process that holds the folder."""
        path = folder / LOCK
        self.descriptor = _acquire(path)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(_describe_self(), indent=1).encode(), 0)
        os.environ[_HELD] = os.pathsep.join([*_held_folders(), str(folder)])
        weakref.finalize(self, _release, path, self.descriptor, os.getpid())


_locks: "weakref.WeakValueDictionary[Path, RunLock]" = weakref.WeakValueDictionary()


def hold(folder: Path) -> RunLock | None:
    """Make a run folder and lock it; what a run that was killed left half written there is deleted.

    None on other ranks than the first, and where what started this process (a launcher, an
    experiment) holds the folder for it. Raises UserError for a folder that cannot be, and naming
    process, host and time where another command works in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(
            f"output_dir={folder} is no folder: {error.filename} is a file. Give another "
            f"output_dir="
        ) from error
    except OSError as error:  # such as a name too long, or a folder that may not be written
        name = str(folder)
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        raise UserError(
            f"output_dir={shown} cannot be made: {error.strerror}. Give another output_dir="
        ) from error
    folder = folder.resolve()
    if ranks.rank() > 0 or str(folder) in _held_folders():
        return _locks.get(folder)
    lock = RunLock(folder)
    _locks[folder] = lock
    remove_partials(folder)
    return lock


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a run folder inside the block, as `hold` does."""
    lock = hold(folder)
    yield
    del lock


def remove_partials(root: Path) -> None:
    """Delete what is half written in a run folder; folders of other runs inside of it are left
    alone.
    """
    for folder, inner, files in os.walk(root):
        for name in [name for name in inner if name.endswith(_PARTIAL)]:
            shutil.rmtree(Path(folder, name))
        for name in files:
            if name.endswith(_PARTIAL):
                Path(folder, name).unlink()
        inner[:] = [
            name
            for name in inner
            if not name.endswith(_PARTIAL) and not Path(folder, name, CONFIG).exists()
        ]


def held_descriptors() -> list[int]:
    """Open files that a child process inherits, so that the folders stay locked as long
    as it runs.
    """
    return [lock.descriptor for lock in _locks.values()]


def _held_folders() -> list[str]:
    return [folder for folder in os.environ.get(_HELD, "").split(os.pathsep) if folder]


def _acquire(path: Path) -> int:
    """An open lock file that is ours. Raises UserError where it is another's."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(
                f"output_dir={path.parent} cannot be written: {error}. Give another output_dir="
            ) from error
        try:
            free = _flock(descriptor)
            owner = _owner(descriptor)
            if not free or _may_be_running(owner):
                raise _in_use(path, owner)
            # The owner before may have removed the file between our opening and our locking it.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _flock(descriptor: int) -> bool:
    """Whether the file's lock is ours now, or its file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _describe_self() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": _started(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
    }


def _owner(descriptor: int) -> dict[str, Any]:
    """Who the file names; empty for one that is new, or was never written whole."""
    try:
        owner = json.loads(os.pread(descriptor, 2**16, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else {}


def _may_be_running(owner: dict[str, Any]) -> bool:
    """Whether the owner runs. A process of another host may; a number that another process has now
    does not count.
    """
    if not owner:
        return False
    if owner.get("host") != socket.gethostname():
        return True
    started = _started(owner["pid"])
    return bool(started) and started == owner.get("process_started")


def _started(pid: int) -> str:
    """When a process of this host began, as the system counts it; empty where there is no such
    process.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # behind the name, which may hold blanks
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return "" if fields[0] == "Z" else fields[19]
    return subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()


def _in_use(path: Path, owner: dict[str, Any]) -> UserError:
    if not owner:
        return UserError(
            f"{path.parent} is in use by a process that is just starting. Wait for it, or give "
            f"another output_dir="
        )
    host, pid = owner.get("host"), owner["pid"]
    who = f"process {pid} on {host}, since {owner.get('since')} ({owner.get('command')})"
    if host != socket.gethostname():
        return UserError(
            f"{path.parent} is in use by {who}. Wait until it ends, or give another output_dir=. "
            f"Whether it still runs cannot be seen from this host: if it does not, delete {path} "
            f"and run again"
        )
    if not _may_be_running(owner):
        return UserError(
            f"{path.parent} is in use: {who} has ended, but a process that it started still runs. "
            f"End that one, or wait for it"
        )
    return UserError(
        f"{path.parent} is in use by {who}. Wait until it ends, or give another output_dir="
    )


def _release(path: Path, descriptor: int, pid: int) -> None:
    if os.getpid() != pid:  # a fork of the owner
        return
    path.unlink(missing_ok=True)
    os.close(descriptor)
    os.environ[_HELD] = os.pathsep.join(
        folder for folder in _held_folders() if folder != str(path.parent)
    )
