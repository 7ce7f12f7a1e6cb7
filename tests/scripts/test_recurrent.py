"""The recurrent drafter's benchmark at toy size: both sides compute the same loss, and the published one looks where it says."""

import json
from pathlib import Path

import pytest
import torch

from scripts.bench import common, recurrent
from scripts.bench.recurrent_training import IGNORED, published_loss


def test_training_runs_and_its_sides_compute_the_same(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    small = ["max_length=256", "rows=2", "forwards=1", "steps=1", "rounds=1", "threads=1", "dtype=float32"]
    monkeypatch.setattr("sys.argv", ["recurrent.py", "part=training", f"target={tiny_target}", *small])
    recurrent.main()
    figures = json.loads((tmp_path / "recurrent_training.json").read_text())["figures"]
    same = figures["loss_on_the_same_chats"]
    assert same["ours"] == pytest.approx(same["published"], rel=1e-3)
    assert all(value > 0 for value in figures["supervised_tokens_per_second"].values())
    assert figures["peak_of_published_over_ours"] > 1


def test_an_unknown_part_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["recurrent.py", "part=sleeping"])
    with pytest.raises(SystemExit, match="part is 'sleeping', expected one of training"):
        recurrent.main()


def test_the_published_loss_is_the_sum_of_means_over_shifted_labels():
    torch.manual_seed(0)
    logits = torch.randn(2, 1, 6, 7)
    labels = torch.tensor([[IGNORED, IGNORED, 3, 4, IGNORED, 6]])
    loss, log = published_loss(logits, labels)
    log_q = torch.log_softmax(logits, dim=-1)
    first = -(log_q[0, 0, 0, 3] + log_q[0, 0, 1, 4] + log_q[0, 0, 3, 6]) / 3
    second = -(log_q[1, 0, 0, 4] + log_q[1, 0, 2, 6]) / 2
    torch.testing.assert_close(loss, first + second)
    assert set(log) == {f"redrafter{i}_{what}" for i in (0, 1) for what in (*(f"top{k}" for k in range(1, 6)), "loss")}
