"""Every trainer begins with the doctor's page."""

from __future__ import annotations

from pathlib import Path

import pytest

import heads.train
from tests.support.configurations import configuration
from tests.support.small_jobs import JOBS, configured
from training.doctor import PAGE

TRAINERS = ("distill.train", "recurrent_drafting.train", "heads.train", "distill.pretrain")
CHECKS = ("mask", "tokenizer", "template", "cost", "disk")


def train(job: str, target: Path, folder: Path, *overrides: str) -> None:
    """Run two steps of a trainer."""
    if job != "heads.train":
        JOBS[job].run(configured(job, target, folder, *overrides))
        return
    small = JOBS["recurrent_drafting.train"].overrides
    given = ("head=medusa", f"target.path={target}", f"output_dir={folder}")
    heads.train.run(configuration(job, *given, *small, *overrides))


@pytest.mark.parametrize("job", TRAINERS)
def test_every_trainer_begins_with_the_page(
    job: str, tiny_target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(job, tiny_target, tmp_path)
    printed, html = capfd.readouterr().out, (tmp_path / PAGE).read_text()
    assert printed.count("doctor: sample ") == 1
    for subject in CHECKS:
        assert f"\n  {subject:<10}" in printed and f"<dt>{subject}</dt>" in html
    assert "train chats: " in html and "dropped: over data.max_samples" in html
    # pretraining learns whole chats, and has no target that could have written them
    for words in ("texts: how likely", "<dt>ends</dt>"):
        assert (words in html) == (job != "distill.pretrain")
    assert "class=bad" not in html
    checkpoints = [file.stat().st_mtime_ns for file in (tmp_path / "checkpoints").rglob("*")]
    assert (tmp_path / PAGE).stat().st_mtime_ns < min(checkpoints)


def test_control_a_trainer_without_the_page(
    tiny_target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train("distill.train", tiny_target, tmp_path, "doctor=false")
    assert "doctor: sample " not in capfd.readouterr().out and not (tmp_path / PAGE).exists()
