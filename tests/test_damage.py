"""Damaged files of run folders: no job ends in a traceback or accepts a changed artefact.

A job either resumes from the last good state, or raises a UserError that names the file.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from decoding.errors import UserError
from tests.support.small_jobs import JOBS, configured
from tests.support.tiers import tiered

pytestmark = pytest.mark.usefixtures("undrawn")


def truncate(content: bytes) -> bytes:
    """Return the first half of the content."""
    return content[: len(content) // 2]


def flip_bit(content: bytes) -> bytes:
    """Return the content with one bit flipped in the middle."""
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    return bytes(changed)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "torn": truncate,
    "flipped": flip_bit,
    "binary": lambda content: bytes(range(256)) * 4,
    "a list": lambda content: b"[1, 2]\n",
    "a number": lambda content: b"7\n",
    "an object": lambda content: b"{}\n",
    "nested": lambda content: b"[" * 1500,
}
# job -> files that an unfinished run reads
OPEN = {
    "distill.train": ["checkpoints/step_000002/state.json", "metrics.jsonl"],
    "recurrent_drafting.train": ["metrics.jsonl"],
    "distill.prune": ["work/1/done.json"],
    "distill.regenerate": ["answers/rank_0.jsonl"],
    "distill.skip_search": ["search.jsonl", "costs.json"],
    "eval.run": ["records.jsonl", "rounds.jsonl", "parts.jsonl", "seconds.json"],
}
# job -> artefacts of a run
ARTEFACTS = {
    "distill.train": ["drafter/model.safetensors", "drafter/config.json", "drafter/tokenizer.json"],
    "distill.pretrain": ["model/model.safetensors"],
    "distill.prune": ["student/model.safetensors"],
    "distill.regenerate": ["chats.json"],
    "distill.skip_search": ["skips.json"],
    "distill.compact": ["model/model.safetensors"],
    "recurrent_drafting.train": ["drafter/model.safetensors"],
    "eval.run": ["results.jsonl", "report.html", "records.jsonl", "drafters.json"],
}
FOR_ALL = ["manifest.json", "config.yaml"]
# In the short suite, files of BOTH jobs have one damage, as all jobs read with the functions of
# tests/jobs/test_run_files.py. The long tier has FOUR damages for all jobs.
BOTH, FOUR = ("distill.train", "eval.run"), ("emptied", "torn", "binary", "a list")


@pytest.fixture(scope="module")
def finished_run(
    tiny_target: Path, padded_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], str]:
    """Return a function that copies the finished run of a job to a folder.

    Each job runs once. The function returns the input of the job.
    """
    home = tmp_path_factory.mktemp("finished")

    def copied(job: str, folder: Path) -> str:
        model = str(padded_target if job == "distill.compact" else tiny_target)
        if job == "eval.compare":
            copied("eval.run", home / "evaluated")
            model = str(home / "evaluated")
        if not (home / job).exists():
            JOBS[job].run(configured(job, model, home / job))
        if not folder.exists():
            shutil.copytree(home / job, folder)
        return model

    return copied


def mark_unfinished(folder: Path) -> None:
    """Mark a finished run as unfinished."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))


def error_of(job: str, model: str, folder: Path) -> str:
    """Run a job, and return the text of its UserError, or "" if it succeeds."""
    try:
        JOBS[job].run(configured(job, model, folder))
    except UserError as error:
        return str(error)
    return ""


def check_resumes_or_names(job: str, model: str, folder: Path, file: str) -> str:
    """Run a job again, and check that it succeeds or that its error names the file and a remedy.

    Returns the text of the error, or "".
    """
    words = error_of(job, model, folder)
    if words:
        assert file.rpartition("/")[2] in words
        assert any(
            way in words
            for way in ("elete", "Remove this line", "Evaluate again", "another output_dir=")
        )
    else:
        assert json.loads((folder / "manifest.json").read_text())["finished"]
    return words


def tier(job: str, kind: str) -> list[pytest.MarkDecorator]:
    """Return the mark of the tier in which a damage to a job's file is tested."""
    if kind == "torn" and job in BOTH:
        return []
    return [pytest.mark.long if kind in FOUR else pytest.mark.exhaustive]


def cases(files: dict[str, list[str]], kinds: list[str]) -> list[object]:
    """Return a parameter per job, file and kind of damage, in three tiers."""
    return [
        pytest.param(
            job,
            file,
            kind,
            id=f"{job} {file} {kind}",
            marks=tier(job, kind),
        )
        for job, of_job in files.items()
        for file in of_job
        for kind in kinds
    ]


