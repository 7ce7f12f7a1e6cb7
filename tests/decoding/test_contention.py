"""CPU time of other processes counts only on the processors that decoding uses."""

from pathlib import Path

import pytest

from decoding.costs import contention
from decoding.costs.contention import UndisturbedClock, machine_seconds, undisturbed_seconds


def test_other_processes_count_only_on_the_processors_of_decoding():
    assert (
        undisturbed_seconds(thread=10.0, elapsed=10.0, others=0.0, threads=2, processors=2) == 10.0
    )
    assert (
        undisturbed_seconds(thread=10.0, elapsed=10.0, others=4.0, threads=2, processors=2) == 8.0
    ), "each of two threads bears half"
    assert (
        undisturbed_seconds(thread=10.0, elapsed=10.0, others=10.0, threads=1, processors=2) == 10.0
    ), "the other one was free"
    assert (
        undisturbed_seconds(thread=10.0, elapsed=10.0, others=13.0, threads=1, processors=2) == 7.0
    )
    assert (
        undisturbed_seconds(thread=4.0, elapsed=10.0, others=0.0, threads=1, processors=2) == 4.0
    ), "it used none itself"
    assert (
        undisturbed_seconds(thread=6.5, elapsed=10.0, others=13.5, threads=1, processors=2) == 6.5
    ), "time taken from its processor counts once"
    assert (
        undisturbed_seconds(thread=0.5, elapsed=10.0, others=19.5, threads=2, processors=2) == 0.25
    )
    assert (
        undisturbed_seconds(thread=1.0, elapsed=1.0, others=-0.01, threads=2, processors=2) == 1.0
    ), "at most the elapsed time"


def test_the_machine_count_excludes_idle_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 9000 500 4 5 6 7 8\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    monkeypatch.setattr(contention, "STAT", stat)
    monkeypatch.setattr(contention.os, "sysconf", lambda name: 100)
    assert machine_seconds() == 1.65
    monkeypatch.setattr(contention, "STAT", tmp_path / "none")
    assert machine_seconds() is None


@pytest.mark.parametrize(("taken", "expected"), [(0.0, 3.0), (1.0, 2.5)])
def test_the_clock_excludes_its_process_from_the_machine_count(
    taken: float, expected: float, monkeypatch: pytest.MonkeyPatch
):
    """Check that the clock subtracts the CPU time of its own process from the machine's.

    Its two threads run for three seconds, with and without another process.
    """
    for name, start, end in (
        ("thread_time", 5.0, 8.0),
        ("perf_counter", 1.0, 4.0),
        ("process_time", 9.0, 15.0),
        ("machine_seconds", 100.0, 106.0 + taken),
    ):
        times = iter((start, end))
        monkeypatch.setattr(contention, name, lambda times=times: next(times))
    monkeypatch.setattr(contention.os, "cpu_count", lambda: 2)
    assert UndisturbedClock(threads=2).seconds() == pytest.approx(expected)


@pytest.mark.parametrize("known", [True, False])
def test_without_the_machine_count_the_thread_time_is_used(
    known: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(contention, "machine_seconds", lambda: 0.0 if known else None)
    for name in ("thread_time", "perf_counter", "process_time"):
        times = iter((0.0, 2.0))
        monkeypatch.setattr(contention, name, lambda times=times: next(times))
    monkeypatch.setattr(contention.os, "cpu_count", lambda: 2)
    # A constant count, as in some containers, would give other processes a negative time,
    # which is not a disturbance.
    assert UndisturbedClock(threads=2).seconds() == pytest.approx(2.0)
