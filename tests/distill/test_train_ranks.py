"""Test `distill.train` in ranks: every kind and launcher gives the same drafter."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file

from distill.config import TrainConfig
from jobs.job import CONF, register
from jobs.launch import free_port
from tests.support.forks import Fork, run_ranks, succeed

ROOT = CONF.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def job(target: Path, folder: Path, *overrides: str) -> list[str]:
    given = [
        "+experiment=smoke",
        f"target.path={target}",
        f"output_dir={folder}",
        "target.device=cpu",
        "threads=1",
    ]
    return ["-m", "distill.train", *given, *overrides]


def done(command: list[str], timeout: float = 300) -> None:
    end = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout
    )
    assert end.returncode == 0, end.stdout[-2000:] + end.stderr[:3000] + end.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    succeed(*job(tiny_target, folder)[1:])
    return folder


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open() if '"loss"' in line
    ]


def same_drafter(folder: Path, alone: Path) -> None:
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
    ours, theirs = (load_file(one / "drafter" / "model.safetensors") for one in (folder, alone))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    figures = [
        json.loads((one / "manifest.json").read_text())["metrics"] for one in (folder, alone)
    ]
    assert figures[0]["acceptance"] == pytest.approx(figures[1]["acceptance"], rel=1e-5)


@pytest.mark.long
def test_torchrun_needs_no_other_arguments(alone: Path, tiny_target: Path, tmp_path: Path):
    """Check that torchrun gives one process's drafter, with the target split over two ranks."""
    split = ["target.parallel=layers", "target.processes=2"]
    done([*TORCHRUN, *job(tiny_target, tmp_path, "parallel=fsdp", *split)])
    same_drafter(tmp_path, alone)


@pytest.mark.exhaustive
def test_the_deepspeed_launcher_needs_no_other_arguments(
    alone: Path, tiny_target: Path, tmp_path: Path, deepspeed: None
):
    """Check that the launcher's --local_rank=N is accepted and the drafter is one process's."""
    launcher = [
        "env",
        "DS_ACCELERATOR=cpu",
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        "2",
    ]
    module, *arguments = job(tiny_target, tmp_path, "parallel=ddp")[1:]
    done([*launcher, "--master_port", str(free_port()), "--module", module, *arguments])
    same_drafter(tmp_path, alone)


@pytest.mark.exhaustive
def test_our_launcher_starts_the_ranks_of_zero(
    alone: Path,
    tiny_target: Path,
    tmp_path: Path,
    deepspeed: None,
    monkeypatch: pytest.MonkeyPatch,
):
    """Check that ZeRO trains the same drafter, and that DeepSpeed compiles nothing for it.

    A rank killed while it compiled used to leave a lock for which every later run waited.
    """
    extensions = tmp_path / "extensions"
    monkeypatch.setitem(ENVIRONMENT, "TORCH_EXTENSIONS_DIR", str(extensions))
    done([sys.executable, *job(tiny_target, tmp_path, "parallel=zero3", "parallel.processes=2")])
    assert not extensions.exists()
    same_drafter(tmp_path, alone)


@pytest.mark.long
def test_ranks_train_the_same_parallel_drafts(tiny_target: Path, tmp_path: Path):
    """Check a model that drafts in one pass: which deep tokens train is sampled for each text."""
    given = "parallel_drafting.tokens=4"
    succeed(*job(tiny_target, tmp_path / "alone", given)[1:])
    for kind in ("ddp", "fsdp"):
        run_ranks(*job(tiny_target, tmp_path / kind, given, f"parallel={kind}")[1:])
        same_drafter(tmp_path / kind, tmp_path / "alone")
    card = json.loads((tmp_path / "fsdp" / "drafter" / "drafter_card.json").read_text())
    assert card["parallel_drafting"]["tokens"] == 4


@pytest.mark.exhaustive
def test_ranks_write_the_same_text_of_the_student(tiny_target: Path, tmp_path: Path):
    """Check that two ranks, with sharded weights too, train on the rows of one process."""
    given = ["on_policy.share=0.5", "on_policy.refresh=2", "on_policy.max_new_tokens=24"]
    succeed(*job(tiny_target, tmp_path / "alone", *given)[1:])
    for kind in ("ddp", "fsdp"):
        run_ranks(*job(tiny_target, tmp_path / kind, *given, f"parallel={kind}")[1:])
        same_drafter(tmp_path / kind, tmp_path / "alone")
        assert written(tmp_path / kind) == written(tmp_path / "alone")


