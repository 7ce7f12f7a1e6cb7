"""Memory that the C library holds after it was freed.

torch aligns its tensors, and glibc before 2.38 seldom uses a freed aligned block again
(https://sourceware.org/bugzilla/show_bug.cgi?id=14581). Where tensors vary in size, as with the
numbers of supervised tokens of a step, a training grew by 250 MB a step until the system killed it,
and so an evaluation of twenty drafters in batches of eight requests did.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")  # of Linux: pages of this process, those in memory second
# Growth in bytes after which free memory is given back: that takes 0.1 s, and small trainings never
# do it.
GROWTH = 1 << 30


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory, or 0 where there is no /proc."""
    if not _STATM.is_file():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _trim_of_glibc() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`, or None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # the last one on Windows
        return None


class HeapTrimmer:
    """Gives free memory back to the system whenever the process has grown by `growth` bytes."""

    def __init__(self, growth: int = GROWTH, every: int = 1) -> None:
        """every: look at the memory once in so many calls."""
        self.growth, self.every = growth, every
        self._calls = 0
        self._trim = _trim_of_glibc()
        self._floor = resident_bytes()

    def __call__(self) -> None:
        """Give free memory back if it is time; call it between steps."""
        self._calls += 1
        if self._trim is None or self._calls % self.every:
            return
        if resident_bytes() > self._floor + self.growth:
            self._trim(0)
            self._floor = resident_bytes()
