"""A run that several processes share measures what one process does, and resumes at the prompt."""

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from eval.measure import shards
from eval.measure.records import read_records
from eval.measure.rounds import FILE as ROUNDS
from eval.measure.rounds import OF_GENERATION
from eval.measure.setup import shards_per_device
from eval.measure.shards import FOLDER, Shard
from eval.run import run
from eval.statistics.schema import read_rows
from tests.support import tiny_folders as tiny
from tests.support.forks import forked_children
from tests.support.tiny_folders import config


def settings(home: Path, name: str, **changed: Any) -> Any:
    return config(home, name, temperatures=[0.0, 1.0], threads=1, **changed)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    tiny.save(folder / "target", layers=3)
    tiny.save(folder / "shallow", layers=1)
    tiny.prompts(folder / "prompts.jsonl", count=9)
    return folder


@pytest.fixture(scope="module")
def alone(homes: Path) -> Path:
    return run(settings(homes, "alone", num_draft_tokens=[2]))


@pytest.fixture(scope="module")
def shared(homes: Path) -> Path:
    with forked_children():
        return run(settings(homes, "shared", num_draft_tokens=[2], shards=2))


def texts(folder: Path) -> Counter[tuple[Any, ...]]:
    """Return what was decoded, without times."""
    fields = ("part", "temperature", "drafter", "num_draft_tokens", "unit", "prompt_id")
    return Counter(
        (*(vars(record)[name] for name in fields), *record.tokens)
        for record in read_records(folder / "records.jsonl")
    )


def rounds(folder: Path) -> Counter[tuple[Any, ...]]:
    """Return the counts of every round, without times."""
    fields = (*OF_GENERATION, "round", "drafted", "tested", "accepted", "emitted")
    lines = map(json.loads, (folder / ROUNDS).read_text().splitlines())
    return Counter(tuple(line[name] for name in fields) for line in lines)


@pytest.mark.long
def test_shards_decode_what_one_process_does(alone: Path, shared: Path) -> None:
    """Check all texts, sampled ones too, and the counts of the rows."""
    assert texts(shared) == texts(alone)
    assert rounds(shared) == rounds(alone) and rounds(alone)
    fields = ("drafter", "temperature", "part", "num_draft_tokens", "prompts", "tokens", "rounds")
    rows = [
        [tuple(vars(row)[name] for name in fields) for row in read_rows(one / "results.jsonl")]
        for one in (shared, alone)
    ]
    assert rows[0] == rows[1]
    units = [
        {
            record.unit
            for record in read_records(shared / FOLDER / name / "records.jsonl")
            if record.part == "main"
        }
        for name in "01"
    ]
    assert all(units) and not units[0] & units[1], "each process measured a share"
    pages = [(one / "report.html").read_text() for one in (shared, alone)]
    warning = "2 processes (shards=2) shared the processor: acceptance"
    assert [warning in page for page in pages] == [True, False]
    assert ["2 shared the prompts, 2 on each device" in page for page in pages] == [True, False]
    assert 'class="big good"' not in pages[0] and 'class="big bad"' not in pages[0]
    assert {(row.shards, row.shards_per_device) for row in read_rows(shared / "results.jsonl")} == {
        (2, 2)
    }


@pytest.mark.long
def test_a_run_continues_with_the_units_that_a_shard_lacks(homes: Path, shared: Path) -> None:
    """Check that only lost records are new, by their times, which no second run repeats."""
    folder = Path(shutil.copytree(shared, homes / "resumed"))
    for name in ("manifest.json", "results.jsonl", "records.jsonl", "report.html"):
        (folder / name).unlink()
    path = folder / FOLDER / "1" / "records.jsonl"
    records = read_records(path)
    lost = max(record.unit for record in records if record.temperature == 0)
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line, record in zip(lines, records, strict=True) if record.unit != lost]
    path.write_bytes(b"".join(kept))
    run(settings(homes, "resumed", num_draft_tokens=[2], shards=2))

    def timed(home: Path) -> dict[tuple[Any, ...], float]:
        found: dict[tuple[Any, ...], float] = {}
        for one in read_records(home / "records.jsonl"):
            found[one.condition, one.arm, one.part, one.unit, one.sample] = one.decode_seconds
        return found

    before, after = timed(shared), timed(folder)
    assert texts(folder) == texts(shared)
    assert rounds(folder) == rounds(shared)
    changed = {key[3] for key in after if after[key] != before[key]}
    assert changed == {lost}


@pytest.mark.long
def test_a_failed_shard_is_named(homes: Path) -> None:
    damaged = Path(shutil.copytree(homes / "shallow", homes / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="shard 0 of 2 ended with status 2.* Mend what it names"):
        run(settings(homes, "failed", drafters=[str(damaged)], shards=2))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shards": 0}, "shards is 0, expected 1 to 64"),
        ({"shards": 2, "max_seconds": 9.0}, "shards=2 needs max_seconds=0"),
    ],
)
def test_impossible_numbers_of_shards_are_refused(
    homes: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(settings(homes, "refused", **changed))


def test_every_task_is_of_one_shard() -> None:
    @dataclasses.dataclass
    class AnyTask:
        part: str
        index: int

    for count in (1, 2, 3, 7):
        for index in range(20):
            main, sweep = AnyTask("main", index), AnyTask("sweep", index)
            mine = [Shard(number, count, "main") for number in range(count)]
            assert sum(one.holds(main) for one in mine) == 1  # type: ignore[arg-type]
            assert not any(one.holds(sweep) for one in mine)  # type: ignore[arg-type]
            assert Shard(0, count, "sweep").holds(sweep)  # type: ignore[arg-type]


def test_the_share_of_a_process_is_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shards.this_shard() is None
    monkeypatch.setenv("SHALLOW_DRAFT_SHARD", str(Shard(2, 5, "main")))
    assert shards.this_shard() == Shard(2, 5, "main")


def test_processes_on_one_device_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.measure.setup.count_gpus", lambda: 2)
    assert [shards_per_device(number, "cpu") for number in (1, 4)] == [1, 4]
    assert [shards_per_device(number, "cuda") for number in (1, 2, 3)] == [1, 1, 2]


def test_gpus_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch, homes: Path) -> None:
    """Check the variables of the processes; no GPU is used."""
    monkeypatch.setattr(shards.devices, "count_gpus", lambda: 2)
    monkeypatch.setattr(shards, "device_of", lambda device: "cuda")
    cfg = settings(homes, "cards", shards=3)

    def cards() -> list[str]:
        return [
            shards._environment(cfg, Shard(n, 3, "main"), 3)["CUDA_VISIBLE_DEVICES"]
            for n in range(3)
        ]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cards() == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert cards() == ["5", "7", "5"]
