"""Law: a deleted recording does not spoil the one that is being made."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decoding import devices

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


class Cycle:
    """A recording that only the garbage collector deletes."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.itself = run, self


def make_objects() -> None:
    """Make enough objects for the garbage collector to start by itself."""
    for _ in range(5000):
        Cycle(int)


def record_beside_garbage(meanwhile: Callable[[], object]) -> list[float]:
    """Record a graph while an unreachable one waits for deletion; return what a replay computes.

    meanwhile: called during the recording.
    """
    device = torch.device("cuda", 0)
    numbers_N, runs = torch.arange(4.0, device=device), 0

    def body() -> torch.Tensor:
        nonlocal runs
        runs += 1
        if runs == 3:  # two runs come before the recording
            meanwhile()
        return numbers_N + numbers_N

    gc.collect()
    gc.disable()
    try:
        Cycle(devices.capture(lambda: numbers_N * 3, device, devices.pool(device)))
        record = devices.capture
        # enabled as late as possible: nothing may collect the cycle before the recording
        gc.enable()
        return record(body, device, devices.pool(device))().tolist()
    finally:
        gc.enable()


def test_the_garbage_collector_waits_for_a_recording() -> None:
    assert record_beside_garbage(make_objects) == [0, 2, 4, 6]


def test_a_collection_during_a_recording_spoils_it() -> None:
    """Control: an explicit collection deletes the old graph and ends the recording."""
    with pytest.raises(RuntimeError, match="captur"):
        record_beside_garbage(gc.collect)
