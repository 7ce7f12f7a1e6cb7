"""Trackers: metrics.jsonl is the record, and its mirrors have the same numbers, also offline."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure

from decoding.errors import UserError
from distill.config import TrainConfig
from jobs.config import TrackerConfig
from jobs.job import CONF, register, run_typed
from jobs.tracker import Tracker, check_tracker

RECORDS = [(1, {"loss": 3.5, "note": "first"}), (2, {"loss": 2.25, "acceptance": 0.5})]


def write_records(folder: Path, config: TrackerConfig) -> list[dict[str, object]]:
    """Track RECORDS and return the lines of metrics.jsonl."""
    tracker = Tracker(folder, config, "a run", {"seed": 1})
    for step, values in RECORDS:
        tracker.log(step, values)
    tracker.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def test_every_record_is_a_line(tmp_path: Path):
    assert write_records(tmp_path, TrackerConfig()) == [
        {"step": step, **values} for step, values in RECORDS
    ]


def test_rewind_drops_later_steps_and_an_incomplete_line(tmp_path: Path):
    write_records(tmp_path, TrackerConfig())
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
    write_records(tmp_path, TrackerConfig(tensorboard=True))
    accumulator = events.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("loss")] == [
        (1, 3.5),
        (2, 2.25),
    ]


def test_tensorboard_drops_the_steps_that_a_resumed_run_repeats(tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_records(tmp_path, TrackerConfig(tensorboard=True))
    tracker = Tracker(tmp_path, TrackerConfig(tensorboard=True), "a run", {})
    tracker.rewind(1)
    tracker.log(2, {"loss": 9.0})
    tracker.close()
    accumulator = events.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("loss")] == [
        (1, 3.5),
        (2, 9.0),
    ]


def test_wandb_offline_holds_the_numbers(tmp_path: Path):
    write_records(tmp_path, TrackerConfig(wandb="offline"))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # wandb's own service process writes the file
    while b"acceptance" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"2.25" in file.read_bytes()


@pytest.fixture
def home_without_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set and return a home folder without a login to Weights & Biases."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_missing_login_is_an_error_before_the_job_starts(
    home_without_login: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that a missing login is an error before a job or an experiment's first stage starts.

    Only the tracking rank makes the check, which needs no network. Dry runs and offline tracking
    need no login.
    """
    register("distill.train", TrainConfig)
    started: list[str] = []

    def start(*given: str) -> None:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("distill_train", [f"output_dir={home_without_login}/run", *given])
        run_typed(
            composed,
            "distill.train",
            TrainConfig,
            lambda config: started.append(config.tracker.wandb),
        )

    words = r"no login to Weights & Biases.*`wandb login`.*WANDB_API_KEY.*tracker=wandb_offline"
    with pytest.raises(UserError, match=words):
        start("tracker=wandb")
    with pytest.raises(UserError, match=words):  # an experiment checks before its first stage
        start("tracker=wandb", "+experiment=llama_796m")
    assert not started and not (home_without_login / "run").exists()
    start("tracker=wandb", "dry_run=true")
    start("tracker=wandb_offline")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    start("tracker=wandb", "parallel=ddp")
    assert started == ["online", "offline", "online"]


@pytest.mark.parametrize("where", ["environment", "token", "netrc", "named netrc"])
def test_a_login_is_found_wherever_wandb_stores_it(
    home_without_login: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    file = home_without_login / (".netrc" if where == "netrc" else "logins")
    file.write_text("machine elsewhere.org login a password b\n")
    monkeypatch.setenv("NETRC", str(file))
    config = TrainConfig(tracker=TrackerConfig(wandb="online"))
    with pytest.raises(UserError, match="no login"):
        check_tracker(config)
    if where == "netrc":
        monkeypatch.delenv("NETRC")
    names = {"environment": "WANDB_API_KEY", "token": "WANDB_IDENTITY_TOKEN_FILE"}
    if where in names:
        monkeypatch.setenv(names[where], "x" * 40)
    else:
        file.write_text(f"machine api.wandb.ai login user password {'x' * 40}\n")
    check_tracker(config)


def test_a_wandb_run_has_the_given_name_and_the_job_as_type(
    tmp_path: Path, wandb_runs: list[dict[str, Any]]
):
    for name in ("", "mine"):
        Tracker(
            tmp_path,
            TrackerConfig(wandb="online", group="g", name=name),
            "an experiment",
            {"job": "eval.run"},
        )
    assert [(one["name"], one["group"], one["job_type"]) for one in wandb_runs] == [
        ("an experiment", "g", "eval.run"),
        ("mine", "g", "eval.run"),
    ]


def test_a_missing_column_of_a_table_stays_empty(tmp_path: Path, wandb_runs: list[dict[str, Any]]):
    tracker = Tracker(tmp_path, TrackerConfig(wandb="online"), "a run", {})
    tracker.show({"rows": [{"a": 1}, {"a": 2, "b": 3}]}, [], {})
    table = wandb_runs[0]["logged"]["rows"]
    assert (table.columns, table.data) == (["a", "b"], [[1, None], [2, 3]])


def test_an_unknown_mode_is_refused(tmp_path: Path):
    with pytest.raises(
        UserError, match="tracker.wandb is 'on', expected online, offline or disabled"
    ):
        Tracker(tmp_path, TrackerConfig(wandb="on"), "a run", {})


def test_a_missing_tensorboard_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        UserError,
        match=r"tensorboard needs a package that is not installed .*\[train\].*tracker=none",
    ):
        Tracker(tmp_path, TrackerConfig(tensorboard=True), "a run", {})
    with pytest.raises(UserError, match="tensorboard needs a package"):  # before models are loaded
        check_tracker(TrainConfig(tracker=TrackerConfig(tensorboard=True)))


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


@pytest.mark.parametrize("content", [b"", b"\n", bytes(range(256)), b"two words"])
def test_a_damaged_wandb_id_is_refused(
    content: bytes, tmp_path: Path, wandb_runs: list[dict[str, Any]]
):
    (tmp_path / "wandb_id").write_bytes(content)
    with pytest.raises(
        UserError, match="wandb_id is damaged: found .*, expected the id of a W&B run. Delete it"
    ):
        write_records(tmp_path, TrackerConfig(wandb="offline"))
    assert not wandb_runs
