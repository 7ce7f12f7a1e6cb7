"""Malloc settings for CPU runs, made from inside the process, and pauses of Python's collector.

By default glibc maps and unmaps every large tensor, and a CPU training step can spend most of its
time in page faults: with these settings a bfloat16 step of a 24 M model ran 8x faster on two cores.
They equal the environment variables MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_.
Benchmarks apply them to both sides.
"""

import ctypes
import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_memory() -> bool:
    """Make glibc's malloc keep freed memory and never map single tensors.

    Returns whether it did; False if the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 10**9), (_M_ARENA_MAX, 1))
    return all(status == 1 for status in [libc.mallopt(name, value) for name, value in settings])


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause Python's cyclic garbage collector in a block or, as a decorator, in a function.

    It searches all objects again and again while a million records are made, which have no cycles.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
