"""Ranks of torchrun, DeepSpeed and Slurm: their variables, and refusals of idle ranks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from decoding.errors import UserError
from distill.config import TrainConfig
from jobs import ranks
from jobs.config import ParallelConfig, typed
from jobs.job import CONF, check_arguments, register, run_typed
from jobs.launch import count_processes, free_port

ROOT = Path(__file__).resolve().parents[2]
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_JOB_NODELIST": "gpu[07-08,12]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables that launchers set for a rank from the environment."""
    for name in ranks._VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_slurms_variables_become_torchruns():
    assert ranks.slurm_ranks(STEP) == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "19711",
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node003", "node003"),
        ("a1,b2", "a1"),
        ("gpu[07-08,12]", "gpu07"),
        ("n[1,3],m4", "n1"),
        ("rack-2-n[10-12]", "rack-2-n10"),
    ],
)
def test_the_master_is_the_first_node(nodes: str, first: str):
    assert ranks.first_node(nodes) == first


def test_slurm_ranks_outside_of_a_step_are_refused():
    with pytest.raises(
        UserError,
        match="SLURM_PROCID is not set: start the job with srun, as scripts/slurm/train.sbatch "
        "does",
    ):
        ranks.slurm_ranks({name: value for name, value in STEP.items() if name != "SLURM_PROCID"})


