"""Test `distill.prune` in ranks: scores, removal order, cut and masks equal one process's."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from decoding.errors import UserError
from distill.prune.job import check
from tests.support import prune_rank
from tests.support.forks import Fork, run_ranks, succeed
from tests.support.pruned_folders import BRIEF, NARROW, arguments, configured, same, weights

# DeepSpeed starts slowly, and tests/training covers it and DDP in every run
SELDOM = pytest.mark.exhaustive
KINDS = [
    pytest.param("ddp", marks=SELDOM),
    pytest.param("zero1", marks=SELDOM),
    pytest.param("zero2", marks=SELDOM),
    pytest.param("zero3", marks=SELDOM),
    "fsdp",
]
MASKS = (*BRIEF, *NARROW, "student.intermediate_size=32")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("zero"):
        request.getfixturevalue("deepspeed")
    return request.param


def prune(target: Path, folder: Path, *overrides: str) -> None:
    """Run `distill.prune` with a cache folder of its own, and assert that it succeeds.

    With `parallel.processes=2` it runs in two ranks, as a launcher starts them.
    """
    given = arguments(target, folder, *overrides, f"importance.cache_dir={folder}_cache")
    run = run_ranks if "parallel.processes=2" in overrides else succeed
    run("distill.prune", *given)


@pytest.mark.parametrize(
    "kind",
    ["fsdp", *(pytest.param(kind, marks=SELDOM) for kind in ("ddp", "zero3"))],
    indirect=True,
)
@pytest.mark.long
def test_a_sharded_target_gets_the_scores_of_an_unsharded_one(
    kind: str, tiny_target: Path, tmp_path: Path
):
    alone = prune_rank.run(str(tiny_target), str(tmp_path / "one"), "single")
    ranks = prune_rank.run_ranks(tiny_target, tmp_path / "two", kind)
    expected = load_file(tmp_path / "one" / "rank0.safetensors")
    for rank, result in enumerate(ranks):
        assert result["order"] == alone["order"]
        assert result["acceptance"] == pytest.approx(alone["acceptance"], rel=1e-5)
        found = load_file(tmp_path / "two" / f"rank{rank}.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
    head = 2048 * 32 * 4  # lm_head, which is not sharded
    share = sum(result["bytes"] - head for result in ranks) / (alone["bytes"] - head)
    assert share == pytest.approx(2.0 if kind == "ddp" else 1.0, rel=0.01), (
        "each rank holds only its shard"
    )
    # control: other rows give other scores
    fewer = prune_rank.run(str(tiny_target), str(tmp_path / "fewer"), "single", 16)
    assert fewer["order"] == alone["order"]
    scores = load_file(tmp_path / "fewer" / "rank0.safetensors")["units_LF"]
    assert not torch.allclose(scores, expected["units_LF"], rtol=1e-5)


@pytest.fixture(scope="module")
def alone(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learn masks in one process, with two forward passes of one row per step; return the run."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    prune(tiny_target, folder, *MASKS)
    return folder


def records(folder: Path, key: str) -> list[float]:
    lines = (folder / "work" / "1" / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_two_ranks_learn_the_masks_of_one_process(
    kind: str, alone: Path, tiny_target: Path, tmp_path: Path
):
    """Check that two ranks give the losses, weights and masks of one process.

    So a row has the same sampled masks on any rank, and the ranks' gradients are added up.
    """
    folder = tmp_path / "run"
    prune(tiny_target, folder, *MASKS, f"parallel={kind}", "parallel.processes=2")
    for key in ("loss", "gradient_norm", "held_out_sparsity_gap/layers", "held_out_margin/units"):
        assert records(folder, key) == pytest.approx(records(alone, key), rel=1e-4), key
    ours, theirs = weights(folder), weights(alone)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    masks = [load_file(one / "masks.safetensors") for one in (folder, alone)]
    assert same(*masks), "equal cuts"


@SELDOM
def test_masks_learned_by_fsdp_resume_in_one_process(
    alone: Path, tiny_target: Path, tmp_path: Path
):
    """Check that a run stopped under FSDP and resumed in one process equals a straight one."""
    folder = tmp_path / "run"
    given = arguments(
        tiny_target,
        folder,
        *MASKS,
        "loop.checkpoint_every=1",
        f"importance.cache_dir={folder}_cache",
    )
    shared = [*given, "parallel=fsdp", "parallel.processes=2"]
    process = Fork("distill.prune", *shared)
    deadline = time.monotonic() + 120
    while (
        not list((folder / "work" / "1" / "checkpoints").glob("step_*"))
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    prune(tiny_target, folder, *MASKS, "loop.checkpoint_every=1")
    assert records(folder, "loss") == pytest.approx(records(alone, "loss"), rel=1e-4)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(folder)[name], tensor, rtol=1e-4, atol=1e-5)


@SELDOM
@pytest.mark.parametrize("kind", ["zero1", "fsdp"], indirect=True)
def test_probes_and_stages_run_with_a_sharded_target(kind: str, tiny_target: Path, tmp_path: Path):
    """Check that two ranks select the layers and give the weights of one process.

    The same ranks train several times: probes, a distillation between two cuts, and probes again.
    """
    given = (
        *NARROW,
        "student.num_hidden_layers=1",
        "depths=[2]",
        "importance.probe_steps=2",
        "importance.sequences=17",
    )
    prune(tiny_target, tmp_path / "one", *given)
    prune(tiny_target, tmp_path / "two", *given, f"parallel={kind}", "parallel.processes=2")
    found = [
        json.loads((tmp_path / name / "manifest.json").read_text())["metrics"]
        for name in ("one", "two")
    ]
    assert [stage["layers"] for stage in found[1]["stages"]] == [
        stage["layers"] for stage in found[0]["stages"]
    ]
    assert found[1]["acceptance"] == pytest.approx(found[0]["acceptance"], rel=1e-4)
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], tensor, rtol=1e-3, atol=1e-4)


@SELDOM  # tests/distill/test_train.py kills a rank in every run
def test_a_dead_rank_ends_the_job_with_its_name(tiny_target: Path, tmp_path: Path):
    given = arguments(
        tiny_target,
        tmp_path / "run",
        *MASKS,
        "loop.max_steps=4000",
        "parallel=fsdp",
        "parallel.processes=2",
    )
    process = Fork("distill.prune", *given)
    checkpoints, deadline = tmp_path / "run" / "work" / "1" / "checkpoints", time.monotonic() + 120
    while (
        not list(checkpoints.glob("step_*"))
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    second = [
        child
        for child in psutil.Process(process.pid).children()
        if child.environ().get("RANK") == "1"
    ]
    second[0].kill()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "rank 1 of 2 was ended by SIGKILL" in words
    assert not (tmp_path / "run" / "student").exists()


def test_training_only_masks_refuses_sharded_kinds(tiny_target: Path, tmp_path: Path):
    given = ("mode=l0", "l0.train_weights=false", "parallel.processes=2")
    check(configured(tiny_target, tmp_path, *given, "parallel=ddp"))
    with pytest.raises(
        UserError,
        match="l0.train_weights is False, expected true with zero1, zero2, zero3 and fsdp",
    ):
        check(configured(tiny_target, tmp_path, *given, "parallel=fsdp"))
