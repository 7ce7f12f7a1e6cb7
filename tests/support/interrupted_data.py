"""Training data that interrupt the process which reads them."""

import os
import signal
from typing import TypeVar

from training.data.packing import PackedData

Data = TypeVar("Data", bound=PackedData)


def stop_after_step(data: Data, stop_after: int) -> Data:
    """Return data that send a SIGTERM when the rows of step `stop_after` (from 1) are read."""
    rows_of = data.step_rows
    calls = 0

    def step_rows(step: int) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return rows_of(step)

    data.step_rows = step_rows  # type: ignore[method-assign]
    return data