def written(folder: Path) -> dict[str, Any]:
    """Return the student's rows in the last checkpoint, without the figures on them."""
    (state,) = folder.glob("checkpoints/step_000006/state.json")
    return json.loads(state.read_text())["data"]["written"] | {"figures": None}


@pytest.mark.exhaustive
def test_stages_in_ranks_run_together_or_on_rank_0(alone: Path, tiny_target: Path, tmp_path: Path):
    """Check that training stages run in both ranks of torchrun, and an evaluation on rank 0 alone.

    The last stage is a sweep whose members have two ranks.
    """
    benchmark = [
        "drafters=[prompt_lookup]",
        "prompt_lookup_control=false",
        "sweep_prompts=1",
        "max_prompts=2",
        "max_new_tokens=4",
    ]
    stages = {
        "eval.run": [f"target.path={tiny_target}", "output_dir={output_dir}/eval", *benchmark],
        "distill.train:sweep": [
            "-m",
            *job(tiny_target, Path("{output_dir}/sweep"), "parallel=ddp", "loop.max_steps=2,3")[2:],
        ],
    }
    register("distill.train", TrainConfig)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("distill_train", job(tiny_target, tmp_path / "run", "parallel=ddp")[2:])
    composed.stages, composed.stage_overrides = (
        ["distill.train", "eval.run", "distill.train:sweep"],
        stages,
    )
    config = tmp_path / "config.yaml"
    OmegaConf.save(composed, config)
    done([*TORCHRUN, "-m", "distill.train", "--config-file", str(config)], timeout=500)
    same_drafter(tmp_path / "run" / "distill.train", alone)
    assert (tmp_path / "run" / "eval" / "results.jsonl").is_file()
    for steps in (2, 3):
        member = tmp_path / "run" / "sweep" / f"loop.max_steps={steps}"
        assert losses(member)[:1] == pytest.approx(losses(alone)[:1], rel=1e-5)
        assert len(losses(member)) == steps
        assert (member / "drafter" / "config.json").is_file()


_SIMULATED_SRUN = """#!/usr/bin/env bash
# Replaces srun on one machine: it starts two tasks with Slurm's variables,
# as `srun --ntasks=2` would start them.
while [[ "$1" == --* ]]; do shift; done
export SLURM_NTASKS=2 SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
status=0
wait $first || status=$?
wait $second || status=$?
exit $status
"""


@pytest.mark.long
def test_the_sbatch_script_under_a_simulated_srun(alone: Path, tiny_target: Path, tmp_path: Path):
    """Check that the sbatch script's ranks give one process's drafter, without `parallel=`.

    A shell script replaces srun: it starts two ranks with Slurm's variables.
    """
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(_SIMULATED_SRUN)
    srun.chmod(0o755)
    _, *given = job(tiny_target, tmp_path / "run")
    environment = {
        **ENVIRONMENT,
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
    }
    script = ["bash", str(ROOT / "scripts" / "slurm" / "train.sbatch"), *given]
    end = subprocess.run(
        script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert end.returncode == 0, end.stderr[-3000:]
    same_drafter(tmp_path / "run", alone)


@pytest.mark.exhaustive  # test_train.py kills a rank of DDP in every run
@pytest.mark.parametrize("kind", ["zero2", "fsdp"])
def test_a_dead_rank_ends_the_job_with_its_name(
    kind: str, tiny_target: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    if kind == "zero2":
        request.getfixturevalue("deepspeed")
    given = job(
        tiny_target,
        tmp_path,
        f"parallel={kind}",
        "parallel.processes=2",
        "loop.max_steps=4000",
        "loop.eval_every=0",
    )
    process = Fork(*given[1:])
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.is_file() and metrics.read_text().count("\n") > 1:
            break
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
    assert not (tmp_path / "drafter").exists()


@pytest.mark.exhaustive
def test_members_of_a_sweep_run_under_the_submitit_launcher(
    tiny_target: Path, tmp_path: Path, submitit: None
):
    """Check that Hydra's submitit launcher runs every member, and that a failing one is an error.

    The local executor is used instead of Slurm.
    """
    local = ["-m", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5", "dry_run=true"]
    good = [
        sys.executable,
        *job(tiny_target, tmp_path / "sweep", *local, "student.num_hidden_layers=1,2"),
    ]
    done(good)
    for layers in (1, 2):
        folder = tmp_path / "sweep" / f"student.num_hidden_layers={layers}" / "drafter"
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == layers
    bad = [
        sys.executable,
        *job(tiny_target, tmp_path / "bad", *local, "student.num_hidden_layers=0"),
    ]
    assert (
        subprocess.run(bad, cwd=ROOT, env=ENVIRONMENT, capture_output=True, timeout=300).returncode
        != 0
    )