def test_a_rank_takes_the_number_of_processes_from_its_launcher(monkeypatch: pytest.MonkeyPatch):
    assert count_processes(ParallelConfig(kind="ddp", processes=3)) == 3
    assert not ranks.is_rank()
    for name, value in {"RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert ranks.is_rank()
    assert count_processes(ParallelConfig(kind="fsdp")) == 16
    with pytest.raises(
        UserError, match="parallel.processes is 3, but this process was started as one of 8 ranks"
    ):
        count_processes(ParallelConfig(kind="fsdp", processes=3))
    with pytest.raises(UserError, match="parallel.kind is single in a job of 16 ranks"):
        count_processes(ParallelConfig())


def test_local_rank_of_the_deepspeed_launcher_is_accepted(monkeypatch: pytest.MonkeyPatch):
    """Check that --local_rank=N gives the local rank if the launcher has set RANK and WORLD_SIZE.

    DeepSpeed's launcher adds the argument and sets LOCAL_SIZE instead of LOCAL_WORLD_SIZE. Values
    that contradict each other are refused.
    """
    asked = ["parallel=zero2", "seed=3"]
    assert ranks.take_local_rank(asked) == asked
    with pytest.raises(
        UserError, match=r"--local_rank=1 was given, but RANK and WORLD_SIZE are not set"
    ):
        ranks.take_local_rank(["--local_rank=1", *asked])
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    for name in ranks._VARIABLES:  # makes monkeypatch restore those that the code sets
        monkeypatch.setenv(name, ranks.os.environ.get(name, ""))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    for flag in ("--local_rank=1", "--local-rank=1"):
        assert ranks.take_local_rank([flag, *asked]) == asked
    assert (ranks.local_rank(), count_processes(ParallelConfig(kind="zero2"))) == (1, 16)
    with pytest.raises(
        UserError, match="parallel.processes is 3, but this process was started as one of 8 ranks"
    ):
        count_processes(ParallelConfig(kind="zero2", processes=3))
    with pytest.raises(UserError, match="--local_rank is 2 and LOCAL_RANK is 1"):
        ranks.take_local_rank(["--local_rank=2"])


def test_contradictory_kinds_and_numbers_of_ranks_are_refused():
    with pytest.raises(
        UserError, match="parallel.kind is zero2 with one process, but needs several"
    ):
        count_processes(ParallelConfig(kind="zero2", processes=1))
    with pytest.raises(UserError, match="parallel.launcher is 'mpi'; expected auto or slurm"):
        ranks.adopt_slurm_rank(TrainConfig(parallel=ParallelConfig(launcher="mpi")))


def test_idle_ranks_are_allowed_only_in_a_stage(
    monkeypatch: pytest.MonkeyPatch,
):
    config = TrainConfig(job="distill.train")
    assert not ranks.is_idle_rank(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        UserError,
        match="distill.train runs in one process, but was started in 2 ranks: use parallel=ddp",
    ):
        ranks.is_idle_rank(config)
    assert not ranks.is_idle_rank(TrainConfig(parallel=ParallelConfig(kind="ddp")))
    monkeypatch.setenv("SHALLOW_DRAFT_STAGE", "1")
    assert ranks.is_idle_rank(config)
    monkeypatch.setenv("RANK", "0")
    assert not ranks.is_idle_rank(config)
    assert not ranks.is_rank(), "children of rank 0 are not ranks"


def test_ranks_idle_through_an_experiment_are_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    """Check that an experiment in one process is refused if it is started in several ranks.

    Otherwise one GPU would do all the work unnoticed, because stages may have idle ranks.
    """
    register("distill.train", TrainConfig)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        one, shared = (
            compose("distill_train", ["+experiment=llama_796m", *given])
            for given in ([], ["parallel=ddp"])
        )
    ran: list[str] = []
    monkeypatch.setattr("jobs.job.run_stages", lambda config, _: ran.append(config.parallel.kind))

    def start(composed: DictConfig) -> None:
        run_typed(composed, "distill.train", TrainConfig, lambda _: None)

    start(one)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(
        UserError,
        match="distill.train runs in one process, but was started in 8 ranks: use parallel",
    ):
        start(one)
    start(shared)
    assert ran == ["single", "ddp"]


def test_a_dry_run_needs_no_slurm_step(monkeypatch: pytest.MonkeyPatch):
    config = TrainConfig(parallel=ParallelConfig(kind="ddp", launcher="slurm"))
    with pytest.raises(UserError, match="is not set: start the job with srun"):
        ranks.adopt_slurm_rank(config)
    config.dry_run = True
    ranks.adopt_slurm_rank(config)
    assert not ranks.is_rank()
    for name, value in STEP.items():  # only one of 16 tasks prints the plan
        monkeypatch.setenv(name, value)
    for name in ranks._VARIABLES:  # makes monkeypatch restore those that the code sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ranks.adopt_slurm_rank(config)
    assert ranks.is_idle_rank(config)


def test_a_sweep_on_slurm_needs_srun(
    submitit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that the slurm launcher is refused if srun is not on the PATH.

    Otherwise submitit would fail with a traceback.
    """
    arguments = ["-m", "seed=1,2", "hydra/launcher=slurm"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"srun is not on the PATH here.*remove hydra/launcher="):
        check_arguments(arguments, "distill.train", TrainConfig)
    (tmp_path / "srun").touch(0o755)
    check_arguments(arguments, "distill.train", TrainConfig)


def test_the_slurm_launcher_composes(submitit: None):
    register("distill.train", TrainConfig)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose(
            "distill_train",
            ["hydra/launcher=slurm", "hydra.launcher.nodes=2"],
            return_hydra_config=True,
        )
    launcher = composed.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.nodes, launcher.gpus_per_node, launcher.tasks_per_node) == (2, 8, 1)


_WAIT_TWICE = """
import os, sys, time
from jobs.ranks import RankBarrier
barrier = RankBarrier()
for stage in ("one", "two"):
    if barrier.rank == 0:
        time.sleep(0.5)
        open(sys.argv[1] + "/" + stage, "w").close()
    barrier.wait(stage)
    assert os.path.exists(sys.argv[1] + "/" + stage), "it returned before rank 0 arrived"
"""


@pytest.mark.long
def test_ranks_wait_for_each_other_between_stages(tmp_path: Path):
    places = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", _WAIT_TWICE, str(tmp_path)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **places, "RANK": str(r)}, cwd=ROOT)
        for r in range(3)
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]


def test_the_sbatch_script_is_valid():
    assert shutil.which("bash") is not None
    script = ROOT / "scripts" / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: sbatch scripts/slurm/train.sbatch JOB [OVERRIDES]" in done.stderr


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (["+experiment=llama_796m"], "parallel=slurm"),
        (["+experiment=llama_796m", "target.parallel=layers"], "parallel=slurm"),
        (["+experiment=llama_796m", "parallel.kind=zero2"], "parallel=slurm"),
        (["parallel=fsdp", "+experiment=llama_796m"], "parallel.launcher=slurm"),
    ],
)
def test_the_sbatch_script_adds_parallel_settings(given: list[str], added: str, tmp_path: Path):
    """Check that the sbatch script adds the Slurm launcher and keeps a given kind of parallelism.

    If no kind is given, ddp is used.
    """
    (tmp_path / "srun").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"')
    (tmp_path / "srun").chmod(0o755)
    script = ["bash", str(ROOT / "scripts" / "slurm" / "train.sbatch"), "distill.train", *given]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        script, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    arguments = done.stdout.split()[-len(given) - 1 :]
    assert arguments == [*given, added]
    register("distill.train", TrainConfig)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = typed(compose("distill_train", arguments), TrainConfig).parallel
    asked = [text.partition("=")[2] for text in given if text.startswith("parallel")]
    assert (found.kind, found.launcher) == ((asked or ["ddp"])[0], "slurm")
