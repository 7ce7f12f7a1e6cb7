"""Test mixtures in the training loop: updated shares, exact resume and exhausted domains."""

import json
import math
from pathlib import Path

import pytest
import torch

from jobs.config import ParallelConfig
from jobs.config import TrackerConfig as NoTracker
from jobs.interrupts import Interrupted
from jobs.tracker import Tracker
from tests.support.interrupted_data import stop_after_step
from tests.support.tiers import tiered
from training import checkpoint
from training.config import LoopConfig, StudentConfig
from training.data.mixture import MixedData
from training.data.packing import best_fit, collate
from training.loop import fit
from training.models.build import build_llama
from training.objectives import LanguageModelling
from training.optimizer_config import OptimizerConfig
from training.parallel.strategy import Parallel

from .test_mixture import HELD_OUT, NAMES, mixed

SHAPE = StudentConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
)


def losses_of(module: LanguageModelling) -> dict[str, float]:
    """Return each domain's held-out loss and acceptance (here the likelihood), and a score."""
    figures = {}
    with torch.no_grad():
        for name, held_out in HELD_OUT.items():
            batch = collate(held_out, best_fit([len(sample.ids) for sample in held_out], 64), 64)
            loss = float(module(batch)[0]) / batch.supervised
            figures |= {f"loss/{name}": loss, f"acceptance/{name}": math.exp(-loss)}
    return figures | {"score": -sum(figures.values())} | {"score": -sum(figures.values())}


def train(
    folder: Path, steps: int = 8, stop_after: int = 0, mixing: str = "loss", **changes: object
) -> MixedData:
    """Train and return the data, with a SIGTERM in step `stop_after` (from 1) if it is not 0."""
    torch.manual_seed(0)
    module = LanguageModelling(
        build_llama(
            SHAPE, torch.float32, vocab_size=61, max_position_embeddings=64, initializer_range=0.1
        )
    )
    references = {
        "code": {"reference": 4.0},
        "prose": {"reference": 3.0},
        "maths": {"reference": 2.0},
    }
    data = stop_after_step(mixed(mixing=mixing, **references, **changes), stop_after)
    loop = LoopConfig(
        max_steps=steps,
        tokens_per_step=256,
        micro_batch_tokens=128,
        eval_every=2,
        checkpoint_every=3,
        keep=9,
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tracker = Tracker(folder, NoTracker(), "t", {})
    parallel = Parallel(ParallelConfig(), "cpu")
    fit("t", module, module.model, data, loop, parallel, folder, tracker, lambda: losses_of(module))
    return data


def newest(folder: Path) -> checkpoint.Checkpoint:
    found = checkpoint.latest(folder / "checkpoints", report=print)
    assert found is not None
    return found


def records(folder: Path, key: str) -> list[float]:
    return [
        found[key] for found in map(json.loads, (folder / "metrics.jsonl").open()) if key in found
    ]


@pytest.mark.parametrize("mixing", tiered(["loss", "acceptance"], ["acceptance"]))
@pytest.mark.parametrize("stop_after", tiered([3, 4, 5], [3, 4]))
def test_a_resumed_run_equals_an_uninterrupted_one_across_evaluations(
    tmp_path: Path, stop_after: int, mixing: str
):
    """Check that a run stopped before, at or after an evaluation resumes exactly.

    Evaluations move the shares every two steps.
    """
    train(tmp_path / "straight", mixing=mixing)
    with pytest.raises(Interrupted):
        train(tmp_path / "stopped", stop_after=stop_after, mixing=mixing)
    assert newest(tmp_path / "stopped").state["step"] == stop_after
    train(tmp_path / "stopped", mixing=mixing)
    straight, resumed = newest(tmp_path / "straight"), newest(tmp_path / "stopped")
    assert straight.state["data"] == resumed.state["data"]
    assert sum(straight.state["data"]["used"].values()) == 8 * 4
    for a, b in ((straight.model, resumed.model), (straight.optimizer, resumed.optimizer)):
        assert all(torch.equal(a[name], b[name]) for name in a)
    for key in ("loss", "share/code", "share/maths", "rows/prose"):
        assert records(tmp_path / "straight", key) == records(tmp_path / "stopped", key)
    assert len(records(tmp_path / "straight", "share/code")) == 4, (
        "shares are logged at every evaluation"
    )


def test_another_mixture_gives_other_weights(tmp_path: Path):
    """Control: with fixed shares, other rows are sampled and the weights differ."""
    train(tmp_path / "moving")
    train(tmp_path / "fixed", mixing="fixed")
    moving, fixed = newest(tmp_path / "moving"), newest(tmp_path / "fixed")
    assert moving.state["data"]["shares"]["maths"] > 0.3 > fixed.state["data"]["shares"]["maths"]
    assert any(not torch.equal(moving.model[name], fixed.model[name]) for name in moving.model)


def test_an_exhausted_domain_ends_the_training_with_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = train(tmp_path, steps=100, mixing="fixed", when_exhausted="stop")
    last = newest(tmp_path).state
    assert 0 < last["step"] < 100
    assert all(data.used[name] <= len(data.domains[name].rows) for name in NAMES), (
        "no row was used twice"
    )
    assert last["data"]["used"] == data.used
    assert last["evaluations"][-1]["step"] == last["step"], "the end is evaluated"
    assert f"ended after step {last['step']} of 100: domain '" in capsys.readouterr().err
    # the same command again
    again = train(tmp_path, steps=100, mixing="fixed", when_exhausted="stop")
    assert again.state() == data.state()
    wrapped = train(tmp_path / "wrap", steps=40, mixing="fixed")
    assert sum(wrapped.used.values()) == 40 * 4
    assert any(wrapped.used[name] > len(wrapped.domains[name].rows) for name in NAMES)
