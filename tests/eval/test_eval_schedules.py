"""Overlapped schedules and predictions from traces, on SIMULATED records with known times."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from eval.measure.parts import Slice
from eval.measure.records import AUTOREGRESSIVE, Record
from eval.report.evaluation_tables import FROM_TRACE_WITHIN, off_by, predictions_table
from eval.report.page import evaluation_page
from eval.report.terminal import print_evaluation
from eval.statistics.pearl_trace import turns
from eval.statistics.rows import build_rows
from eval.statistics.schema import DrafterFacts, Row
from tests.support.simulated_records import PROVENANCE, T_TARGET_MS, run_facts

GAMMA, LIMIT, T_DRAFT_MS, REST_MS = 4, 128, 2.0, 0.5
TRACES = ["1101" * 30, "1111111111111110" * 7, "1000" * 30]
PEARL = ("pearl_virtual", "pearl_wall", "pearl_wall_wo_post")


def decoded(name: str, schedule: str, number: int, apart: float) -> Record:
    """Return a record of a generation that took `apart` times the time that its trace predicts."""
    trace = TRACES[number]
    taken = list(turns(trace, GAMMA, LIMIT, schedule))
    draft_ms = [turn.drafted * T_DRAFT_MS for turn in taken]
    target_ms = [T_TARGET_MS[turn.width] if turn.width else 0.0 for turn in taken]
    forwards = sum(turn.width > 0 for turn in taken)
    lanes_ms, rest_ms = sum(map(max, draft_ms, target_ms)), REST_MS * forwards
    return replace(
        baseline(number),
        drafter=name,
        num_draft_tokens=GAMMA,
        rounds=forwards,
        drafted=sum(turn.drafted for turn in taken),
        draft_steps=sum(turn.drafted for turn in taken),
        tested_by_depth=[len(trace)],
        accepted_by_depth=[trace.count("1")],
        trace=trace,
        decode_seconds=apart * (lanes_ms + rest_ms) / 1000,
        lanes_seconds=(apart * (lanes_ms + rest_ms) - rest_ms) / 1000,
        draft_seconds=sum(draft_ms) / 1000,
        target_seconds=sum(target_ms) / 1000,
        shorter_seconds=sum(map(min, draft_ms, target_ms)) / 1000,
    )


def baseline(number: int) -> Record:
    count = len(TRACES[number])
    return Record(
        part="main",
        temperature=0.0,
        batch_size=1,
        drafter=AUTOREGRESSIVE,
        num_draft_tokens=0,
        unit=number,
        prompt_id=f"simulated-{number}",
        category="simulated",
        turn=0,
        prompt_tokens=40,
        tokens=[(7 * index + number) % 10_000 for index in range(count)],
        finish="length",
        rounds=count,
        tested_by_depth=[],
        accepted_by_depth=[],
        drafted=0,
        draft_steps=0,
        verified=0,
        prefill_seconds=0.01,
        decode_seconds=count * (T_TARGET_MS[1] + 0.2) / 1000,
        draft_seconds=0.0,
        cpu_seconds=count * T_TARGET_MS[1] / 1000 + 0.01,
        differs_at=None,
        gap=None,
    )


def rows_of(apart: float, schedules: tuple[str, ...] = PEARL) -> tuple[list[Row], list[Record]]:
    facts = {name: DrafterFacts(name, 1, 3_100_000, False, schedule=name) for name in schedules}
    records = [baseline(number) for number in range(len(TRACES))]
    records += [
        decoded(name, name, number, apart) for name in schedules for number in range(len(TRACES))
    ]
    slices = [Slice("main", 0.0, 1, name, T_DRAFT_MS, dict(T_TARGET_MS), 160) for name in schedules]
    return build_rows(run_facts(), facts, slices, records), records


def test_lanes_of_mean_length_are_predicted_exactly() -> None:
    for row in rows_of(1.0)[0]:
        assert row.replayed_speedup == pytest.approx(row.speedup, rel=1e-12)
        assert not off_by(row.replayed_speedup, row, FROM_TRACE_WITHIN)


@pytest.mark.parametrize(
    ("apart", "marked"), [(1.04, False), (1.06, True), (0.97, False), (0.94, True)]
)
def test_a_measurement_far_from_its_trace_is_marked(apart: float, marked: bool) -> None:
    rows = [replace(row, predicted_speedup=row.speedup) for row in rows_of(apart)[0]]
    for row in rows:
        assert row.replayed_speedup == pytest.approx(apart * row.speedup)
        assert off_by(row.replayed_speedup, row, FROM_TRACE_WITHIN) == marked
    table = predictions_table([(row.drafter, row) for row in rows])
    ratio = table.columns.index("from trace / measured")
    assert [cells[ratio] for cells in table.rows] == [f"{apart:.2f}"] * len(PEARL)
    assert table.marks == ["bad" if marked else ""] * len(PEARL)


@pytest.mark.parametrize("apart", [1.04, 1.06])
def test_terminal_and_page_show_prediction_from_trace_over_measurement(apart: float) -> None:
    rows, records = rows_of(apart)
    html, printed = evaluation_page(rows, records, PROVENANCE), io.StringIO()
    print_evaluation(rows, Console(file=printed))
    assert html.count(f"<td>{apart:.2f}</td>") == len(PEARL)
    ratios = re.findall(rf" {apart:.2f}$", printed.getvalue(), flags=re.M)
    assert len(ratios) == len(PEARL)


def test_rows_without_a_trace_are_not_marked() -> None:
    row = replace(rows_of(1.06)[0][0], schedule="pearl_plus_wall", replayed_speedup=None)
    assert not off_by(row.replayed_speedup, row, FROM_TRACE_WITHIN)
    assert predictions_table([("x", row)]).rows[0][-1] == "–"
