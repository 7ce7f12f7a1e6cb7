"""Files of a run folder that were damaged: no job ends in a traceback, and none takes a changed
artefact for a finished one.

A job either goes on from the last good state, or raises a UserError that names the file.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from decoding.errors import UserError
from tests.support.small_jobs import JOBS, configured


def torn(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    """One bit in the middle."""
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    return bytes(changed)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "torn": torn,
    "flipped": flipped,
    "binary": lambda content: bytes(range(256)) * 4,
    "a list": lambda content: b"[1, 2]\n",
    "a number": lambda content: b"7\n",
    "an object": lambda content: b"{}\n",
    "nested": lambda content: b"[" * 1500,
}
# What is read of a run that has not ended, by job.
OPEN = {
    "distill.train": ["checkpoints/step_000002/state.json", "metrics.jsonl"],
    "recurrent_drafting.train": ["metrics.jsonl"],
    "distill.prune": ["work/1/done.json"],
    "distill.regenerate": ["answers/rank_0.jsonl"],
    "distill.skip_search": ["search.jsonl", "costs.json"],
    "eval.run": ["records.jsonl", "parts.jsonl", "seconds.json"],
}
# What a run leaves, by job.
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
# Of these jobs every file in four ways, of the others in one; the short suite leaves it at that, as
# all read by the same few functions (tests/jobs/test_run_files.py).
BOTH, FOUR, ONE = ("distill.train", "eval.run"), ("emptied", "torn", "binary", "a list"), ("torn",)


@pytest.fixture(scope="module")
def finished(
    tiny_target: Path, padded_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], str]:
    """Copies of finished runs, each made once: called with a job and the folder of the copy.
    Returns what the job runs on.
    """
    home = tmp_path_factory.mktemp("finished")

    def copied(job: str, folder: Path) -> str:
        named = str(padded_target if job == "distill.compact" else tiny_target)
        if job == "eval.compare":
            copied("eval.run", home / "evaluated")
            named = str(home / "evaluated")
        if not (home / job).exists():
            JOBS[job].run(configured(job, named, home / job))
        if not folder.exists():
            shutil.copytree(home / job, folder)
        return named

    return copied


def reopen(folder: Path) -> None:
    """Make a finished run one that was stopped before its end."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))


def words_of(job: str, named: str, folder: Path) -> str:
    """Run a job; what its UserError says, or nothing where it came to its end."""
    try:
        JOBS[job].run(configured(job, named, folder))
    except UserError as error:
        return str(error)
    return ""


def goes_on_or_names(job: str, named: str, folder: Path, file: str) -> str:
    """Run a job again: it comes to its end, or names the file with a way out. Returns
    what it says.
    """
    words = words_of(job, named, folder)
    if words:
        assert file.rpartition("/")[2] in words
        assert any(
            way in words
            for way in ("elete", "Remove this line", "Evaluate again", "another output_dir=")
        )
    else:
        assert json.loads((folder / "manifest.json").read_text())["finished"]
    return words


def cases(files: dict[str, list[str]], kinds: list[str]) -> list[object]:
    return [
        pytest.param(
            job,
            file,
            kind,
            id=f"{job} {file} {kind}",
            marks=[] if kind in (FOUR if job in BOTH else ONE) else [pytest.mark.long],
        )
        for job, of_job in files.items()
        for file in of_job
        for kind in kinds
    ]


@pytest.mark.parametrize(
    ("job", "file", "kind"),
    cases({job: FOR_ALL for job in JOBS if job != "distill.quality"}, [*DAMAGES]),
)
def test_a_damaged_manifest_or_configuration_is_named(
    job: str, file: str, kind: str, finished: Callable[[str, Path], str], tmp_path: Path
):
    folder = tmp_path / "run"
    named = finished(job, folder)
    path = folder / file
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    words = goes_on_or_names(job, named, folder, file)
    # One bit may lie in a figure that nothing reads.
    assert words or (file, kind) == ("manifest.json", "flipped")


