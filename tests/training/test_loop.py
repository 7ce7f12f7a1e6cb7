"""Test the training loop: exact resume, complete checkpoints, signals and non-finite losses."""

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from decoding.errors import UserError
from jobs.config import ParallelConfig, TrackerConfig
from jobs.interrupts import Interrupted
from jobs.tracker import Tracker
from tests.support.host_waits import Waits
from tests.support.interrupted_data import stop_after_step
from training import checkpoint
from training.bounds import Bounds, Progress
from training.config import LoopConfig, StudentConfig
from training.data.packing import PackedBatch, PackedData, Sample
from training.loop import Training, fit
from training.models.build import build_llama
from training.objectives import LanguageModelling
from training.optimizer_config import OptimizerConfig
from training.parallel.strategy import Parallel

SHAPE = StudentConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
)


def make_data(seed: int = 0) -> PackedData:
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(80):
        ids = random.integers(0, 61, int(random.integers(3, 40))).astype(np.int32)
        mask = random.random(len(ids)) < 0.7
        mask[0], mask[-1] = False, True
        samples.append(Sample(ids, mask))
    return PackedData(samples, 64, rows_per_step=4, seed=7)


def make_model(dtype: torch.dtype = torch.float32) -> LanguageModelling:
    torch.manual_seed(0)
    return LanguageModelling(
        build_llama(SHAPE, dtype, vocab_size=61, max_position_embeddings=64, initializer_range=0.1)
    )


def loop(steps: int, **changes: object) -> LoopConfig:
    settings = {
        "max_steps": 8,
        "tokens_per_step": 256,
        "micro_batch_tokens": 128,
        "eval_every": 0,
        "checkpoint_every": 3,
        "keep": 2,
    }
    return LoopConfig(
        **(settings | {"max_steps": steps} | changes),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2),
    )


def train(
    folder: Path, config: LoopConfig, stop_after: int = 0, dtype: torch.dtype = torch.float32
) -> LanguageModelling:
    """Train and return the module, with a SIGTERM in step `stop_after` (from 1) if it is not 0."""
    module = make_model(dtype)
    data = stop_after_step(make_data(), stop_after)
    score = iter(range(100))
    parallel = Parallel(ParallelConfig(), "cpu")
    tracker = (
        Tracker(folder, TrackerConfig(), "t", {})
        if folder.mkdir(parents=True, exist_ok=True) is None
        else None
    )
    fit(
        "t",
        module,
        module.model,
        data,
        config,
        parallel,
        folder,
        tracker,
        lambda: {"score": float(next(score))},
    )
    return module


def newest(folder: Path) -> checkpoint.Checkpoint:
    found = checkpoint.latest(folder / "checkpoints", report=print)
    assert found is not None
    return found


def is_equal(a: checkpoint.Checkpoint, b: checkpoint.Checkpoint) -> bool:
    parts = ((a.model, b.model), (a.optimizer, b.optimizer), (a.rng, b.rng))
    return all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in parts
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path, dtype: torch.dtype):
    train(tmp_path / "straight", loop(8), dtype=dtype)
    with pytest.raises(Interrupted, match="Run the same command to continue"):
        train(tmp_path / "stopped", loop(8), stop_after=5, dtype=dtype)
    assert newest(tmp_path / "stopped").state["step"] == 5
    train(tmp_path / "stopped", loop(8), dtype=dtype)
    straight, resumed = newest(tmp_path / "straight"), newest(tmp_path / "stopped")
    assert straight.state["step"] == resumed.state["step"] == 8
    assert is_equal(straight, resumed)
    losses = [
        [
            json.loads(line)["loss"]
            for line in (tmp_path / name / "metrics.jsonl").open()
            if '"loss"' in line
        ]
        for name in ("straight", "stopped")
    ]
    assert losses[0] == losses[1]


