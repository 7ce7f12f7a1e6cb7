"""Confidences that were calibrated at one temperature and serve at another are named in reports."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.measure.setup import load
from eval.report.page import evaluation_page
from eval.report.terminal import print_evaluation
from eval.statistics.rows import build_rows
from heads.block.layouts import SERVED
from tests.support import simulated_records as simulated
from tests.support import tiny_folders as tiny
from tests.support.block_heads import random_block
from training.heads.checkpoint import save_head

NOTE = (
    "The confidences that end the drafts of simulated-good were calibrated at temperature {}, and "
    "also serve at {}, where a draft may end too early or too late."
)


def rows_of(records: list[Any], calibrated_at: float | None) -> list[Any]:
    """Return rows in which one drafter has confidences that were calibrated at a temperature."""
    facts = {name: fact for name, (_, fact, _) in simulated.DRAFTERS.items()}
    name = "simulated-good"
    facts[name] = dataclasses.replace(facts[name], calibrated_at=calibrated_at)
    return build_rows(simulated.run_facts(), facts, simulated.slices(), records)


def printed(rows: list[Any]) -> str:
    console = Console(file=io.StringIO(), width=400)
    print_evaluation([row for row in rows if row.part == "main"], console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("calibrated_at", "expected"),
    [(1.0, ("1", "0")), (0.0, ("0", "1")), (0.5, ("0.5", "0, 1")), (None, None)],
)
def test_a_report_names_confidences_of_another_temperature(
    calibrated_at: float | None, expected: tuple[str, str] | None, records: list[Any]
) -> None:
    """Check the terminal and the page; the control has no calibration."""
    rows = rows_of(records, calibrated_at)
    shown = [row for row in rows if row.part == "main"]
    assert {row.temperature for row in shown} == {0.0, 1.0}
    for text in (printed(rows), evaluation_page(shown, records, simulated.PROVENANCE)):
        assert ("were calibrated at temperature" in text) is (expected is not None)
        if expected:
            assert text.count(NOTE.format(*expected)) == 1


def test_a_report_of_the_same_temperature_names_nothing(records: list[Any]) -> None:
    rows = [row for row in rows_of(records, 1.0) if row.temperature == 1.0]
    assert "were calibrated" not in printed(rows)


@pytest.mark.parametrize(
    ("stopping", "batch_size", "device", "noted"),
    [
        ("thompson_calibrated", 4, "cpu", True),
        ("thompson_calibrated", 1, "cuda", True),
        ("thompson_calibrated", 1, "cpu", False),
        ("cost_ratio", 4, "cpu", False),
    ],
)
def test_a_report_names_calibrated_rules_that_read_no_confidence(
    stopping: str, batch_size: int, device: str, noted: bool, records: list[Any]
) -> None:
    """Check the terminal and the page: such a rule chooses lengths before a round."""
    changed = {"stopping": stopping, "batch_size": batch_size, "device": device}
    rows = [
        dataclasses.replace(row, **changed) if row.drafter == "simulated-good" else row
        for row in rows_of(records, None)
        if row.part == "main" and row.temperature == 1.0
    ]
    note = "stopping=thompson_calibrated of simulated-good chooses draft lengths before each round"
    pages = []
    if batch_size == 1:  # as in the records
        pages = [evaluation_page(rows, records, simulated.PROVENANCE)]
    assert [text.count(note) for text in (printed(rows), *pages)] == [noted] * (1 + len(pages))


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({"temperatures": (2.0,) * 6}, {"by_cost": True}, 0.5),
        ({"temperatures": (2.0,) * 6}, {"stop_below": 0.3}, 0.5),
        ({"temperatures": (2.0,) * 6}, {"by_cost": False}, None),
        ({}, {"by_cost": True}, None),
    ],
    ids=["by cost", "stop below", "fixed length", "not calibrated"],
)
def test_the_temperature_is_the_cards_if_confidences_end_drafts(
    fields: dict[str, Any],
    options: dict[str, Any],
    expected: float | None,
    home: Path,
    tmp_path: Path,
) -> None:
    config = json.loads((home / "target/config.json").read_text())
    sizes = {name: config[name] for name in ("vocab_size", "hidden_size")}
    sizes |= {"target_layers": config["num_hidden_layers"]}
    head = random_block(sizes, correction="markov", rank=4, confidence=True, **fields)
    save_head(SERVED, head.config, head, tmp_path / "head")
    card = {"acceptance": {"temperature": 0.5}}
    (tmp_path / "head/drafter_card.json").write_text(json.dumps(card))
    entry = {"use": "block", "folder": str(tmp_path / "head"), "name": "mine", **options}
    loaded = load(tiny.config(home, "run", drafters=[entry]))
    assert loaded.facts["mine"].calibrated_at == expected