@pytest.mark.parametrize(
    ("job", "file", "kind"),
    cases({job: FOR_ALL for job in JOBS if job != "distill.quality"}, [*DAMAGES]),
)
def test_a_damaged_manifest_or_configuration_is_an_error(
    job: str, file: str, kind: str, finished_run: Callable[[str, Path], str], tmp_path: Path
):
    folder = tmp_path / "run"
    model = finished_run(job, folder)
    path = folder / file
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    words = check_resumes_or_names(job, model, folder, file)
    # One bit may change a figure that nothing reads.
    assert words or (file, kind) == ("manifest.json", "flipped")


@pytest.mark.parametrize(("job", "file", "kind"), cases(OPEN, [*DAMAGES]))
def test_an_interrupted_run_with_a_damaged_file_resumes_or_names_it(
    job: str, file: str, kind: str, finished_run: Callable[[str, Path], str], tmp_path: Path
):
    folder = tmp_path / "run"
    model = finished_run(job, folder)
    mark_unfinished(folder)
    path = folder / file
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    check_resumes_or_names(job, model, folder, file)


@pytest.mark.parametrize(("job", "file", "kind"), cases(ARTEFACTS, ["torn", "flipped"]))
def test_a_changed_artefact_of_a_finished_run_is_written_again(
    job: str,
    file: str,
    kind: str,
    finished_run: Callable[[str, Path], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    folder = tmp_path / "run"
    model = finished_run(job, folder)
    path = folder / file
    content = path.read_bytes()
    path.write_bytes(DAMAGES[kind](content))
    JOBS[job].run(configured(job, model, folder))
    assert (
        f"{path} has changed since the run was finished: it is written again"
        in capsys.readouterr().out
    )
    if job != "eval.run":  # it measures times again where records are missing
        assert path.read_bytes() == content
    JOBS[job].run(configured(job, model, folder))
    assert "written again" not in capsys.readouterr().out


def test_a_finished_run_of_an_earlier_version_is_skipped(
    finished_run: Callable[[str, Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Check a run whose manifest lacks the artefacts' hashes, and whose configuration lacks a key.

    Changed artefacts are then accepted, but a missing one is written again. The configuration has
    no hash either.
    """
    folder = tmp_path / "run"
    model = finished_run("distill.train", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["artefacts"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = (folder / "config.yaml").read_text().splitlines()
    kept = [line for line in lines[1:] if "trust_remote_code" not in line]
    assert lines[0].startswith("# sha256") and len(kept) == len(lines) - 2
    (folder / "config.yaml").write_text("\n".join(kept) + "\n")
    (folder / "drafter" / "tokenizer.json").write_text("{}")  # without a known hash
    JOBS["distill.train"].run(configured("distill.train", model, folder))
    assert "finished before" in capsys.readouterr().out
    (folder / "drafter" / "model.safetensors").unlink()
    JOBS["distill.train"].run(configured("distill.train", model, folder))
    assert "is missing from a finished run: it is written again" in capsys.readouterr().out


@pytest.mark.parametrize(
    "file", ["results.jsonl", "records.jsonl", "drafters.json", "manifest.json", "config.yaml"]
)
@pytest.mark.parametrize(
    ("kind", "hashed"),
    tiered(
        [*((kind, False) for kind in FOUR), ("flipped", True)], [("torn", False), ("flipped", True)]
    ),
)
def test_a_comparison_names_the_damaged_file_of_a_run(
    file: str, kind: str, hashed: bool, finished_run: Callable[[str, Path], str], tmp_path: Path
):
    """Check that eval.compare's error names the file, or that the damage has no effect.

    hashed: False is a run of an earlier version, whose manifest lists no artefacts.
    """
    folder = tmp_path / "run"
    finished_run("eval.run", folder)
    if not hashed:
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["artefacts"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    path = folder / file
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    silent = (file, kind) == ("manifest.json", "flipped") or (
        not hashed and file in ("results.jsonl", "drafters.json")
    )
    words = error_of("eval.compare", str(folder), tmp_path / "compared")
    if words:
        assert str(folder) in words
        assert file in words or (file, kind) == ("manifest.json", "flipped"), (
            "the manifest contains hashes of other files"
        )
    else:
        assert silent


@pytest.mark.parametrize("job", tiered([job for job in JOBS if job != "distill.quality"], BOTH))
def test_every_job_refuses_a_locked_folder(
    job: str, finished_run: Callable[[str, Path], str], tmp_path: Path
):
    lock = {
        "host": "elsewhere",
        "pid": 1,
        "process_started": "1",
        "since": "long ago",
        "command": "train",
    }
    folder = tmp_path / job
    model = finished_run(job, folder)
    (folder / ".lock").write_text(json.dumps(lock))
    with pytest.raises(
        UserError, match=rf"{job} is in use by process 1 on elsewhere, since long ago"
    ):
        JOBS[job].run(configured(job, model, folder))
