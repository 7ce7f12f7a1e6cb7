"""CPU time that decoding had to itself, and measurements that are repeated if it had too little.

The CPU time of one thread is not enough: a process on another thread's processor delays all
threads, while the measured one waits for them in a busy loop. So the machine's count of busy time
is read as well, where there is one (Linux).
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import TypeVar

import torch

from decoding.drafters.remote import RemoteChain
from decoding.interfaces import Drafter, Target
from decoding.schedules.by_name import WALL

STAT = Path("/proc/stat")
# Decoding on a CPU never waits, so its thread runs all the time unless other processes interfere.
UNDISTURBED = 0.9
SHARE, ANY_SHARE = re.compile(r"only (\d+) % of the time"), "only part of the time"

Measured = TypeVar("Measured")


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
        return self._spent(0)[0]

    def share(self) -> float:
        """Return these seconds as a share of all seconds since the clock started.

        The machine counts each processor's time in ticks of some 10 ms. As a measurement may be as
        short, a tick a processor is not attributed to other processes.
        """
        seconds, elapsed = self._spent(os.cpu_count() or 1)
        return seconds / elapsed if elapsed else 1.0

    def _spent(self, ticks: int) -> tuple[float, float]:
        """Return the undisturbed seconds and all seconds since the clock started.

        ticks: number of ticks of the machine's count that are not attributed to other processes.
        """
        (thread, clock, process, machine), began = self._now(), self._began
        others = 0.0
        if machine is not None and began[3] is not None:
            others = machine - began[3] - (process - began[2])
            others -= ticks / os.sysconf("SC_CLK_TCK")
        processors, elapsed = os.cpu_count() or 1, clock - began[1]
        seconds = undisturbed_seconds(thread - began[0], elapsed, others, self.threads, processors)
        return seconds, elapsed


def disturbance(share: float) -> str:
    """Return a clause that names the share of time in which a measurement had its processors."""
    return (
        f"beside other processes, the measurement had its processors for only "
        f"{100 * share:.0f} % of the time"
    )


def group_by_kind(reasons: Iterable[str]) -> dict[str, str]:
    """Return reason -> the reason of its kind, with a range of the shares that `disturbance` names.

    Reasons are of one kind if they are equal or differ only in such a share.
    """
    kinds = {reason: SHARE.sub(ANY_SHARE, reason) for reason in reasons}
    shares: dict[str, set[int]] = defaultdict(set)
    for reason, kind in kinds.items():
        shares[kind] |= {int(share) for share in SHARE.findall(reason)}
    ends = {kind: sorted({min(known), max(known)}) for kind, known in shares.items() if known}
    spans = {kind: " to ".join(map(str, known)) for kind, known in ends.items()}
    return {
        reason: kind.replace(ANY_SHARE, f"only {spans.get(kind)} % of the time")
        for reason, kind in kinds.items()
    }


def waits(device: str, backend: str, schedule: str = "serial") -> bool:
    """Return whether decoding waits for a GPU or another process, which is no disturbance."""
    return device != "cpu" or backend.endswith("processes)") or schedule in WALL


def with_share(
    target: Target, drafter: Drafter | None, measure: Callable[[], Measured]
) -> tuple[float, Measured]:
    """Call `measure`; return the share of its time in which it had its processors, and its result.

    The share is 1 if this process waits for a GPU or for other processes of ours.
    """
    clock = UndisturbedClock(torch.get_num_threads())
    measured = measure()
    elsewhere = waits(target.device.type, target.backend) or isinstance(drafter, RemoteChain)
    return 1.0 if elsewhere else clock.share(), measured
