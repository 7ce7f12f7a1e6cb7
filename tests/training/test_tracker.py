"""metrics.jsonl is the truth; the mirrors hold the same numbers, offline too."""

import json
import sys
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from decoding.errors import UserError
from training.config import TrackerConfig
from training.tracker import Tracker

RECORDS = [(1, {"loss": 3.5, "note": "first"}), (2, {"loss": 2.25, "acceptance": 0.5})]


def written(folder: Path, config: TrackerConfig) -> list[dict[str, object]]:
    tracker = Tracker(folder, config, "a run", {"seed": 1})
    for step, values in RECORDS:
        tracker.log(step, values)
    tracker.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def test_every_record_is_a_line(tmp_path: Path):
    assert written(tmp_path, TrackerConfig()) == [{"step": step, **values} for step, values in RECORDS]


def test_rewind_drops_later_steps_and_a_line_that_was_cut_off(tmp_path: Path):
    written(tmp_path, TrackerConfig())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    tracker = Tracker(tmp_path, TrackerConfig(), "a run", {})
    tracker.rewind(1)
    tracker.log(2, {"loss": 9.0})
    tracker.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["loss"] == 9.0


def test_tensorboard_holds_the_numbers(tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written(tmp_path, TrackerConfig(tensorboard=True))
    accumulator = events.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("loss")] == [(1, 3.5), (2, 2.25)]


def test_tensorboard_forgets_what_a_resumed_run_makes_again(tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written(tmp_path, TrackerConfig(tensorboard=True))
    tracker = Tracker(tmp_path, TrackerConfig(tensorboard=True), "a run", {})
    tracker.rewind(1)
    tracker.log(2, {"loss": 9.0})
    tracker.close()
    accumulator = events.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("loss")] == [(1, 3.5), (2, 9.0)]


def test_wandb_offline_holds_the_numbers(tmp_path: Path):
    written(tmp_path, TrackerConfig(wandb="offline"))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # wandb's own service process writes the file
    while b"acceptance" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"2.25" in file.read_bytes()


def test_an_unknown_mode_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="tracker.wandb is 'on'; expected online, offline or disabled"):
        Tracker(tmp_path, TrackerConfig(wandb="on"), "a run", {})


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"tensorboard needs a package that is not installed .*\[train\].*tracker=none"):
        Tracker(tmp_path, TrackerConfig(tensorboard=True), "a run", {})


def test_tensorboard_holds_the_images(tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    Figure(figsize=(1, 1)).savefig(tmp_path / "drawn.png", dpi=50)
    tracker = Tracker(tmp_path, TrackerConfig(tensorboard=True), "a run", {})
    tracker.show({"a table": [{"alpha": 0.5}]}, [], {"plots/drawn": tmp_path / "drawn.png"})
    tracker.close()
    accumulator = events.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    (image,) = accumulator.Images("plots/drawn")
    assert (image.width, image.height) == (50, 50)