def test_runs_with_another_order_of_additions_differ(tmp_path: Path):
    train(tmp_path / "a", loop(4))
    # the control: another order of additions
    train(tmp_path / "b", loop(4, tokens_per_step=256, micro_batch_tokens=64))
    a, b = newest(tmp_path / "a"), newest(tmp_path / "b")
    assert not is_equal(a, b)
    for name in a.model:  # only by rounding
        torch.testing.assert_close(a.model[name], b.model[name], rtol=1e-2, atol=1e-4)


def test_a_step_reads_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that a step of two forwards, a norm and an update waits for the device once.

    Control: reading the loss of every forward adds two waits.
    """
    module, config, parallel, waits = (
        make_model(),
        loop(4),
        Parallel(ParallelConfig(), "cpu"),
        Waits(),
    )
    wrapped, optimizer = parallel.prepare(module, module.model, config.optimizer, module.rates)
    training = Training(
        wrapped, module.model, make_data(), config, parallel, optimizer, Progress(), tmp_path
    )

    def step() -> None:
        with waits.counting(monkeypatch):
            training.step(Bounds(steps=4))

    step()
    step()
    assert (waits.meant, waits.stray) == (2, [])
    real = module.forward

    def read(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, metrics = real(batch)
        assert loss.item() > 0
        return loss, metrics

    module.forward = read
    step()
    assert (waits.meant, waits.stray) == (3, ["item"] * 2)


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train(tmp_path, loop(7))
    folders = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert [folder.name for folder in folders] == ["step_000006", "step_000007"]
    weights = folders[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5] + b"wrong")
    assert newest(tmp_path).folder.name == "step_000006"
    assert "step_000007: model.safetensors is damaged" in capsys.readouterr().out
    (folders[0] / "state.json").unlink()
    assert checkpoint.latest(tmp_path / "checkpoints", report=print) is None
    assert "was never completed" in capsys.readouterr().out


def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_checkpoint(tmp_path: Path):
    train(tmp_path, loop(3))
    before = newest(tmp_path)
    module = make_model()
    real = module.forward
    module.forward = lambda batch: tuple(value * float("nan") for value in real(batch))
    with pytest.raises(
        UserError, match=r"the loss is nan and .* at step 4, .* last good checkpoint"
    ):
        fit(
            "t",
            module,
            module.model,
            make_data(),
            loop(6),
            Parallel(ParallelConfig(), "cpu"),
            tmp_path,
            None,
            lambda: {"score": 0.0},
        )
    assert is_equal(before, newest(tmp_path))


def test_a_non_finite_gradient_never_changes_the_weights(tmp_path: Path):
    module = make_model()
    before = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
    module.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    words = "gradient's norm (nan|inf) at step 1, before any update, .* hold NaN"
    with pytest.raises(UserError, match=words) as error:
        fit(
            "t",
            module,
            module.model,
            make_data(),
            loop(6),
            Parallel(ParallelConfig(), "cpu"),
            tmp_path,
            None,
            lambda: {"score": 0.0},
        )
    assert "optimizer.lr" not in str(error.value), "no learning rate was used yet"
    assert all(
        torch.equal(before[name], tensor) for name, tensor in module.model.state_dict().items()
    )


def test_the_model_ends_at_its_best_checkpoint(tmp_path: Path):
    module = make_model()
    scores = iter([0.1, 0.9, 0.3, 0.2])
    config = loop(8, eval_every=2, checkpoint_every=2, keep=1)
    progress = fit(
        "t",
        module,
        module.model,
        make_data(),
        config,
        Parallel(ParallelConfig(), "cpu"),
        tmp_path,
        None,
        lambda: {"score": next(scores)},
    )
    assert progress.best_step == 4
    best = checkpoint.load(tmp_path / "checkpoints" / "step_000004")
    assert all(
        torch.equal(module.model.state_dict()[name], tensor) for name, tensor in best.model.items()
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_000004",
        "step_000008",
    ]


@pytest.mark.parametrize(
    ("passes", "asked", "is_noted"),
    [(11, {}, True), (9, {}, False), (11, {"max_epochs": 20.0}, False)],
)
def test_many_passes_over_the_data_are_noted(
    passes: int,
    asked: dict[str, float],
    is_noted: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """Check the note after a run that nobody asked to read its data so often."""
    steps = math.ceil(passes * make_data().steps_per_epoch)
    train(tmp_path, loop(steps, checkpoint_every=0, **asked))
    assert (f"{passes} passes over the data" in capsys.readouterr().err) is is_noted


def weight_score(module: LanguageModelling) -> dict[str, float]:
    """Return a score that depends on the weights and has its maximum within a few steps."""
    return {"score": -abs(float(module.model.lm_head.weight.detach().square().mean()) - 0.0088)}


def fit_with_patience(folder: Path, stop_after: int = 0, **options: object) -> Progress:
    """Train with an evaluation after every step and an early stop."""
    module, data = make_model(), stop_after_step(make_data(), stop_after)
    config = loop(40, **({"eval_every": 1, "patience": 3, "checkpoint_every": 0} | options))
    parallel = Parallel(ParallelConfig(), "cpu")
    evaluate = partial(weight_score, module)
    return fit("t", module, module.model, data, config, parallel, folder, None, evaluate)


def test_an_early_stop_ends_a_resumed_run_at_the_same_step(tmp_path: Path):
    """Check that a run ends after `patience` evaluations without a gain, also if it is resumed.

    Control: without patience the same run reaches its bound in steps.
    """
    straight = fit_with_patience(tmp_path / "straight")
    assert straight.ended_by == "loop.patience" and straight.without_gain == 3
    assert straight.best_step == straight.step - 3 and 4 < straight.step < 40
    with pytest.raises(Interrupted):
        fit_with_patience(tmp_path / "stopped", stop_after=straight.step - 1)
    resumed = fit_with_patience(tmp_path / "stopped")
    assert resumed.evaluations == straight.evaluations
    assert is_equal(newest(tmp_path / "straight"), newest(tmp_path / "stopped"))
    again = fit_with_patience(tmp_path / "stopped")
    assert (again.step, again.ended_by) == (straight.step, "loop.patience")
    endless = fit_with_patience(tmp_path / "endless", patience=0)
    assert (endless.step, endless.ended_by) == (40, "loop.max_steps")


def test_a_gain_of_at_most_min_gain_does_not_renew_patience(tmp_path: Path):
    """Check the counter of evaluations without a gain, at a score that rises slowly."""
    progress = Progress()
    counts = []
    for score in (0.0, 0.1, 0.2, 0.31, float("nan"), 0.4):
        progress.count_gain(score, 0.2)
        counts.append(progress.without_gain)
    assert counts == [0, 1, 2, 0, 1, 2]
    control = Progress()
    for score in (0.0, 0.1, 0.2, 0.31):
        control.count_gain(score, 0.0)
        assert control.without_gain == 0


def test_checkpoints_of_keep_every_are_never_deleted(tmp_path: Path):
    def steps_kept(folder: Path, **options: object) -> list[str]:
        train(folder, loop(8, checkpoint_every=2, keep=1, **options))
        return sorted(path.name for path in (folder / "checkpoints").iterdir())

    assert steps_kept(tmp_path / "a", keep_every=3) == ["step_000003", "step_000006", "step_000008"]
    assert steps_kept(tmp_path / "b") == ["step_000008"]


def test_a_full_disk_is_an_error_that_keeps_the_last_checkpoint(tmp_path: Path):
    """Check that a full disk is an error, and that the last complete checkpoint is kept.

    The next checkpoint is written by a child process whose files may not exceed 20 kB.
    """
    tensors = {"w": torch.zeros(100)}
    checkpoint.save(tmp_path / "step_000001", {"step": 1}, tensors, tensors, tensors)
    code = f"""
import resource, signal, sys, torch
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from training import checkpoint
from decoding.errors import UserError
big = {{"w": torch.zeros(1_000_000)}}
try:
    checkpoint.save(Path({str(tmp_path / "step_000002")!r}), {{"step": 2}}, big, big, big)
except UserError as error:
    sys.exit(str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert "could not write" in done.stderr
    assert "the last complete checkpoint is kept" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert checkpoint.load(tmp_path / "step_000001").state["step"] == 1