@pytest.mark.parametrize(("job", "file", "kind"), cases(OPEN, [*DAMAGES]))
def test_an_interrupted_run_with_a_damaged_file_goes_on_or_names_it(
    job: str, file: str, kind: str, finished: Callable[[str, Path], str], tmp_path: Path
):
    folder = tmp_path / "run"
    named = finished(job, folder)
    reopen(folder)
    path = folder / file
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    goes_on_or_names(job, named, folder, file)


@pytest.mark.parametrize(("job", "file", "kind"), cases(ARTEFACTS, ["torn", "flipped"]))
def test_a_finished_run_whose_artefact_changed_makes_it_again(
    job: str,
    file: str,
    kind: str,
    finished: Callable[[str, Path], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    folder = tmp_path / "run"
    named = finished(job, folder)
    path = folder / file
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[kind](whole))
    JOBS[job].run(configured(job, named, folder))
    assert (
        f"{path} has changed since the run was finished: it is written again"
        in capsys.readouterr().out
    )
    if job != "eval.run":  # whose times are measured anew where records are gone
        assert path.read_bytes() == whole
    JOBS[job].run(configured(job, named, folder))
    assert "written again" not in capsys.readouterr().out


def test_a_run_of_an_earlier_version_is_still_finished(
    finished: Callable[[str, Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its manifest has no hashes of artefacts, its configuration no stamp and not every key of
    today's.
    """
    folder = tmp_path / "run"
    named = finished("distill.train", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["artefacts"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = (folder / "config.yaml").read_text().splitlines()
    kept = [line for line in lines[1:] if "trust_remote_code" not in line]
    assert lines[0].startswith("# sha256") and len(kept) == len(lines) - 2
    (folder / "config.yaml").write_text("\n".join(kept) + "\n")
    (folder / "drafter" / "tokenizer.json").write_text("{}")  # nothing is known of it
    JOBS["distill.train"].run(configured("distill.train", named, folder))
    assert "finished before" in capsys.readouterr().out
    (folder / "drafter" / "model.safetensors").unlink()
    JOBS["distill.train"].run(configured("distill.train", named, folder))
    assert "is missing from a finished run: it is written again" in capsys.readouterr().out


@pytest.mark.parametrize(
    "file", ["results.jsonl", "records.jsonl", "drafters.json", "manifest.json", "config.yaml"]
)
@pytest.mark.parametrize(("kind", "hashed"), [*((kind, False) for kind in FOUR), ("flipped", True)])
def test_a_comparison_names_the_damaged_file_of_a_run(
    file: str, kind: str, hashed: bool, finished: Callable[[str, Path], str], tmp_path: Path
):
    """hashed=False: of a run of an earlier version, whose manifest lists no artefacts."""
    folder = tmp_path / "run"
    finished("eval.run", folder)
    if not hashed:
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["artefacts"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    path = folder / file
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    silent = (file, kind) == ("manifest.json", "flipped") or (
        not hashed and file in ("results.jsonl", "drafters.json")
    )
    words = words_of("eval.compare", str(folder), tmp_path / "compared")
    if words:
        assert str(folder) in words
        assert file in words or (file, kind) == ("manifest.json", "flipped"), (
            "whose hashes are of other files"
        )
    else:
        assert silent


def test_every_job_refuses_a_folder_that_another_command_holds(
    finished: Callable[[str, Path], str], tmp_path: Path
):
    lock = {
        "host": "elsewhere",
        "pid": 1,
        "process_started": "1",
        "since": "long ago",
        "command": "train",
    }
    for job in (job for job in JOBS if job != "distill.quality"):
        folder = tmp_path / job
        named = finished(job, folder)
        (folder / ".lock").write_text(json.dumps(lock))
        with pytest.raises(
            UserError, match=rf"{job} is in use by process 1 on elsewhere, since long ago"
        ):
            JOBS[job].run(configured(job, named, folder))
