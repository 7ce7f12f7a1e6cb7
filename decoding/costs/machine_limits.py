"""Measured limits of the machine: the speed of plain memory reads and of a matrix product.

The bytes and operations of a forward (decoding/costs/roofline.py) are compared with these limits.
Each measurement reports its fastest round, since other processes can only slow a round down.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from decoding import devices

# the text for a share above 1, which is impossible
SLOW_YARDSTICK = "yardstick read slowly: not valid"
MOST_BYTES = 1 << 28  # size of a reader: larger than caches, small compared with a large model
SECONDS = 0.5  # for each measurement


@dataclass(frozen=True)
class Limits:
    """The speed of the fastest plain read and matrix product on this machine."""

    bytes_a_second: float
    operations_a_second: float  # a multiplication and an addition count as two


@torch.inference_mode()
def measure_limits(
    size_bytes: int, dtype: torch.dtype, device: str, seconds: float = SECONDS
) -> Limits:
    """Return the machine's limits for a forward that reads `size_bytes` of weights.

    The reader reads as many bytes, at most MOST_BYTES, so that both find them in the processor's
    cache or neither does. seconds: time for each of three measurements (four on CUDA).
    """
    plain = readers(min(size_bytes, MOST_BYTES), dtype, device)
    reading = max(held * _best(action, device, seconds) for action, held in plain.values())
    multiply, operations = product(dtype, device, 4096 if device.startswith("cuda") else 1024)
    return Limits(reading, operations * _best(multiply, device, seconds))


def _best(action: Callable[[], Any], device: str, seconds: float) -> float:
    """Return the calls per second of the fastest round within the given seconds."""
    ends = time.perf_counter() + seconds
    best = per_second(action, device, 1)
    while time.perf_counter() < ends:
        best = max(best, per_second(action, device, max(1, round(best * seconds / 10))))
    return best


def readers(
    size_bytes: int, dtype: torch.dtype, device: str
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return actions that read `size_bytes` of memory: name -> (action, bytes that it moves).

    On CUDA one of them also writes what it reads.
    """
    columns = 4096
    matrix = torch.ones(
        max(1, size_bytes // dtype.itemsize // columns), columns, dtype=dtype, device=device
    )
    vector = torch.ones(columns, dtype=dtype, device=device)
    held = matrix.numel() * dtype.itemsize
    found: dict[str, tuple[Callable[[], Any], int]] = {
        "sum": (matrix.sum, held),
        "matrix-vector product": (lambda: matrix @ vector, held),
    }
    if device.startswith("cuda"):
        other = torch.empty_like(matrix)
        found["copy"] = (lambda: other.copy_(matrix), 2 * held)
    return found


def product(dtype: torch.dtype, device: str, side: int) -> tuple[Callable[[], Any], int]:
    """Return a product of two matrices of `side` x `side`, and its number of operations."""
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return lambda: left @ right, 2 * side**3


def per_second(action: Callable[[], Any], device: str, times: int) -> float:
    """Return the calls per second over `times` calls, including the wait for the last one."""
    devices.synchronize(torch.device(device))
    began = time.perf_counter()
    for _ in range(times):
        action()
    devices.synchronize(torch.device(device))
    return times / (time.perf_counter() - began)


def fastest(action: Callable[[], Any], device: str, times: int, rounds: int = 5) -> float:
    """Return the calls per second of the fastest of `rounds` rounds of `times` calls."""
    return max(per_second(action, device, times) for _ in range(rounds))
