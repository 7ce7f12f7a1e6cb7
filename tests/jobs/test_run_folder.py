"""Hashes of a run's inputs: a large file is read once, until it changes."""

from pathlib import Path

import pytest

import decoding.models.folder
from decoding.models.folder import hash_input, sha256


def test_a_large_file_is_hashed_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256(path)

    monkeypatch.setattr(decoding.models.folder, "sha256", counted)
    monkeypatch.setattr(decoding.models.folder, "_LARGE", 8)
    (tmp_path / "large").write_text("0123456789")
    (tmp_path / "small").write_text("01")
    first = hash_input(tmp_path)
    assert hash_input(tmp_path) == first and hash_input(tmp_path / "large") == sha256(
        tmp_path / "large"
    )
    assert sorted(hashed) == ["large", "small", "small"]
    (tmp_path / "large").write_text("0123456789+")
    assert hash_input(tmp_path) != first
    assert hashed.count("large") == 2
