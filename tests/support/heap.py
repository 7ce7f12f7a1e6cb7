"""What a process has allocated, exact where its resident memory varies by megabytes."""

import ctypes
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

# what a request may keep
MOST_BYTES = 512  # in pieces of more than 512 bytes, which malloc gives
MOST_BLOCKS = 8  # smaller pieces, which Python gives


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2 (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Heap(NamedTuple):
    """Bytes that malloc has given, and the number of blocks that Python has given."""

    bytes: int
    blocks: int


def read_heap() -> Heap:
    """Read the state of the heap; it needs glibc 2.33 or newer."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _MallInfo
    found = read()
    return Heap(found.uordblks + found.hblkhd, sys.getallocatedblocks())


def check_flat(heaps: Sequence[Heap], requests: int) -> None:
    """Check what a request keeps, from the heap after each of 20 parts of `requests` requests.

    The medians of the parts 6 to 10 and 16 to 20 are compared, which are 10 parts apart.
    """
    early, late = (
        Heap(*map(statistics.median, zip(*heaps[part], strict=True)))
        for part in (slice(5, 10), slice(15, 20))
    )
    kept = [(after - before) / (10 * requests) for before, after in zip(early, late, strict=True)]
    assert kept[0] < MOST_BYTES and kept[1] < MOST_BLOCKS, (
        f"a request keeps {kept[0]:.0f} bytes of malloc and {kept[1]:.1f} blocks of Python"
    )
