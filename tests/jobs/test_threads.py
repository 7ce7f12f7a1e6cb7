"""threads=auto: a run keeps the number of threads that it chose when it started."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decoding.errors import UserError
from eval.measure.records import read_records
from eval.run import run as evaluate
from eval.statistics.schema import read_rows
from jobs.config import JobConfig, TargetConfig
from jobs.run_folder import RunFolder
from jobs.targets import load_job_target
from tests.support import tiny_folders as tiny
from tests.support.regeneration import configured, regenerated, write_chats
from tests.support.regeneration import run as regenerate

DEFAULT = 3  # PyTorch's number of threads in these tests
FILE = "threads_0.json"


@pytest.fixture(autouse=True)
def fastest(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list of the number of threads that timing finds fastest, which tests change."""
    found, before = [1], torch.get_num_threads()

    def choose(target: object) -> int:
        torch.set_num_threads(found[0])
        return found[0]

    monkeypatch.setattr("jobs.targets.choose_threads", choose)
    torch.set_num_threads(DEFAULT)
    yield found
    torch.set_num_threads(before)


def threads_of(target: Path, run: Path | None, default: int = DEFAULT) -> int:
    """Load a target as a new process of a job does, and return its number of threads."""
    torch.set_num_threads(default)
    load_job_target(TargetConfig(path=str(target), device="cpu"), target, "auto", run)
    return torch.get_num_threads()


def reopen(folder: Path) -> None:
    """Make a finished run an interrupted one."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))
    torch.set_num_threads(DEFAULT)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "a control"])
def test_a_resumed_evaluation_keeps_its_number_of_threads(
    kept: bool, tmp_path: Path, fastest: list[int], capsys: pytest.CaptureFixture[str]
):
    """Check the threads of the rows after a resume; without the file they would change."""
    tiny.save(tmp_path / "target", layers=3)
    tiny.prompts(tmp_path / "prompts.jsonl", count=5)
    settings = {"temperatures": [0.0], "num_draft_tokens": [2], "sweep": [], "drafters": []}
    cfg = tiny.config(tmp_path, "run", threads="auto", **settings)
    folder = evaluate(cfg)
    assert "fastest with 1 of 3" in capsys.readouterr().out
    reopen(folder)
    records = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "records.jsonl").write_bytes(b"".join(records[:-1]))
    if not kept:
        (folder / FILE).unlink()
    fastest[0] = 2
    evaluate(cfg)
    assert len(read_records(folder / "records.jsonl")) == len(records)
    assert {row.threads for row in read_rows(folder / "results.jsonl")} == {1 if kept else 2}
    lines = [line for line in capsys.readouterr().out.splitlines() if "threads: " in line]
    again = "threads: 1 of 3, as this run chose when it started"
    assert lines == [again if kept else "threads: a step of the target is fastest with 2 of 3"]


def test_a_resumed_generation_of_answers_keeps_its_number_of_threads(
    tiny_target: Path, tmp_path: Path, fastest: list[int], capsys: pytest.CaptureFixture[str]
):
    given = (tiny_target, write_chats(tmp_path / "chats.jsonl"), tmp_path / "run", "threads=auto")
    regenerate(configured(*given, "dry_run=true"))
    assert not (tmp_path / "run").exists(), "a dry run keeps nothing"
    torch.set_num_threads(DEFAULT)
    regenerated(*given)
    reopen(tmp_path / "run")
    (tmp_path / "run" / "answers" / "rank_0.jsonl").unlink()
    fastest[0] = 2
    regenerate(configured(*given))
    assert "threads: 1 of 3, as this run chose" in capsys.readouterr().out


def test_a_choice_counts_for_its_run_and_default_alone(
    tiny_target: Path, tmp_path: Path, fastest: list[int]
):
    """Check when a choice is made anew: before the manifest, of another number, and in no run."""
    folder = RunFolder(JobConfig(job="a.b", output_dir=str(tmp_path / "run")))
    assert threads_of(tiny_target, folder.path) == 1
    fastest[0] = 2
    assert threads_of(tiny_target, folder.path) == 2, "a start that failed decides nothing"
    folder.write_manifest([], {}, finished=False)
    fastest[0] = 1
    assert threads_of(tiny_target, folder.path) == 2
    assert threads_of(tiny_target, folder.path, default=4) == 1
    assert threads_of(tiny_target, None) == 1
    fastest[0] = 3
    assert [threads_of(tiny_target, folder.path, default) for default in (3, 4)] == [2, 1]


def test_a_start_that_fails_leaves_no_choice(tiny_target: Path, tmp_path: Path):
    """Control: a run that has begun keeps it."""
    for begun in (False, True):
        folder = RunFolder(JobConfig(job="a.b", output_dir=str(tmp_path / str(begun))))
        threads_of(tiny_target, folder.path)
        assert (folder.path / FILE).is_file()
        if begun:
            folder.write_manifest([], {}, finished=False)
        del folder
    assert not (tmp_path / "False").exists()
    assert (tmp_path / "True" / FILE).is_file()


@pytest.mark.parametrize("content", ["", "[1]", '{"3": 0}', '{"3": 4}', '{"3": true}', '{"x": 1}'])
def test_a_damaged_choice_is_refused(content: str, tiny_target: Path, tmp_path: Path):
    folder = RunFolder(JobConfig(job="a.b", output_dir=str(tmp_path / "run")))
    folder.write_manifest([], {}, finished=False)
    (folder.path / FILE).write_text(content)
    with pytest.raises(UserError, match=f"{FILE} is damaged: .* Delete it: the number of threads"):
        threads_of(tiny_target, folder.path)
