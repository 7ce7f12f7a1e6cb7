"""CPU time that decoding had to itself, without the time taken by other processes.

The CPU time of one thread is not enough: a process on another thread's processor delays all
threads, while the measured one waits for them in a busy loop. So the machine's count of busy time
is read as well, where there is one (Linux).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, thread_time

STAT = Path("/proc/stat")


def machine_seconds() -> float | None:
    """Return the busy CPU seconds of all processes since the machine started; None if unknown.

    Time taken by a hypervisor counts as busy.
    """
    if not STAT.is_file():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(
        int, STAT.read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def undisturbed_seconds(
    thread: float, elapsed: float, others: float, threads: int, processors: int
) -> float:
    """Return the seconds in which a decoding thread had its processors.

    thread: CPU seconds of this thread. elapsed: wall seconds. others: CPU seconds of other
    processes meanwhile. threads: number of decoding threads.

    Other processes first fill the processors that decoding leaves free. Each decoding thread loses
    an equal share of the rest. Time taken from this thread's own processor is already missing in
    `thread`, so the smaller of the two results is returned.
    """
    free = max(0, processors - threads) * elapsed
    return max(0.0, min(thread, elapsed - max(0.0, others - free) / threads))


@dataclass
class UndisturbedClock:
    """Clock, started when created, of the seconds in which this thread had its processors."""

    threads: int  # decoding threads

    def __post_init__(self) -> None:
        self._began = self._now()

    def _now(self) -> tuple[float, float, float, float | None]:
        return thread_time(), perf_counter(), process_time(), machine_seconds()

    def seconds(self) -> float:
        """Return the seconds in which this thread had its processors since the clock started."""
        (thread, clock, process, machine), began = self._now(), self._began
        others = 0.0
        if machine is not None and began[3] is not None:
            others = machine - began[3] - (process - began[2])
        processors = os.cpu_count() or 1
        return undisturbed_seconds(
            thread - began[0], clock - began[1], others, self.threads, processors
        )
