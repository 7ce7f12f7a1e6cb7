"""Run one program under limits: `python -I -S sandbox.py`, started by eval.tasks.execution.

It reads {"source", "token", "seconds", "megabytes"} from stdin, and writes the token to stdout if
the program ended without an error. The program has no stdin, stdout or stderr, an empty environment
and an empty working folder. It may not open sockets, start processes, load native libraries, or
read and write files outside of its folder and Python's library. This stops mistakes of a model. It
is no wall against code that was written to escape: for that, run the job in a container.

This module imports only Python's library, as it runs without the project.
"""

import json
import os
import resource
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType
from typing import Any

MEGABYTE = 2**20
FILE_BYTES = MEGABYTE  # the largest file that a program may write
OPEN_FILES = 32
REFUSED = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "shutil.", "mmap.", "syslog.", "webbrowser."),
    *("os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.startfile", "os.kill"),
    *("os.chown", "os.chmod", "os.chflags", "os.link", "os.symlink", "os.rename", "os.remove"),
    *("os.rmdir", "os.truncate", "os.chdir", "os.fchdir", "os.putenv", "os.setxattr", "os.mkdir"),
    *("ftplib.", "http.client.", "imaplib.", "smtplib.", "telnetlib.", "urllib.Request"),
    *("signal.pthread_kill", "sys.setprofile", "sys.settrace", "gc.get_objects", "cpython._PySys"),
)


def main() -> None:
    """Limit this process, run the program, and write the token if it ended without an error."""
    given = json.load(sys.stdin)
    code = compile(given["source"], "<answer>", "exec")
    report = os.dup(sys.stdout.fileno())
    _close_streams()
    limit(given["seconds"], given["megabytes"])
    sys.addaudithook(_guard(os.getcwd()))
    run(code)
    os.write(report, given["token"].encode())


def run(code: CodeType) -> None:
    """Run a program as a module of its own, not as the main one. Its errors end this process."""
    exec(code, {"__name__": "answer"})


def limit(seconds: int, megabytes: int) -> None:
    """Limit this process's processor time, memory, files and processes."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, megabytes * MEGABYTE),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _close_streams() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


def _guard(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook (PEP 578) that refuses what a program has no need of."""
    home = os.path.realpath(folder) + os.sep
    library = tuple(
        os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
    )
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is refused")
        if event in ("open", "os.listdir", "os.scandir"):
            name = arguments[0] if arguments else None
            if not isinstance(name, str | bytes | os.PathLike):
                return  # a descriptor that is open already
            path = os.path.realpath(os.fsdecode(name)) + os.sep
            flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
            readable = path.startswith(library) and not flags & writing
            if not readable and not path.startswith(home):
                raise PermissionError(f"{path} is outside of the program's folder")

    return hook


if __name__ == "__main__":
    main()
