"""The doctor's comparison of another engine with our loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoding.errors import UserError
from decoding.models.folder import hash_input
from decoding.models.text.tokenizer import load_tokenizer
from eval.doctor.diagnosis import diagnose
from eval.doctor.engine_run import counts_by_engine, read_engine_run
from eval.doctor.subject import Subject
from tests.support import planted
from tests.support.engine_folders import write_broken
from tests.support.engine_runs import without_depths, write_engine_run
from tests.support.examinations import TARGET, causes, doctor_config, examined, healthy
from training.data.chat import render_prompt


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a drafter, and two runs: of an engine that reads it, and misreads it."""
    folder = tmp_path_factory.mktemp("engines")
    drafter = healthy(folder)
    tokenizer = load_tokenizer(TARGET)
    prompts = [
        render_prompt(tokenizer, [{"role": "user", "content": planted.question(*pair)}])
        for pair in planted.PAIRS[::2]
    ]
    broken = write_broken(drafter, folder / "broken")
    write_engine_run(folder / "same", TARGET, drafter, drafter, prompts)
    write_engine_run(folder / "other", TARGET, drafter, broken, prompts)
    return folder


@pytest.mark.long
def test_an_engine_that_reads_the_folder_otherwise_is_the_first_cause(
    home: Path, tmp_path: Path
) -> None:
    found = examined(tmp_path, home / "drafter", engine_run=str(home / "other"))
    assert causes(found)[:1] == ["engine"]
    assert "accepted in hf" in found.causes[0].found


def test_an_engine_that_reads_it_as_we_do_has_no_fault(home: Path, tmp_path: Path) -> None:
    found = examined(tmp_path, home / "drafter", engine_run=str(home / "same"))
    assert causes(found) == []
    [engine] = [one for one in found.findings if one.cause == "engine"]
    assert engine.state == "fine" and engine.loss is not None and engine.loss.value == 0


def test_engines_that_report_totals_alone_are_compared_by_them(home: Path) -> None:
    records = read_engine_run(home / "other", home / "drafter", hash_input(TARGET))
    [by_depth] = counts_by_engine(records, 0.0)
    [by_total] = counts_by_engine(without_depths(records), 0.0)
    assert by_depth.ours.accepted == by_total.ours.accepted
    assert by_depth.ours.tested < by_total.ours.tested
    assert by_total.theirs.rate < by_total.ours.rate
    assert counts_by_engine(records, 1.0) == []


def test_a_temperature_that_was_not_measured_is_named(home: Path, tmp_path: Path) -> None:
    found = examined(tmp_path, home / "drafter", engine_run=str(home / "same"), temperature=0.5)
    [engine] = [one for one in found.findings if one.cause == "engine"]
    assert engine.state == "unknown" and "temperature 0.5" in engine.expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job": "eval.compare"}, "is a run of eval.compare"),
        ({"finished": False}, "is not finished"),
        ({"inputs": {"there": "0"}}, "measured the target there, whose hash differs"),
    ],
)
def test_other_runs_are_refused(
    home: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    manifest = json.loads((home / "same" / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **change}))
    (tmp_path / "engine_records.jsonl").write_text("")
    with pytest.raises(UserError, match=words):
        Subject(doctor_config(tmp_path, home / "drafter", engine_run=str(tmp_path)))


def test_a_run_of_another_drafter_and_no_run_are_refused(home: Path, tmp_path: Path) -> None:
    other = planted.write_drafter(tmp_path / "other", TARGET, planted.noisy(TARGET, 0.03))
    with pytest.raises(UserError, match="measured mine, not the content of"):
        Subject(doctor_config(tmp_path, other, engine_run=str(home / "same")))
    with pytest.raises(UserError, match="has no manifest.json, expected the run folder"):
        Subject(doctor_config(tmp_path, home / "drafter", engine_run=str(tmp_path)))


@pytest.mark.long
def test_the_records_of_a_real_engine_are_read(home: Path, tmp_path: Path) -> None:
    """Run eval.run with the engine hf, and examine the drafter with its run folder."""
    from eval.run import run
    from tests.support.engine_evaluations import engine_config

    planted.write_prompts(home / "prompts.jsonl")
    config = engine_config(
        home,
        "evaluated",
        target=doctor_config(tmp_path, home / "drafter").target,
        drafters=[str(home / "drafter")],
        num_draft_tokens=[4],
        max_new_tokens=24,
        max_prompts=12,
        prompt_lookup_control=False,
    )
    found = diagnose(
        Subject(doctor_config(tmp_path, home / "drafter", engine_run=str(run(config))))
    )
    assert causes(found) == []
    [engine] = [one for one in found.findings if one.cause == "engine"]
    assert engine.state == "fine" and "accepted in hf" in engine.found
