"""Mixtures in the loop: evaluations move the shares, a resumed run equals a straight one, and a
domain that runs out ends the training.
"""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from jobs.config import ParallelConfig
from jobs.config import TrackerConfig as NoTracker
from jobs.interrupts import Interrupted
from jobs.tracker import Tracker
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
    """Held-out loss of every domain, a stand-in for its acceptance (the likeliness of its text),
    and the score.
    """
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
    """A run of the loop; with stop_after, one that is stopped as SIGTERM would stop it after that
    many steps of its own.
    """
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
    data = mixed(mixing=mixing, **references, **changes)
    rows_of, calls = data.step_rows, 0

    def step_rows(step: int) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return rows_of(step)

    data.step_rows = step_rows
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


@pytest.mark.parametrize("mixing", ["loss", "acceptance"])
@pytest.mark.parametrize("stop_after", [3, 4, 5])
def test_stop_and_resume_equals_straight_bit_for_bit_across_an_evaluation(
    tmp_path: Path, stop_after: int, mixing: str
):
    """Evaluations move the shares after steps 2, 4, 6 and 8: the stop comes before, at and after
    one.
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


def test_the_equality_of_runs_sees_the_mixture(tmp_path: Path):
    """The control: the same run with fixed shares ends in other weights, as other rows
    were drawn.
    """
    train(tmp_path / "moving")
    train(tmp_path / "fixed", mixing="fixed")
    moving, fixed = newest(tmp_path / "moving"), newest(tmp_path / "fixed")
    assert moving.state["data"]["shares"]["maths"] > 0.3 > fixed.state["data"]["shares"]["maths"]
    assert any(not torch.equal(moving.model[name], fixed.model[name]) for name in moving.model)


def test_a_domain_that_runs_out_ends_the_training_with_its_checkpoint(
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
