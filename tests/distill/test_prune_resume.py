"""Interrupted runs of `distill.prune` resume exactly and repeat no finished stage."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import distill.prune.masks
import training.loop
from distill.prune.job import run
from jobs.interrupts import Interrupted
from tests.support.pruned_folders import BRIEF, NARROW, configured, same, weights
from tests.support.tiers import tiered


@pytest.mark.parametrize(
    ("given", "signal_at"),
    tiered(
        [
            # in the second candidate
            (("importance.probe_steps=3", "student.num_hidden_layers=3"), 5),
            # between two cuts
            (("student.num_hidden_layers=1", "depths=[3]", "between.max_steps=4"), 2),
        ],
        lambda given, signal_at: signal_at == 2,
    ),
    ids=["probe", "between"],
)
def test_an_interrupted_distillation_resumes_exactly(
    given: tuple[str, ...],
    signal_at: int,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Check that a resumed job makes every training step once and gives the same student."""
    steps = {"straight": 0, "resumed": 0}
    step, at_work = training.loop.Training.step, "straight"

    def counted(*arguments: Any) -> dict[str, float]:
        steps[at_work] += 1
        if at_work == "resumed" and steps[at_work] == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    monkeypatch.setattr(training.loop.Training, "step", counted)
    run(configured(tiny_target, tmp_path / "straight", *given))
    at_work = "resumed"
    with pytest.raises(Interrupted):
        run(configured(tiny_target, tmp_path / "resumed", *given))
    assert steps["resumed"] == signal_at
    run(configured(tiny_target, tmp_path / "resumed", *given))
    assert steps["resumed"] == steps["straight"] > signal_at, "every step is made once"
    straight, resumed = (
        json.loads((tmp_path / name / "manifest.json").read_text())["metrics"]["stages"]
        for name in ("straight", "resumed")
    )
    for key in ("probe_acceptance", "layers", "acceptance_before_distillation"):
        assert [notes[key] for notes in resumed] == [notes[key] for notes in straight]
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "resumed"))


@pytest.mark.long
def test_interrupted_mask_training_resumes_exactly(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = (*BRIEF, *NARROW, "student.intermediate_size=32")
    run(configured(tiny_target, tmp_path / "straight", *given))
    sample = distill.prune.masks.Masks.sample

    def until_step_3(self: distill.prune.masks.Masks, step: int, *place: int):
        if step == 3:
            raise KeyboardInterrupt
        return sample(self, step, *place)

    monkeypatch.setattr(distill.prune.masks.Masks, "sample", until_step_3)
    with pytest.raises(KeyboardInterrupt):
        run(configured(tiny_target, tmp_path / "resumed", *given))
    monkeypatch.undo()
    run(configured(tiny_target, tmp_path / "resumed", *given))
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "resumed"))
    run(configured(tiny_target, tmp_path / "seed", *given, "seed=1"))
    assert not same(weights(tmp_path / "straight"), weights(tmp_path / "seed")), (
        "control: the seed matters"
    )


@pytest.mark.long
def test_a_resumed_run_repeats_no_finished_stage(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = ("student.num_hidden_layers=1", "depths=[3]")
    run(configured(tiny_target, tmp_path / "straight", *given))
    run(configured(tiny_target, tmp_path / "resumed", *given))
    folder = tmp_path / "resumed"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"finished": False}))
    shutil.rmtree(folder / "student")
    before = (folder / "stages" / "1_3_layers" / "model.safetensors").stat().st_mtime_ns
    run(configured(tiny_target, folder, *given))
    assert (folder / "stages" / "1_3_layers" / "model.safetensors").stat().st_mtime_ns == before
    assert same(weights(tmp_path / "straight"), weights(folder))
