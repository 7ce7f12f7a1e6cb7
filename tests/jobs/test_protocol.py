"""The protocol of jobs with an artefact, tested on a job that copies a file."""

import gc
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from decoding.errors import UserError
from jobs.amounts import PLANNED
from jobs.config import JobConfig, ParallelConfig
from jobs.protocol import Job, Run


@dataclass
class CopyConfig(JobConfig):
    """Settings of the copying job; `text` is the path of the file to copy."""

    text: str = ""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


class Copy(Job[CopyConfig]):
    """Job that copies a text file."""

    artefact = "copy.txt"

    def __init__(self, config: CopyConfig) -> None:
        super().__init__(config)
        if not config.text:
            raise UserError("text is empty, expected a file")

    def inputs(self) -> list[Path]:
        return [Path(self.config.text)]

    def dry_run(self, run: Run) -> float | None:
        print("would copy")
        return 7.0

    def prepare(self, run: Run) -> None:
        print("prepared")

    def work(self, run: Run) -> None:
        run.artefact.write_text(run.inputs[0].read_text())
        run.folder.write_manifest(run.inputs, {}, finished=True)
        print("copied")


@pytest.fixture
def config(tmp_path: Path) -> CopyConfig:
    (tmp_path / "text").write_text("words")
    return CopyConfig(job="copy", output_dir=str(tmp_path / "run"), text=str(tmp_path / "text"))


def manifest(config: CopyConfig) -> dict[str, object]:
    return json.loads((Path(config.output_dir) / "manifest.json").read_text())


def test_a_finished_job_is_skipped_until_its_artefact_changes(
    config: CopyConfig, capsys: pytest.CaptureFixture[str]
):
    artefact = Copy(config).run()
    assert artefact.read_text() == "words" and manifest(config)["finished"] is True
    assert capsys.readouterr().out.split() == ["prepared", "copied"]
    assert Copy(config).run() == artefact
    assert capsys.readouterr().out == f"finished before: {artefact}\n"
    artefact.write_text("other words")  # control: a changed artefact is written again
    Copy(config).run()
    assert artefact.read_text() == "words" and "copied" in capsys.readouterr().out


def test_a_dry_run_does_no_work_and_records_its_cost(
    config: CopyConfig, capsys: pytest.CaptureFixture[str]
):
    config.dry_run = True
    assert not Copy(config).run().exists()
    assert capsys.readouterr().out == "would copy\n"
    written = manifest(config)
    assert (written["finished"], written["metrics"]) == (False, {PLANNED: 7.0})
    assert set(written["inputs"].values()) == {"not read (dry run)"}  # type: ignore[attr-defined]


def test_an_invalid_configuration_leaves_no_folder(config: CopyConfig):
    config.text = ""
    with pytest.raises(UserError, match="text is empty"):
        Copy(config).run()
    assert not Path(config.output_dir).exists()


def test_a_refused_input_leaves_no_folder(config: CopyConfig, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise UserError("the text is unfit")

    monkeypatch.setattr(Copy, "prepare", refuse)
    with pytest.raises(UserError, match="unfit"):
        Copy(config).run()
    gc.collect()  # the traceback holds the folder
    assert not Path(config.output_dir).exists()
    monkeypatch.undo()
    assert Copy(config).run().exists()  # control


def test_the_starting_process_launches_ranks_on_the_saved_configuration(
    config: CopyConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Check that the starting process only launches ranks, with the saved configuration.

    A rank does the work and launches no further ranks.
    """
    launched: list[tuple[str, Path, int]] = []
    monkeypatch.setattr("jobs.protocol.launch", lambda *arguments: launched.append(arguments))
    config.parallel = ParallelConfig(kind="ddp", processes=2)
    assert not Copy(config).run().exists()
    assert launched == [("copy", Path(config.output_dir) / "config.yaml", 2)]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Copy(config).run().exists() and len(launched) == 1
