"""Handlers of SIGINT and SIGTERM, which end a job with a message and exit status 130.

This module imports only the standard library: the packages of the jobs call `end_imports_quietly`
before any other import.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

REFUSED = 2  # exit status of a job that ended with a UserError
INTERRUPTED = 130  # exit status of a job that a signal stopped


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as an exception."""


def end_imports_quietly() -> None:
    """End the process with one line on a signal during the imports of `python -m <job>`.

    It has no effect on any other import of the package, as sys.argv[0] is "-m" only while Python
    looks for the module to run.
    """
    if sys.argv[:1] != ["-m"]:
        return
    # Another handler shows that the parent process ignores the signal.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, f"interrupted by {signal.Signals(number).name} before the job started\n".encode())
    os._exit(INTERRUPTED)


@contextmanager
def raise_on_signals(by_sigterm: bool = True) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and Terminated on SIGTERM inside the block.

    by_sigterm: whether SIGTERM raises; if False, it ends the process at once.
    """
    usual: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    found = {number: signal.getsignal(number) for number in usual}
    before = {number: usual[number] if found[number] is _end else found[number] for number in usual}
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
    """A job stopped by SIGINT or SIGTERM with its work saved; the same command resumes."""


@contextmanager
def deferred_signals() -> Iterator[threading.Event]:
    """Set the yielded event at the first SIGINT or SIGTERM; a second one acts at once."""
    received = threading.Event()

    def receive(number: int, frame: FrameType | None) -> None:
        received.set()
        signal.signal(number, before[number])

    before: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
