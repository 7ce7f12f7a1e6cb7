"""Test that two processes train as one under DDP, ZeRO-1, 2, 3 and FSDP.

Runs accumulate and clip gradients, are resumed, and change their kind.
"""

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from decoding.errors import UserError
from jobs.config import ParallelConfig
from tests.support.training_rank import Spec, exported, make_model, run, run_ranks, start_ranks
from training import checkpoint
from training.parallel.memory_plan import bytes_per_rank
from training.parallel.strategy import Parallel

TOLERANCE = 1e-5  # relative difference of float32 losses, from the order of additions
# six steps by rank 0's clock, one by the others' (training_rank.Spec)
BY_SECONDS = {"steps": 0, "seconds": 9.5}
SHARDING = ["zero1", "zero2", "zero3", "fsdp"]
# fsdp tests sharding in general, as DeepSpeed's engine takes three times as long.
SHARDED = [pytest.param(kind, marks=pytest.mark.exhaustive) for kind in SHARDING[:3]] + ["fsdp"]
WITH_DDP = [pytest.param("ddp", marks=pytest.mark.exhaustive), *SHARDED]
ZERO = SHARDING[:3]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Train in one process, the reference of all other runs; return its folder and figures."""
    folder = tmp_path_factory.mktemp("one")
    return folder, run(Spec(str(folder), **BY_SECONDS))


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("zero"):
        request.getfixturevalue("deepspeed")
    return request.param


def check_equal(folder: Path, seen: dict[str, Any], one: tuple[Path, dict[str, Any]]) -> None:
    """Check that losses, norms, held-out figures and exported weights equal the reference's."""
    for key in ("losses", "norms", "acceptance", "progress", "seen"):
        count = len(seen[key])
        assert count > 0
        assert seen[key] == pytest.approx(one[1][key][-count:], rel=TOLERANCE), key
    ours, theirs = exported(folder), exported(one[0])
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "ddp",
        *(
            pytest.param(
                kind, marks=pytest.mark.exhaustive if kind == "zero2" else pytest.mark.long
            )
            for kind in SHARDING
        ),
    ],
    indirect=True,
)
def test_two_processes_train_as_one(kind: str, one: tuple[Path, dict[str, Any]], tmp_path: Path):
    """Check that two ranks give the losses, weights and optimizer states of one process.

    Each rank makes two forwards per step, and gradients are clipped in some steps. Seconds bound
    the run: the ranks' clocks differ, and all must follow rank 0's.
    """
    assert min(one[1]["norms"]) < 0.2 < max(one[1]["norms"])
    seen = run_ranks(Spec(str(tmp_path), kind=kind, **BY_SECONDS))
    assert len(seen["losses"]) == 6
    assert seen["deepspeed"] == (kind in ZERO), "it is imported only where it works"
    check_equal(tmp_path, seen, one)
    saved, straight = (
        checkpoint.load(folder / "checkpoints" / "step_000006") for folder in (tmp_path, one[0])
    )
    assert saved.optimizer.keys() == straight.optimizer.keys()  # one format for every kind
    for name, tensor in straight.optimizer.items():
        torch.testing.assert_close(saved.optimizer[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    untrained = dict(make_model(2, 0, torch.float32).named_parameters())
    moved = [
        name
        for name, tensor in exported(tmp_path).items()
        if not torch.allclose(untrained[name], tensor, atol=1e-3)
    ]
    assert len(moved) == len(untrained), "nothing was learnt: the test is blind"
    check_plan(seen, kind)


def check_plan(seen: dict[str, Any], kind: str) -> None:
    """Check that the planned bytes are allocated, within 1 % for padding and odd sizes."""
    trained, frozen = (
        sum(p.numel() for p in make_model(layers, 0, torch.float32).parameters())
        for layers in (2, 3)
    )
    head = make_model(3, 0, torch.float32).lm_head.weight.numel()
    plan = bytes_per_rank(trained, frozen, kind, 2, "float32", frozen_outside_layers=head)
    assert sum(seen["state_bytes"].values()) == pytest.approx(plan["optimizer"], rel=0.01)
    assert seen["frozen_bytes"] == pytest.approx(plan["frozen"], rel=0.01)
    # the caller's model is empty
    assert seen["weight_bytes"] == pytest.approx(plan["weights"], rel=0.01)


def test_a_rank_that_divides_by_its_own_count_is_found(
    one: tuple[Path, dict[str, Any]], tmp_path: Path
):
    """Control: averaging the ranks' mean losses gives other losses, because their counts differ."""
    seen = run_ranks(Spec(str(tmp_path), kind="ddp", divisor="rank", **BY_SECONDS))
    with pytest.raises(AssertionError):
        check_equal(tmp_path, seen, one)
    assert max(abs(a - b) / b for a, b in zip(seen["losses"], one[1]["losses"])) > 100 * TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("kind", WITH_DDP, indirect=True)
def test_a_resumed_run_equals_an_uninterrupted_one(
    kind: str, one: tuple[Path, dict[str, Any]], tmp_path: Path
):
    spec = Spec(str(tmp_path), kind=kind, **BY_SECONDS)
    stopped = run_ranks(replace(spec, stop_after=4))
    assert stopped["interrupted"]
    assert len(stopped["losses"]) == 4
    resumed = run_ranks(spec)
    assert len(resumed["losses"]) == 2
    check_equal(tmp_path, resumed, one)


@pytest.mark.long
@pytest.mark.parametrize("kind", SHARDED, indirect=True)
def test_a_run_can_be_resumed_under_another_kind(
    kind: str, one: tuple[Path, dict[str, Any]], tmp_path: Path
):
    """Check that a run in one process, then sharded, then in one process equals the reference.

    Each part makes two steps.
    """
    spec = Spec(str(tmp_path), **BY_SECONDS)
    assert run(replace(spec, stop_after=2))["interrupted"]
    assert run_ranks(replace(spec, kind=kind, stop_after=2))["interrupted"]
    seen = run(spec)
    assert len(seen["losses"]) == 2
    check_equal(tmp_path, seen, one)


@pytest.mark.long
@pytest.mark.parametrize("kind", WITH_DDP, indirect=True)
def test_bfloat16_weights_have_float32_masters(kind: str, tmp_path: Path):
    """Check that bfloat16 weights are rounded float32 masters, which have more digits.

    Losses equal one process's to bfloat16's precision, and a resumed run continues.
    """
    alone = run(Spec(str(tmp_path / "one"), dtype="bfloat16"))
    seen = run_ranks(Spec(str(tmp_path / kind), kind=kind, dtype="bfloat16"))
    assert seen["losses"] == pytest.approx(alone["losses"], rel=5e-3)
    saved = checkpoint.load(tmp_path / kind / "checkpoints" / "step_000006")
    for name, weight in saved.model.items():
        master = saved.optimizer[f"master.{name}"]
        assert weight.dtype == torch.bfloat16
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), weight), name
    assert any(
        not torch.equal(saved.optimizer[f"master.{name}"], w.float())
        for name, w in saved.model.items()
    )
    resumed = run_ranks(Spec(str(tmp_path / kind), kind=kind, dtype="bfloat16", steps=7))
    assert len(resumed["losses"]) == 1
    trained = sum(p.numel() for p in make_model(2, 0, torch.float32).parameters())
    plan = bytes_per_rank(trained, 0, kind, 2, "bfloat16")
    assert sum(seen["state_bytes"].values()) == pytest.approx(plan["optimizer"], rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("kind", SHARDED[2:], indirect=True)
def test_tied_embeddings_stay_tied_when_sharded(kind: str, tmp_path: Path):
    alone = tmp_path / "one", run(Spec(str(tmp_path / "one"), tied=True))
    seen = run_ranks(Spec(str(tmp_path / kind), kind=kind, tied=True))
    check_equal(tmp_path / kind, seen, alone)


@pytest.mark.long
@pytest.mark.parametrize("kind", WITH_DDP, indirect=True)
def test_activation_checkpointing_changes_no_result(
    kind: str, one: tuple[Path, dict[str, Any]], tmp_path: Path
):
    seen = run_ranks(
        Spec(str(tmp_path), kind=kind, loop={"activation_checkpointing": True}, **BY_SECONDS)
    )
    check_equal(tmp_path, seen, one)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param("zero2", marks=pytest.mark.exhaustive), "fsdp"], indirect=True
)
def test_the_death_of_a_rank_ends_the_others(kind: str, tmp_path: Path):
    """Check that if a rank is killed, the other one misses its messages and ends within a minute.

    No launcher is used; tests/distill tests the launcher, which names the rank.
    """
    ranks = start_ranks(Spec(str(tmp_path), kind=kind, steps=100_000, loop={"eval_every": 0}), 2)
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoints").exists() and time.monotonic() < deadline:
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.1)
    psutil.Process(ranks[1].pid).send_signal(signal.SIGKILL)
    assert ranks[0].wait(timeout=60) != 0


@pytest.mark.parametrize("kind", SHARDING)
def test_sharding_kinds_need_several_processes(kind: str):
    with pytest.raises(
        UserError,
        match=f"parallel.kind is {kind} with one process.*parallel=single, or parallel.processes=2",
    ):
        Parallel(ParallelConfig(kind=kind), "cpu")


def test_the_single_kind_refuses_several_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match="parallel.kind is single in a job of 2 ranks: use parallel=ddp, zero1"
    ):
        Parallel(ParallelConfig(), "cpu")


def test_a_missing_deepspeed_is_reported(monkeypatch: pytest.MonkeyPatch):
    from training.parallel.strategy import zero

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=r"zero2, but DeepSpeed is not installed. Run pip install -e '\.\[train\]'",
    ):
        zero.plugin(2, use_cpu=True)
