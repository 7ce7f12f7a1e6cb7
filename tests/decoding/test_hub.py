"""Test models named as on the Hugging Face Hub, with a cache on the disk and without a network."""

import json
import shutil
from pathlib import Path

import pytest

import decoding
from decoding.errors import UserError
from decoding.models.hub import find_cached, find_folder, name_of, parse_hub_name, revision_of
from jobs.paths import resolve
from tests.support.hub_cache import NAME, NEW, OLD, add_snapshot, use_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("an-owner/a.model", ("an-owner/a.model", None)),
        ("an-owner/a.model@main", ("an-owner/a.model", "main")),
        (f"an-owner/a.model@{OLD}", ("an-owner/a.model", OLD)),
        ("an-owner/a.model@refs/pr/1", ("an-owner/a.model", "refs/pr/1")),
        ("model", None),
        ("a/b/c", None),
        ("./a/b", None),
        ("/a/b", None),
        ("~/a", None),
        ("a/b@", None),
        ("a/b..c", None),
        ("prompt_lookup", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(text: str, expected: tuple[str, str | None] | None):
    assert parse_hub_name(text) == expected


def test_a_name_is_found_in_the_cache_with_its_commit(cache: Path, tiny_target: Path):
    old, new = add_snapshot(cache, tiny_target, OLD), add_snapshot(cache, tiny_target, NEW)
    assert find_folder(NAME) == new == find_cached(NAME) == find_folder(f"{NAME}@main")
    assert find_folder(f"{NAME}@{OLD}") == old
    assert revision_of(new) == revision_of(new / "config.json") == (NAME, NEW)
    assert name_of(new) == "a.model" and revision_of(tiny_target) is None


def test_a_path_on_the_disk_wins(cache: Path, tiny_target: Path, tmp_path: Path):
    add_snapshot(cache, tiny_target, OLD)
    shutil.copytree(tiny_target, tmp_path / NAME)
    assert find_folder(NAME) == Path(NAME) and parse_hub_name(NAME) is None


@pytest.mark.parametrize("weights", [True, False])
def test_an_incomplete_snapshot_is_not_used(
    weights: bool, cache: Path, tiny_target: Path, tmp_path: Path
):
    shutil.copytree(tiny_target, tmp_path / "source")
    lost = "*.safetensors" if weights else "tokenizer*"
    for file in (tmp_path / "source").glob(lost):
        file.unlink()
    folder = add_snapshot(cache, tmp_path / "source", OLD)
    assert find_cached(NAME, weights) is None
    what = "safetensors" if weights else "a tokenizer"
    with pytest.raises(UserError, match=rf"{folder}, lacks {what} \(found config.json"):
        find_folder(NAME, weights)
    assert find_folder(NAME, not weights) == folder, "control: what is there is used"


def test_a_snapshot_without_a_shard_of_its_index_is_not_used(
    cache: Path, tiny_target: Path, tmp_path: Path
):
    shutil.copytree(tiny_target, tmp_path / "source")
    index = {"weight_map": {"x": "model-00002-of-00002.safetensors", "y": "model.safetensors"}}
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    add_snapshot(cache, tmp_path / "source", OLD)
    assert find_cached(NAME) is None


@pytest.mark.parametrize("index", [{}, {"weight_map": ["model.safetensors"]}])
def test_a_cached_index_without_files_is_refused(
    index: dict[str, object], cache: Path, tiny_target: Path, tmp_path: Path
):
    shutil.copytree(tiny_target, tmp_path / "source")
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    add_snapshot(cache, tmp_path / "source", OLD)
    with pytest.raises(UserError, match=r"index\.json has no weight_map, expected the file of"):
        find_folder(NAME)


def test_a_name_that_is_nowhere_has_both_readings(cache: Path):
    words = (
        r"an-owner/a.model(@v2)? is no file or folder \(working folder: .*\), and as a name on the "
        r"Hugging Face Hub it is not in the local cache, .* HF_HUB_OFFLINE is set .* Correct the "
        r"path, or with a network run hf download an-owner/a.model"
    )
    with pytest.raises(UserError, match=words + "$"):
        find_folder(NAME)
    with pytest.raises(UserError, match=words + " --revision v2$"):
        find_folder(f"{NAME}@v2")
    for target, drafter in ((NAME, None), (resolve("embedded:target"), NAME)):
        with pytest.raises(UserError, match=words):
            decoding.load(target, drafter)


def test_target_and_drafter_load_by_name(cache: Path, tiny_target: Path):
    add_snapshot(cache, tiny_target, OLD)
    by_name = decoding.load(NAME, NAME, dtype="float64")
    by_mapping = decoding.load(NAME, {"use": "ranked_tree", "folder": NAME}, dtype="float64")
    by_path = decoding.load(tiny_target, dtype="float64")
    texts = {
        decoding.generate(engine, "def f(x):", max_new_tokens=12).text
        for engine in (by_name, by_mapping, by_path)
    }
    assert len(texts) == 1 and by_name.target.name == "a.model"
