"""A cache of the Hugging Face Hub on the disk, which the Hub's client reads offline."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

OLD, NEW = "a" * 40, "b" * 40  # commits
NAME = "an-owner/a.model"


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with an empty cache of the Hub, and return the cache's path."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(folder)
    return folder / "hub"


def add_snapshot(cache: Path, source: Path, commit: str) -> Path:
    """Put a model folder into the cache as the newest commit of NAME, and return its snapshot."""
    home = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        blob = home / "blobs" / f"{commit}{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (home / "refs" / "main").write_text(commit)
    return snapshot
