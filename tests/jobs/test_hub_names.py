"""Test that jobs take names on the Hugging Face Hub, and pin their commits."""

import json
import re
from pathlib import Path

import pytest

from decoding.errors import UserError
from jobs.paths import model_is_here, resolve_model
from tests.support.hub_cache import NAME, NEW, OLD, add_snapshot, use_cache
from tests.support.openai_server import serve
from tests.support.regeneration import configured, run, write_chats
from tests.support.small_jobs import JOBS
from tests.support.small_jobs import configured as small_configured


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(tmp_path, monkeypatch)


def regenerate(target: str, folder: Path, *overrides: str) -> bytes:
    chats = write_chats(folder.parent / "chats.jsonl")
    return run(configured(Path(target), chats, folder, *overrides)).read_bytes()


def test_a_job_takes_names_and_pins_their_commits(cache: Path, tiny_target: Path, tmp_path: Path):
    add_snapshot(cache, tiny_target, OLD)
    by_path = regenerate(str(tiny_target), tmp_path / "by_path")
    assert regenerate(NAME, tmp_path / "run", f"drafters=[{NAME}]") == by_path
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["revisions"] == {NAME: OLD}
    assert "revisions" not in json.loads((tmp_path / "by_path" / "manifest.json").read_text())


def test_an_interrupted_run_refuses_another_commit(cache: Path, tiny_target: Path, tmp_path: Path):
    add_snapshot(cache, tiny_target, OLD)
    regenerate(NAME, tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "finished": False}))
    regenerate(NAME, tmp_path / "run")  # control: the same commit
    file.write_text(json.dumps({**json.loads(file.read_text()), "finished": False}))
    add_snapshot(cache, tiny_target, NEW)
    with pytest.raises(UserError, match=rf"is at commit {NEW} .* with {OLD}.*{NAME}@{OLD}"):
        regenerate(NAME, tmp_path / "run")


def test_a_server_needs_no_weights_of_a_name(cache: Path, tiny_target: Path, tmp_path: Path):
    (add_snapshot(cache, tiny_target, OLD) / "model.safetensors").unlink()
    assert not model_is_here(NAME) and model_is_here(NAME, weights=False)
    given = ("temperature=0", "data.max_samples=2")
    with serve(tiny_target) as served:
        found = regenerate(NAME, tmp_path / "run", *given, f"server={served.url}")
    assert found == regenerate(str(tiny_target), tmp_path / "local", *given)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["revisions"] == {NAME: OLD}


def test_a_name_that_is_nowhere_is_refused(cache: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"is no file or folder .* hf download an-owner/a.model"):
        regenerate(NAME, tmp_path / "run")
    with pytest.raises(UserError, match=r"is no file or folder .* hf download an-owner/a.model"):
        resolve_model(NAME)
    assert resolve_model("embedded:target").is_dir()


@pytest.mark.parametrize(
    "name", ["nowhere", "./an-owner/a.model", "an-owner/a.model/main", "~/a.model"]
)
def test_a_missing_folder_is_refused_with_what_was_tried(name: str, cache: Path):
    """Check texts that are no names on the Hub; a folder that exists is the control."""
    words = rf"{re.escape(name)} does not exist, expected a model folder .*Hub \(OWNER/NAME"
    with pytest.raises(UserError, match=words):
        resolve_model(name)
    Path("nowhere").mkdir()
    assert resolve_model("nowhere") == Path("nowhere")


@pytest.mark.long
@pytest.mark.parametrize("job", sorted({*JOBS} - {"eval.compare", "distill.quality"}))
def test_every_job_takes_a_name(job: str, cache: Path, padded_target: Path, tmp_path: Path):
    add_snapshot(cache, padded_target, OLD)
    JOBS[job].run(small_configured(job, NAME, tmp_path / "run"))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["finished"] and manifest["revisions"] == {NAME: OLD}


@pytest.mark.long
def test_another_engine_takes_a_name(cache: Path, padded_target: Path, tmp_path: Path):
    add_snapshot(cache, padded_target, OLD)
    config = small_configured("eval.run", NAME, tmp_path / "run")
    config.engine, config.max_seconds = ["ours", "hf"], 0.0
    JOBS["eval.run"].run(config)
    assert '"hf' in (tmp_path / "run" / "engine_records.jsonl").read_text()
