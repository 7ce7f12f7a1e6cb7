"""Test the bounds of a run in seconds, steps, tokens and epochs, and the schedules under them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from decoding.errors import UserError
from distill.config import PruneConfig, TrainConfig
from distill.prune.job import check as check_prune
from jobs.config import ParallelConfig, plain
from jobs.interrupts import Interrupted
from jobs.run_folder import RunFolder
from jobs.saved_config import upgrade_config
from jobs.tracker import Tracker
from tests.support.interrupted_data import stop_after_step
from training.bounds import Bounds, Progress, RunTotals
from training.config import LoopConfig, check_values
from training.loop import fit
from training.optimizer import learning_rate
from training.optimizer_config import OptimizerConfig
from training.parallel.strategy import Parallel
from training.plan import describe_plan, plan_tokens

from .test_loop import TrackerConfig, is_equal, make_data, make_model, newest


class Clock:
    """Clock in which only work takes time.

    A step takes `per_step` seconds and an evaluation `per_evaluation`. All sums are multiples of
    0.25 and therefore exact.
    """

    def __init__(self, per_step: float = 1.0, per_evaluation: float = 0.5) -> None:
        self.now, self.per_step, self.per_evaluation = 100.0, per_step, per_evaluation

    def __call__(self) -> float:
        return self.now


def train(
    folder: Path, clock: Clock, stop_after: int = 0, **bounds: Any
) -> tuple[Progress, list[dict[str, Any]]]:
    """Train with the given clock; return the progress and the records of the steps."""
    folder.mkdir(parents=True, exist_ok=True)
    module, data = make_model(), stop_after_step(make_data(), stop_after)
    rows_of = data.step_rows

    def step_rows(step: int) -> list[list[int]]:
        clock.now += clock.per_step
        return rows_of(step)

    def evaluate() -> dict[str, float]:
        clock.now += clock.per_evaluation
        return {"score": -float(module.model.lm_head.weight.detach().square().mean())}

    data.step_rows = step_rows  # type: ignore[method-assign]
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=2, final_lr=0.1)
    usual = {
        "tokens_per_step": 256,
        "micro_batch_tokens": 256,
        "eval_every": 4,
        "checkpoint_every": 3,
        "keep": 2,
    }
    config = LoopConfig(**(usual | bounds), optimizer=optimizer)
    tracker = Tracker(folder, TrackerConfig(), "t", {})
    parallel = Parallel(ParallelConfig(), "cpu")
    progress = fit(
        "t", module, module.model, data, config, parallel, folder, tracker, evaluate, clock
    )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return progress, [record for record in records if "loss" in record]


# A step of this data has about 250 tokens. An epoch has 8 rows, 4 per step.
@pytest.mark.parametrize(
    ("bounds", "steps"),
    [
        ({"max_steps": 5}, 5),
        ({"max_steps": 3, "max_seconds": 60.0}, 3),
        # an evaluation of 0.5 s before the first step and after the last
        ({"max_steps": 50, "max_seconds": 8.0}, 7),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 600, "max_seconds": 60.0}, 3),
        ({"max_epochs": 1.0}, None),
        ({"max_epochs": 1.0, "max_steps": 4}, 4),
        ({"max_epochs": 0.3, "max_tokens": 10**9, "max_seconds": 1e9}, 3),
        ({"max_epochs": 0.0, "max_steps": 4}, 4),
        ({}, None),  # one epoch
        ({"max_seconds": 1.25}, 1),  # no step fits, but one is always made
    ],
)
def test_the_first_bound_ends_the_run(tmp_path: Path, bounds: dict[str, Any], steps: int | None):
    progress, records = train(tmp_path, Clock(), eval_every=0, **bounds)
    assert progress.step == (steps or math.ceil(make_data().steps_per_epoch))
    assert progress.evaluations[-1]["step"] == progress.step, "the last evaluation is always made"
    assert [record["progress"] for record in records] == sorted(
        record["progress"] for record in records
    )
    assert records[0]["progress"] < 1 or bounds == {"max_seconds": 1.25}


@pytest.mark.parametrize(
    ("bounds", "shown"),
    [
        ({"max_steps": 3}, ["1/3", "2/3", "3/3"]),
        # 0.5 s of an evaluation before the first step, and 1 s a step; one more before the last
        (
            {"max_seconds": 5.0, "eval_every": 0},
            ["30%  step 1", "50%  step 2", "70%  step 3", "100%  step 4"],
        ),
        # the bound in steps is nearer
        (
            {"max_seconds": 60.0, "max_steps": 4, "eval_every": 0},
            [f"{25 * step}%  step {step}" for step in (1, 2, 3, 4)],
        ),
    ],
)
def test_the_bar_shows_what_is_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bounds: dict[str, Any],
    shown: list[str],
):
    """Check that the bar counts steps if their number is set, and else the share of the bound."""
    monkeypatch.setattr("jobs.progress.PLAIN_EVERY_SECONDS", 0.0)
    train(tmp_path, Clock(), **bounds)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("t ")]
    assert [line.removeprefix("t ").partition("  loss")[0] for line in lines] == shown


def test_bounds_in_steps_keep_the_original_learning_rates_and_masks():
    """Check that learning rates and mask schedules equal the original formulas to the last bit.

    The formulas date from the time when steps were the only bound.
    """
    for total, warmup in ((12, 4), (997, 20), (2000, 0), (7, 7), (5, 20)):
        config, bounds = (
            OptimizerConfig(lr=0.3, warmup_steps=warmup, final_lr=0.1),
            Bounds(steps=total),
        )
        for step in range(total):
            behind = min(1.0, (step - warmup) / max(1, total - warmup))
            cosine = 0.5 * (1 + math.cos(math.pi * behind))
            before = (
                0.3 * (step + 1) / warmup if step < warmup else 0.3 * (0.1 + (1 - 0.1) * cosine)
            )
            found = bounds.share(
                RunTotals(step, 7 * step, 0.3 * step), since=RunTotals(warmup, 7, 0.3)
            )
            assert learning_rate(config, step, found) == before
            for share in (0.2, 0.37, 1.0):  # of distill.prune's l0.warmup_share
                assert bounds.share(RunTotals(step), of=share) == min(1.0, step / (share * total))
            assert bounds.share(RunTotals(step), of=0.0) == 1.0


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_steps": 11},
        {"max_tokens": 2500},
        {"max_seconds": 13.0},
        {"max_seconds": 13.0, "max_steps": 40, "max_tokens": 5000},
    ],
)
def test_resuming_is_exact_under_every_bound(tmp_path: Path, bounds: dict[str, Any]):
    """Check that a stopped and resumed run equals an uninterrupted one under every bound.

    The clock is simulated: steps and evaluations take a fixed time, and the pause takes none.
    """
    straight = train(tmp_path / "straight", Clock(), **bounds)
    with pytest.raises(Interrupted):
        train(tmp_path / "stopped", Clock(), stop_after=6, **bounds)
    clock = Clock()
    clock.now = 5000.0  # another day
    resumed = train(tmp_path / "stopped", clock, **bounds)
    assert resumed[0].step == straight[0].step > 8
    assert is_equal(newest(tmp_path / "straight"), newest(tmp_path / "stopped"))
    assert [(r["lr"], r["progress"], r["loss"]) for r in resumed[1]] == [
        (r["lr"], r["progress"], r["loss"]) for r in straight[1]
    ]
    # a finished run stays finished, even if its last evaluation was fast
    again = train(tmp_path / "stopped", clock, **bounds)
    assert again[0].step == straight[0].step


def test_another_clock_gives_another_schedule(tmp_path: Path):
    """Control: at another pace the learning rates after the warm-up differ."""
    rates = [
        [r["lr"] for r in train(tmp_path / str(s), Clock(per_step=s), max_seconds=13.0)[1]]
        for s in (1.0, 0.75)
    ]
    assert rates[0][:2] == rates[1][:2], "the warm-up goes by steps"
    assert rates[0][3] != rates[1][3]


def test_the_schedule_is_complete_and_the_last_evaluation_fits_in_time(tmp_path: Path):
    clock = Clock(per_step=0.25, per_evaluation=2.0)
    progress, records = train(tmp_path, clock, max_seconds=40.0, eval_every=30, checkpoint_every=0)
    assert progress.time_up
    assert 40.0 - 0.5 <= progress.elapsed == clock.now - 100.0 <= 40.0
    assert records[-1]["progress"] > 0.98
    assert records[-1]["lr"] == pytest.approx(1e-3, rel=0.02), "final_lr x the peak"
    assert max(record["lr"] for record in records) == 1e-2


def test_slower_steps_exceed_the_time_limit_only_slightly(tmp_path: Path):
    clock = Clock()

    class Slower(Clock):
        def __call__(self) -> float:
            self.per_step = min(1.0, self.per_step * 1.125)
            return self.now

    clock = Slower(per_step=0.25)
    train(tmp_path, clock, max_seconds=20.0, eval_every=0)
    assert 18.0 < clock.now - 100.0 <= 20.5


def test_a_time_limit_shorter_than_the_evaluations_is_refused(tmp_path: Path):
    with pytest.raises(
        UserError,
        match=r"loop.max_seconds is 3, but a held-out evaluation alone takes 2.0 s.*Raise",
    ):
        train(tmp_path, Clock(per_evaluation=2.0), max_seconds=3.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, -1) for name in ("max_seconds", "max_tokens", "max_steps", "max_epochs")),
        *(
            (name, value)
            for name in ("max_seconds", "max_epochs")
            for value in (math.nan, math.inf)
        ),
    ],
)
def test_invalid_bounds_are_refused(name: str, value: float):
    config = TrainConfig(job="distill.train", output_dir="x")
    setattr(config.loop, name, value)
    with pytest.raises(UserError, match=rf"loop.{name} is {value}, expected "):
        check_values(config, {})
    pruning = PruneConfig(job="distill.prune", output_dir="x")
    pruning.between.max_steps = 5
    setattr(pruning.between, name, value)
    with pytest.raises(UserError, match=rf"between.{name} is {value}, expected "):
        check_prune(pruning)


def test_no_bound_at_all_is_refused():
    config = TrainConfig(job="distill.train", output_dir="x", loop=LoopConfig(max_epochs=0.0))
    with pytest.raises(
        UserError,
        match="loop.max_epochs is 0.0, expected more than 0, or 0 if loop.max_steps",
    ):
        check_values(config, {})
    config.loop.max_seconds = 5.0
    check_values(config, {})


@pytest.mark.parametrize(
    ("loop", "before", "dry"),
    [
        ({"max_steps": 20}, "20 steps of 256 tokens, 2.86 epochs", "5,120 tokens in 20 steps"),
        ({}, "7 steps of 256 tokens, 1.00 epochs", "1 epoch"),
        (
            {"max_seconds": 240.0},
            "at most 240 s, in steps of 256 tokens",
            "at most 240 s, 24,000 tokens in about 94 steps",
        ),
        (
            {"max_seconds": 240.0, "max_steps": 20},
            "at most 240 s, at most 20 steps of",
            "at most 240 s, at most 5,120 tokens in 20 steps",
        ),
        (
            {"max_tokens": 1000},
            "at most 1,000 tokens, about 5 steps of 256",
            "1,000 tokens in about 4 steps",
        ),
        (
            {"max_tokens": 1000, "max_epochs": 2.0},
            "at most 1,000 tokens, about 5 steps",
            "at most 2 epochs, at most 1,000 tokens",
        ),
    ],
)
def test_a_plan_names_every_bound(loop: dict[str, Any], before: str, dry: str):
    """Check that every bound is named in the plan of a run and of a dry run without data."""
    config = LoopConfig(**loop, tokens_per_step=256)
    assert describe_plan(config, make_data()).startswith(before)
    words = plan_tokens(config, 1e10, 1.0).words
    assert words.startswith(dry) and not words.endswith("1 epochs")


def test_a_saved_configuration_of_an_earlier_version_is_unchanged(tmp_path: Path):
    """Check that a configuration saved by an earlier version counts as unchanged.

    Newer keys are absent from it, and max_epochs=1.0 together with max_steps set no bound.
    """
    config = TrainConfig(job="distill.train", output_dir=str(tmp_path))
    config.target.path, config.loop.max_steps = "somewhere", 100
    RunFolder(config).write_manifest([], {}, finished=False)
    old = plain(config)
    for key in ("max_seconds", "max_tokens"):
        del old["loop"][key]
    old["loop"]["max_epochs"] = 1.0
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(old)))
    RunFolder(config)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(old)))
    config.loop.max_seconds = 60.0
    with pytest.raises(UserError, match=r"different: loop\.max_seconds \(0\.0 -> 60\.0\)"):
        RunFolder(config)
    # --config-file runs it again with the same meaning
    assert upgrade_config(old)["loop"]["max_epochs"] is None
    epochs = {"loop": {"max_steps": 0, "max_epochs": 3.0}}
    assert upgrade_config(epochs) == epochs
