"""`distill.prune` in ranks: a target in shares gives the scores, the order of layers and the cut of
a whole one; every kind learns the same masks.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from decoding.errors import UserError
from distill.prune.job import check
from jobs.job import CONF
from tests.support import prune_rank

from .test_prune import BRIEF, NARROW, arguments, configured, same, weights

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# DeepSpeed's engine takes long to start, and the trainings of tests/training use it in every run
SELDOM = pytest.mark.exhaustive
KINDS = [
    "ddp",
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
    """A job of its own, whose scores are cached in a folder of its own."""
    given = arguments(target, folder, *overrides, f"importance.cache_dir={folder}_cache")
    end = subprocess.run(
        [sys.executable, "-m", "distill.prune", *given],
        cwd=CONF.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert end.returncode == 0, end.stdout[-2000:] + end.stderr[-3000:]


@pytest.mark.parametrize(
    "kind", ["fsdp", "ddp", pytest.param("zero3", marks=pytest.mark.exhaustive)], indirect=True
)
@pytest.mark.long
def test_a_target_in_shares_is_scored_as_a_whole_one(kind: str, tiny_target: Path, tmp_path: Path):
    alone = prune_rank.run(str(tiny_target), str(tmp_path / "one"), "single")
    ranks = prune_rank.run_ranks(tiny_target, tmp_path / "two", kind)
    expected = load_file(tmp_path / "one" / "rank0.safetensors")
    for rank, told in enumerate(ranks):
        assert told["order"] == alone["order"]
        assert told["acceptance"] == pytest.approx(alone["acceptance"], rel=1e-5)
        found = load_file(tmp_path / "two" / f"rank{rank}.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
    head = 2048 * 32 * 4  # the lm_head, which stays whole
    share = sum(told["bytes"] - head for told in ranks) / (alone["bytes"] - head)
    assert share == pytest.approx(2.0 if kind == "ddp" else 1.0, rel=0.01), (
        "each holds its share alone"
    )
    # the control: a row is seen
    fewer = prune_rank.run(str(tiny_target), str(tmp_path / "fewer"), "single", 16)
    assert fewer["order"] == alone["order"]
    scores = load_file(tmp_path / "fewer" / "rank0.safetensors")["units_LF"]
    assert not torch.allclose(scores, expected["units_LF"], rtol=1e-5)


@pytest.fixture(scope="module")
def alone(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Masks learned by one process: two forwards of one row a step."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    prune(tiny_target, folder, *MASKS)
    return folder


def records(folder: Path, key: str) -> list[float]:
    lines = (folder / "work" / "1" / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_two_processes_learn_the_masks_of_one(
    kind: str, alone: Path, tiny_target: Path, tmp_path: Path
):
    """The same mask for the same rows, whichever rank runs them; the gradients of the masks, whole
    on every rank, are added up.
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
    assert same(*masks), "and the same cut"


@pytest.mark.long
def test_masks_learned_in_shares_go_on_in_one_process(
    alone: Path, tiny_target: Path, tmp_path: Path
):
    """Half of the steps under FSDP, stopped by a signal, the rest alone."""
    folder = tmp_path / "run"
    given = arguments(
        tiny_target,
        folder,
        *MASKS,
        "loop.checkpoint_every=1",
        f"importance.cache_dir={folder}_cache",
    )
    shared = [*given, "parallel=fsdp", "parallel.processes=2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "distill.prune", *shared], cwd=CONF.parent, env=ENVIRONMENT
    )
    deadline = time.monotonic() + 120
    while (
        not list((folder / "work" / "1" / "checkpoints").glob("step_*"))
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=60) == 130
    prune(tiny_target, folder, *MASKS, "loop.checkpoint_every=1")
    assert records(folder, "loss") == pytest.approx(records(alone, "loss"), rel=1e-4)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(folder)[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("zero1", marks=SELDOM), "fsdp"], indirect=True)
def test_probes_and_stages_run_with_a_target_in_shares(
    kind: str, tiny_target: Path, tmp_path: Path
):
    """Several trainings follow each other in the same ranks: the probes, a distillation between the
    stages, the probes of the last cut.
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
    told = [
        json.loads((tmp_path / name / "manifest.json").read_text())["metrics"]
        for name in ("one", "two")
    ]
    assert [stage["layers"] for stage in told[1]["stages"]] == [
        stage["layers"] for stage in told[0]["stages"]
    ]
    assert told[1]["acceptance"] == pytest.approx(told[0]["acceptance"], rel=1e-4)
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_a_dead_rank_ends_the_job_with_its_name(tiny_target: Path, tmp_path: Path):
    given = arguments(
        tiny_target,
        tmp_path / "run",
        *MASKS,
        "loop.max_steps=4000",
        "parallel=fsdp",
        "parallel.processes=2",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "distill.prune", *given],
        cwd=CONF.parent,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
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


def test_frozen_weights_have_nothing_to_share(tiny_target: Path, tmp_path: Path):
    given = ("mode=l0", "l0.train_weights=false", "parallel.processes=2")
    check(configured(tiny_target, tmp_path, *given, "parallel=ddp"))
    with pytest.raises(
        UserError, match="l0.train_weights is False, expected true with zero kinds and fsdp"
    ):
        check(configured(tiny_target, tmp_path, *given, "parallel=fsdp"))
