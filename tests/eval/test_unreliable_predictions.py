"""A prediction from disturbed costs is called unreliable, after measuring them again."""

import dataclasses
import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from decoding.costs.contention import UndisturbedClock, disturbance
from decoding.costs.timing import Parts
from eval.measure import parts, repetition
from eval.measure.deadline import Deadline
from eval.measure.measurement import Bench
from eval.measure.parts import time_slice
from eval.measure.records import Condition, Record
from eval.measure.repetition import ATTEMPTS, Repetition
from eval.report.page import evaluation_page
from eval.report.terminal import print_evaluation
from eval.report.text import doubts
from eval.statistics.rows import build_rows
from eval.statistics.schema import Row
from jobs.drafter_use import DrafterUse
from tests.support import simulated_records as simulated
from tests.support.simulated_records import pick

FACTS = {name: facts for name, (_, facts, _) in simulated.DRAFTERS.items()}


def rows_of(records: list[Record], slices=None, **changes: object) -> list[Row]:
    run = simulated.run_facts(**changes)
    return build_rows(run, FACTS, slices or simulated.slices(), records)


def with_rounds(records: list[Record], factor: float, share: float) -> list[Record]:
    """Return the records with other times of prompt lookup's rounds in the sweep at T=0.

    share: of these times, in which it had its processors.
    """
    return [
        dataclasses.replace(
            record,
            decode_seconds=record.decode_seconds * factor,
            cpu_seconds=record.cpu_seconds * factor * share,
        )
        if (record.part, record.temperature, record.drafter) == ("sweep", 0.0, "prompt_lookup")
        else record
        for record in records
    ]


@pytest.mark.parametrize(
    ("factor", "share", "why"),
    [(8.0, 0.1, "beside other processes"), (0.5, 1.0, "than its parts alone")],
)
def test_rounds_of_the_sweep_that_predict_nothing_make_no_prediction(records, factor, share, why):
    """Check the rows, the terminal and the page, where rounds are disturbed or too short."""
    rows = rows_of(with_rounds(records, factor, share))
    lookup, other = pick(rows, "prompt_lookup"), pick(rows, "simulated-good")
    assert why in lookup.unreliable
    assert not other.unreliable and not pick(rows, "prompt_lookup", 1.0).unreliable

    shown = [row for row in rows if row.part == "main"]
    console = Console(file=io.StringIO(), width=200)
    print_evaluation(shown, console)
    for text in (console.file.getvalue(), evaluation_page(shown, records, simulated.PROVENANCE)):
        assert f"Unreliable prediction, as {lookup.unreliable}: prompt_lookup (greedy)." in text
        assert text.count(f"{lookup.predicted_speedup:.2f}x") == 0
        assert f"{other.predicted_speedup:.2f}x" in text, "control"


def test_disturbed_slices_make_no_prediction(records):
    disturbed = [
        dataclasses.replace(one, cpu_share=0.5) if one.drafter == "simulated-good" else one
        for one in simulated.slices()
    ]
    assert "only 50 % of the time" in pick(rows_of(records, disturbed), "simulated-good").unreliable
    assert not pick(rows_of(records, disturbed, device="cuda"), "simulated-good").unreliable, (
        "waiting for a GPU is no disturbance"
    )
    assert not any(row.unreliable for row in rows_of(records)), "control"


# --------------------------------------------------------------------------------- measuring again
TIMINGS = parts.ATTEMPTS


@pytest.fixture(autouse=True)
def _attempts(monkeypatch):
    """Repeat as the product does, which the other tests do not (brief_measurements.py)."""
    monkeypatch.setattr(parts, "ATTEMPTS", TIMINGS)
    monkeypatch.setattr(repetition, "ATTEMPTS", ATTEMPTS)


TARGET = SimpleNamespace(device=torch.device("cpu"), backend="native", max_length=64)


