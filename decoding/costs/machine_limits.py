"""What the machine can do at most, measured: plain readers of its memory, and a plain product of
matrices.

A forward has to read its weights and to compute its products (decoding/costs/roofline.py); over
these two limits stands the share that it reaches. Of a yardstick the best round counts: what slows
it down, a neighbour's work, says nothing of the machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from decoding import devices

SLOW_YARDSTICK = "yardstick read slowly: not valid"  # of a share above 1, which no limit allows
MOST_BYTES = 1 << 28  # that a reader holds: more than caches do, and no strain beside a large model
SECONDS = 0.5  # for each yardstick


@dataclass(frozen=True)
class Limits:
    """What nothing on this machine goes beyond."""

    bytes_a_second: float  # of plain reading
    operations_a_second: float  # of a plain product; a multiplication and an addition are two


@torch.inference_mode()
def measure_limits(
    size_bytes: int, dtype: torch.dtype, device: str, seconds: float = SECONDS
) -> Limits:
    """The limits of a forward that reads `size_bytes` of weights: the best of the plain readers of
    as much, and the product. Takes about two seconds.

    What fits into a processor's cache is read from there, by the model as by its yardstick.
    """
    plain = readers(min(size_bytes, MOST_BYTES), dtype, device)
    reading = max(held * _best(action, device, seconds) for action, held in plain.values())
    multiply, operations = product(dtype, device, 4096 if device.startswith("cuda") else 1024)
    return Limits(reading, operations * _best(multiply, device, seconds))


def _best(action: Callable[[], Any], device: str, seconds: float) -> float:
    """Calls a second in the best of the rounds that fit into so many seconds."""
    ends = time.perf_counter() + seconds
    best = per_second(action, device, 1)
    while time.perf_counter() < ends:
        best = max(best, per_second(action, device, max(1, round(best * seconds / 10))))
    return best


def readers(
    size_bytes: int, dtype: torch.dtype, device: str
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> (what only reads `size_bytes` of memory, bytes that it moves): the limit of whatever
    has to read as much.
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
    """(A product of two square matrices, its operations): the limit of whatever computes."""
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return lambda: left @ right, 2 * side**3


def per_second(action: Callable[[], Any], device: str, times: int) -> float:
    """Calls a second of `times` calls, waited for at the end."""
    devices.synchronize(torch.device(device))
    began = time.perf_counter()
    for _ in range(times):
        action()
    devices.synchronize(torch.device(device))
    return times / (time.perf_counter() - began)


def fastest(action: Callable[[], Any], device: str, times: int, rounds: int = 5) -> float:
    """Calls a second in the best of several rounds: what the machine can do, and a neighbour's work
    takes away from.
    """
    return max(per_second(action, device, times) for _ in range(rounds))
