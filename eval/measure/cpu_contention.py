"""Whether decoding had its processors to itself: the processor time of its own thread, or what
other processes left it of those that it wanted.

The thread's time alone says little where several threads work: a neighbour on another thread's
processor delays all of them, while the one that is asked waits for the others, busily. So the
machine's own count of busy time is read as well, where there is one (Linux).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, thread_time

STAT = Path("/proc/stat")


def machine_seconds() -> float | None:
    """Busy processor seconds of all processes since the machine started, those that a hypervisor
    took among them; None where it is not told.
    """
    if not STAT.is_file():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(
        int, STAT.read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def undisturbed_seconds(
    own: float, elapsed: float, others: float, threads: int, processors: int
) -> float:
    """Seconds that a decoding thread had its processors.

    own: its processor seconds. others: processor seconds of other processes meanwhile; those that
    fit on processors that decoding leaves free count for nothing, of the rest each of its threads
    bears a part. What they took of this thread's own processor is missing in its seconds already
    and counts once.
    """
    free = max(0, processors - threads) * elapsed
    return max(0.0, min(own, elapsed - max(0.0, others - free) / threads))


@dataclass
class UndisturbedClock:
    """Counts from its making on."""

    threads: int

    def __post_init__(self) -> None:
        self._began = self._now()

    def _now(self) -> tuple[float, float, float, float | None]:
        return thread_time(), perf_counter(), process_time(), machine_seconds()

    def seconds(self) -> float:
        """Seconds that this thread had its processors so far."""
        (own, clock, process, machine), began = self._now(), self._began
        others = (
            0.0
            if machine is None or began[3] is None
            else machine - began[3] - (process - began[2])
        )
        return undisturbed_seconds(
            own - began[0], clock - began[1], others, self.threads, os.cpu_count() or 1
        )