def bench_of(*drafters: str) -> Bench:
    """Return a bench whose models are never called."""
    return Bench(
        target=TARGET,
        drafters={name: SimpleNamespace(name=name) for name in drafters},
        tokenizer=None,
        benchmark=None,
        settings=SimpleNamespace(max_new_tokens=8),
        verify="token",
        uses=dict.fromkeys(drafters, DrafterUse()),
    )


@pytest.mark.parametrize(
    ("found", "kept", "timings"),
    [([0.95], 0, 1), ([0.3, 0.95], 1, 2), ([0.3, 0.5, 0.4, 1.0], 1, 3)],
)
def test_a_disturbed_part_is_timed_again(monkeypatch, found, kept, timings):
    """Check that the least disturbed of at most three timings counts, with its share."""
    shares, made = list(found), []

    def timed(target, drafter, prompt, *, widths, **settings):
        step = drafter is not None
        made.extend([None] * step)
        return Parts(float(len(made)) if step else None, {1: 1.0}, 10, 1)

    monkeypatch.setattr(parts, "time_parts", timed)
    monkeypatch.setattr(UndisturbedClock, "share", lambda self: shares.pop(0) if shares else 1.0)
    (one,) = time_slice(bench_of("one"), Condition(0.0, 1), "main", [1, 2], (1,), 2)
    assert (one.t_draft_ms, one.cpu_share) == (kept + 1, found[kept])
    assert len(made) == timings


class Units:
    """Attempts at a unit that each take 10 s, in which decoding has the given shares."""

    def __init__(self, records: list[Record], shares: list[float], folder: Path) -> None:
        self.unit = [r for r in records if (r.temperature, r.unit) == (0.0, 9)]
        self.shares, self.now, self.measured = shares, 0.0, 0
        self.deadline = Deadline(100.0, folder, lambda: self.now)  # 10 s for measuring again
        self.repetition = Repetition(bench_of(*FACTS), self.deadline)

    def attempt(self) -> list[Record]:
        self.now += 10.0
        share = self.shares[self.measured]
        self.measured += 1
        return [dataclasses.replace(r, cpu_seconds=share * r.cpu_seconds) for r in self.unit]

    def measure(self) -> list[Record]:
        return self.repetition.measure(self.attempt, [], again=lambda: None)


@pytest.mark.parametrize(
    ("shares", "kept"), [([0.95], 0.95), ([0.2, 0.96], 0.96), ([0.5, 0.2, 0.9], 0.5)]
)
def test_a_disturbed_unit_is_measured_again_within_a_bound(records, tmp_path, shares, kept):
    """Check that the least disturbed attempt is kept, and that the seconds of a run are bounded."""
    units = Units(records, shares, tmp_path)
    found, attempts = units.measure(), min(2, len(shares))
    assert units.measured == attempts, "a third attempt exceeds the 10 s"
    shares_of = zip(found, units.unit, strict=True)
    assert all(math.isclose(r.cpu_seconds, kept * was.cpu_seconds) for r, was in shares_of)
    assert {record.attempt for record in found} == {attempts}, "also if the first is kept"


def test_no_unit_is_measured_more_than_three_times(records, tmp_path, monkeypatch):
    monkeypatch.setattr("eval.measure.deadline.AGAIN", 1.0)
    units = Units(records, [0.2] * 9, tmp_path)
    units.measure()
    assert units.measured == ATTEMPTS == 3


def test_reasons_that_differ_in_their_share_alone_are_one_sentence(records):
    shown = rows_of(records)[:4]
    reasons = [*map(disturbance, (0.33, 0.31, 0.33)), "a round took less time than its parts alone"]
    named = [
        (f"drafter {number}", dataclasses.replace(row, unreliable=why))
        for number, (row, why) in enumerate(zip(shown, reasons, strict=True))
    ]
    many, other = doubts(named)
    assert "for only 31 to 33 % of the time: drafter 0 (" in many
    assert "drafter 1 (" in many and "drafter 2 (" in many and "drafter 3" not in many
    assert other.startswith(f"Unreliable prediction, as {reasons[-1]}: drafter 3 (")
    assert "only 33 % of the time: " in doubts(named[:1])[0], "a control: one share is no range"
