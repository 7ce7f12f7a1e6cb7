"""Lock of a run folder: only one command at a time uses it.

A lock file names its owner, a process that deletes the file when it ends. The owner and the ranks
and stages that it starts hold the file's `flock`. The kernel releases the lock when the last of
them ends, so the next command can take over a file that SIGKILL left behind. Some network file
systems have no locks, or none across hosts. There the content of the file decides, and an owner on
another host is assumed to run.

A command that leaves nothing but its configuration and its choice of threads, as one does whose
input is refused, deletes them when it ends, with the folders that it created.
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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from decoding.errors import UserError, without_stop
from jobs import ranks

LOCK = ".lock"
CONFIG = "config.yaml"  # marks a run folder
MANIFEST = "manifest.json"  # ties it to the configuration
THREADS = "threads_{rank}.json"  # a rank's choice under threads=auto
_PARTIAL = ".partial"
_QUOTED = 200  # characters of a path in a message
_HELD = "SHALLOW_DRAFT_HELD"  # folders that this process or its parents hold
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without flock


class RunLock:
    """Lock that this process holds on a run folder until the object or the process ends."""

    def __init__(self, folder: Path, created: Sequence[Path] = ()) -> None:
        """Take the lock. Raises UserError, which names the owner, if another process holds it.

        created: the folder and its parents that did not exist, innermost first.
        """
        path = folder / LOCK
        self.descriptor = _acquire(path)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(_describe_self(), indent=1).encode(), 0)
        os.environ[_HELD] = os.pathsep.join([*_held_folders(), str(folder)])
        remove_partials(folder)
        found = frozenset(each.name for each in folder.iterdir())
        weakref.finalize(self, _release, path, self.descriptor, os.getpid(), found, created)


_locks: "weakref.WeakValueDictionary[Path, RunLock]" = weakref.WeakValueDictionary()


def hold(folder: Path) -> RunLock | None:
    """Create and lock a run folder, and delete half-written files of a killed run.

    If this process already holds the folder, its lock is returned. Returns None on all ranks but
    the first, and if the parent process (a launcher, an experiment) holds the folder. Raises
    UserError for a folder that cannot be created, and for one that another command uses, with its
    process, host and start time.
    """
    created = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(
            f"output_dir={folder} is not a folder: {error.filename} is a file. Set another "
            f"output_dir="
        ) from error
    except OSError as error:  # such as a name that is too long, or a read-only folder
        name = str(folder)
        name = name if len(name) <= _QUOTED else f"{name[:_QUOTED]}..."
        raise UserError(
            f"output_dir={name} cannot be created: {error.strerror}. Set another output_dir="
        ) from error
    created = [each.resolve() for each in created]
    folder = folder.resolve()
    if ranks.rank() > 0 or str(folder) in _held_folders():
        return _locks.get(folder)
    lock = RunLock(folder, created)
    _locks[folder] = lock
    return lock


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a run folder inside the block, as `hold` does."""
    lock = hold(folder)
    yield
    del lock


def remove_partials(root: Path) -> None:
    """Delete half-written files and folders of a run, but none in other run folders inside it."""
    for path in [*root.iterdir()]:
        if path.name.endswith(_PARTIAL):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif path.is_dir() and not path.is_symlink() and not (path / CONFIG).exists():
            remove_partials(path)


def held_descriptors() -> list[int]:
    """Return the file descriptors that a child inherits to keep the folders locked."""
    return [lock.descriptor for lock in _locks.values()]


def _held_folders() -> list[str]:
    return [folder for folder in os.environ.get(_HELD, "").split(os.pathsep) if folder]


def _acquire(path: Path) -> int:
    """Open and lock the lock file, and return its descriptor. Raises UserError if it is in use."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno == errno.ENOENT and not path.parent.exists():
                path.parent.mkdir(parents=True)  # its last owner has just deleted it
                continue
            raise UserError(
                f"output_dir={path.parent} cannot be written: {without_stop(error)}. Set "
                f"another output_dir="
            ) from error
        try:
            free = _flock(descriptor)
            owner = _owner(descriptor)
            if not free or _may_be_running(owner):
                raise _in_use(path, owner)
            # The previous owner may have removed the file after it was opened here.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _flock(descriptor: int) -> bool:
    """Lock an open file. Returns False if another process holds the lock.

    Returns True if the file is now locked, and also if its file system has no locks.
    """
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
    """Return the owner that a lock file names; empty for a new or incomplete file."""
    try:
        owner = json.loads(os.pread(descriptor, 2**16, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else {}


def _may_be_running(owner: dict[str, Any]) -> bool:
    """Return whether the owner may still run; an owner on another host always may.

    The start time shows whether another process now has the owner's process id.
    """
    if not owner:
        return False
    if owner.get("host") != socket.gethostname():
        return True
    started = _started(owner["pid"])
    return bool(started) and started == owner.get("process_started")


def _started(pid: int) -> str:
    """Return the start time of a process on this host; empty if there is no such process."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The fields follow the name, which may contain spaces.
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return "" if fields[0] == "Z" else fields[19]
    return subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()


def _in_use(path: Path, owner: dict[str, Any]) -> UserError:
    host, since, command = owner.get("host"), owner.get("since"), owner.get("command")
    who = f"process {owner.get('pid')} on {host}, since {since} ({command})"
    if owner and not _may_be_running(owner):
        return UserError(
            f"{path.parent} is in use: {who} has ended, but a process that it started still runs. "
            f"Wait until that process ends, or find its id with `fuser {path}` and end it"
        )
    hint = ""
    if owner and host != socket.gethostname():
        hint = (
            f". This host cannot check whether that process still runs. If it does not, delete "
            f"{path} and run again"
        )
    return UserError(
        f"{path.parent} is in use by {who if owner else 'a process that is just starting'}. Wait "
        f"until it ends, or set another output_dir={hint}"
    )


def _release(
    path: Path, descriptor: int, pid: int, found: Collection[str], created: Sequence[Path]
) -> None:
    """Release the lock, and delete what its owner leaves if that decides nothing.

    That is a configuration, with or without the numbers of threads that ranks chose.

    found: names in the folder before the owner wrote. created: see `RunLock`.
    """
    if os.getpid() != pid:  # in a fork of the owner
        return
    with suppress(FileNotFoundError):  # the folder was moved or deleted
        left = {each.name for each in path.parent.iterdir()}
        new = left - {LOCK, *found}
        choices = {each for each in new if fnmatch(each, THREADS.format(rank="*"))}
        if new - choices == {CONFIG} and MANIFEST not in left:
            for name in new:
                (path.parent / name).unlink()
    path.unlink(missing_ok=True)
    os.close(descriptor)
    with suppress(OSError):  # the first folder that is not empty ends it
        for folder in created:
            folder.rmdir()
    os.environ[_HELD] = os.pathsep.join(
        folder for folder in _held_folders() if folder != str(path.parent)
    )
