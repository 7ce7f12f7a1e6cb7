"""rounds.jsonl: each round of an evaluation, which sums up to the figures of its row."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.config import EvalConfig
from eval.measure.records import AUTOREGRESSIVE, Record, read_records
from eval.measure.rounds import FILE, OF_GENERATION
from eval.run import run
from eval.statistics.schema import Row, read_rows
from tests.support.tiny_folders import config

PARTS = ("propose_seconds", "forward_seconds", "verify_seconds", "rest_seconds")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def of_row(row: Row, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("part", "temperature", "batch_size", "drafter", "num_draft_tokens")
    return [line for line in found if all(line[name] == vars(row)[name] for name in names)]


def figures(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a row as the rounds give them."""
    sums = {name: sum(line[name] for line in found) for name in ("tested", "accepted", "emitted")}
    return {
        "rounds": len(found),
        "tokens": sums["emitted"],
        "alpha": pytest.approx(sums["accepted"] / sums["tested"]) if sums["tested"] else None,
        "tau": pytest.approx(sums["emitted"] / len(found)),
        "drafted": pytest.approx(sum(line["drafted"] for line in found) / len(found)),
    }


def mark_unfinished(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))


def settings(home: Path) -> EvalConfig:
    """Return a run of a serial drafter and of two that run ahead, greedy and sampled."""
    shallow = str(home / "shallow")
    ahead = {"use": shallow, "schedule": "pearl_virtual", "name": "ahead"}
    assumed = {"use": shallow, "schedule": "pearl_virtual_wo_pre", "name": "assumed"}
    return config(
        home,
        "rounds",
        drafters=[shallow, ahead, assumed],
        temperatures=[0.0, 1.0],
        num_draft_tokens=[2],
        sweep=[],
    )


@pytest.fixture(scope="module")
def measured(home: Path) -> Path:
    return run(settings(home))


@pytest.fixture
def copied(measured: Path, home: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Mark the run unfinished, and restore its files at the end."""
    before = {file.name: file.read_bytes() for file in measured.iterdir() if file.is_file()}
    mark_unfinished(measured)
    yield measured
    for name, content in before.items():
        (measured / name).write_bytes(content)


@pytest.mark.long
def test_rounds_sum_up_to_the_figures_of_their_row(measured: Path):
    found, rows = lines(measured), read_rows(measured / "results.jsonl")
    assert {row.schedule for row in rows} == {*("serial", "pearl_virtual", "pearl_virtual_wo_pre")}
    assert {row.temperature for row in rows} == {0.0, 1.0}
    for row in rows:
        mine = of_row(row, found)
        figured = figures(mine)
        assert {name: vars(row)[name] for name in figured} == figured
        assert figures(mine[1:]) != figured, "control: a lost round is found"
    assert AUTOREGRESSIVE not in {line["drafter"] for line in found}


def test_rounds_sum_up_to_the_times_of_their_generation(measured: Path):
    found = lines(measured)
    for record in read_records(measured / "records.jsonl"):
        place = [vars(record)[name] for name in OF_GENERATION]
        mine = [line for line in found if [line[name] for name in OF_GENERATION] == place]
        if record.drafter == AUTOREGRESSIVE:
            continue
        assert [line["round"] for line in mine] == list(range(record.rounds))
        rounding = 1e-6 * len(mine)
        seconds = sum(line["seconds"] for line in mine)
        assert seconds == pytest.approx(record.decode_seconds, abs=rounding)
        serial = not record.lanes_seconds
        assert all((name in line) == serial for line in mine for name in PARTS)
        for line in mine if serial else ():
            assert sum(line[name] for name in PARTS) == pytest.approx(line["seconds"], abs=5e-6)
            assert all(line[name] >= -1e-6 for name in PARTS)


def test_the_parts_of_a_mean_round_sum_up_to_it(measured: Path):
    for row in read_rows(measured / "results.jsonl"):
        serial = row.schedule == "serial"
        assert bool(row.parts_ms) == serial
        if serial:
            assert list(row.parts_ms) == ["propose", "forward", "verify", "rest"]
            assert sum(row.parts_ms.values()) == pytest.approx(row.round_ms)
            assert sum(row.baseline_parts_ms.values()) == pytest.approx(row.baseline_round_ms)
            assert row.baseline_parts_ms["propose"] < row.parts_ms["propose"] or (
                row.drafter == "prompt_lookup"
            )
            assert row.parts_ms["forward"] > row.parts_ms["verify"] > 0


def test_rows_of_a_batch_have_their_rounds(home: Path):
    folder = run(config(home, "batch", temperatures=[0.0], batch_sizes=[2], sweep=[1]))
    found = lines(folder)
    for row in read_rows(folder / "results.jsonl"):
        figured = figures(of_row(row, found))
        assert {name: vars(row)[name] for name in figured} == figured


def continued(home: Path, folder: Path) -> tuple[list[Record], list[dict[str, Any]]]:
    """Run the same configuration again; return its records and rounds."""
    run(settings(home))
    return read_records(folder / "records.jsonl"), lines(folder)


def check_every_round(records: list[Record], found: list[dict[str, Any]]) -> None:
    counts = Counter(tuple(line[name] for name in OF_GENERATION) for line in found)
    expected = {
        tuple(vars(record)[name] for name in OF_GENERATION): record.rounds
        for record in records
        if record.drafter != AUTOREGRESSIVE
    }
    assert counts == expected


def test_a_killed_run_continues_with_the_rounds_of_the_lost_unit_alone(home: Path, copied: Path):
    """Check a kill after the rounds of the last unit were written, and before its records."""
    records, before = read_records(copied / "records.jsonl"), lines(copied)
    last = [
        r for r in records if (r.condition, r.unit) == (records[-1].condition, records[-1].unit)
    ]
    content = (copied / "records.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "records.jsonl").write_bytes(b"".join(content[: -len(last)]))
    with (copied / FILE).open("ab") as file:
        file.write(b'{"part": "main", "tor')
    again, after = continued(home, copied)
    check_every_round(again, after)
    lost = {(one["temperature"], one["unit"]) for one in after} & {(1.0, last[0].unit)}
    kept = [one for one in before if (one["temperature"], one["unit"]) not in lost]
    assert [one for one in after if (one["temperature"], one["unit"]) not in lost] == kept
    assert len(again) == len(records)


def test_a_unit_whose_rounds_are_damaged_is_measured_again(
    home: Path, copied: Path, capsys: pytest.CaptureFixture[str]
):
    records = read_records(copied / "records.jsonl")
    content = (copied / FILE).read_bytes().splitlines(keepends=True)
    hit = json.loads(content[3])
    (copied / FILE).write_bytes(b"".join([*content[:3], b"{}\n", *content[4:]]))
    again, after = continued(home, copied)
    assert "rounds.jsonl lacks rounds of 1 units: measured again" in capsys.readouterr().out
    check_every_round(again, after)
    place = (hit["part"], hit["temperature"], hit["unit"])

    def timed(found: list[Record]) -> dict[Any, float]:
        return {
            (one.part, one.temperature, one.unit, one.arm, one.sample): one.decode_seconds
            for one in found
        }

    old, new = timed(records), timed(again)
    assert old.keys() == new.keys()
    assert {key[:3] for key in old if old[key] != new[key]} == {place}


def test_a_run_of_an_earlier_version_without_rounds_keeps_its_records(home: Path, copied: Path):
    records = read_records(copied / "records.jsonl")
    (copied / FILE).unlink()
    run(settings(home))
    assert read_records(copied / "records.jsonl") == records
