"""Signals that end a job: SIGINT and SIGTERM, with a message and one exit status.

This module imports nothing heavy: the packages of the jobs call `end_imports_quietly` before any
other import.
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
    """SIGTERM, raised as an exception."""


def end_imports_quietly() -> None:
    """End the process with one line on a signal during the imports of `python -m <job>`.

    Has no effect where the package is imported in another way: sys.argv[0] is "-m" only while
    Python looks for the module to run.
    """
    if sys.argv[:1] != ["-m"]:
        return
    # Another handler means that the parent process wants the signal ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, f"interrupted by {signal.Signals(number).name} before the job started\n".encode())
    os._exit(INTERRUPTED)


@contextmanager
def raise_on_signals(by_sigterm: bool = True) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and Terminated on SIGTERM inside the block.

    by_sigterm=False: SIGTERM ends the process.
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
    """SIGINT or SIGTERM after which a checkpoint was written; the same command resumes."""
