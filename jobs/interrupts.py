"""Signals that end a job: SIGINT and SIGTERM, from the first import on, in words and with one exit
status.

Nothing heavy is imported here: the packages of the jobs call `end_imports_quietly` before they
import anything else.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # exit status of a job that a signal stopped


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def end_imports_quietly() -> None:
    """Let a signal during the imports of `python -m <job>` end the process with a line instead of a
    traceback.

    Without effect where the package is imported by anything else: while Python looks for the module
    that it is to run, and imports its package, sys.argv[0] is "-m".
    """
    if sys.argv[:1] != ["-m"]:
        return
    # else whoever started us wants it ignored
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(
        2, f"interrupted by {signal.Signals(number).name} before anything was begun\n".encode()
    )
    os._exit(INTERRUPTED)


@contextmanager
def raise_on_signals(by_sigterm: bool = True) -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt inside the block, SIGTERM raises Terminated;
    by_sigterm=False: it ends the process.
    """
    usual: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    before = {number: signal.getsignal(number) for number in usual}
    before = {
        number: usual[number] if handler is _end else handler for number, handler in before.items()
    }
    signal.signal(signal.SIGINT, before[signal.SIGINT])
    signal.signal(signal.SIGTERM, _interrupt if by_sigterm else signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


class Interrupted(Exception):
    """SIGINT or SIGTERM came; a checkpoint was written and the same command resumes."""
