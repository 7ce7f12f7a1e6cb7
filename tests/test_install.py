"""Installation from the wheel, without the checkout: the command lists and runs the jobs.

The wheel contains the jobs' configurations and the embedded target.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from jobs.command import JOBS
from jobs.schemas import SCHEMAS

ROOT = Path(__file__).resolve().parents[1]
EDITABLE = "__editable__*"  # files that lead an installation back to the checkout
MOST_MEGABYTES = 16
STEP = "decoding/models/native/step"
TOY_LOOP = "loop.max_steps=2 loop.tokens_per_step=512 loop.micro_batch_tokens=512 loop.eval_every=0"
# job -> arguments that its dry run needs
DRY_RUNS = {
    "distill.compact": "model=padded",
    "distill.pretrain": "model.hidden_size=64 model.num_hidden_layers=2 "
    "model.num_attention_heads=2 model.intermediate_size=128",
    "distill.prune": "target=embedded student=shallow data=embedded",
    "distill.quality": "",
    "distill.regenerate": "",
    "distill.skip_search": "",
    "distill.train": "",
    "eval.analyze": "path=totals.txt",
    "eval.compare": "runs=[runs/eval.run/default]",
    "eval.doctor": "drafter=prompt_lookup",
    "eval.plan": "",
    "eval.replay": "log=answers.jsonl drafters=[prompt_lookup]",
    "eval.run": "drafters=[prompt_lookup]",
    "heads.train": "head=medusa",
    "recurrent_drafting.generate": "",
    "recurrent_drafting.train": "",
    "serving.api": "",
    "serving.web": "",
}

OFTEN = ("distill.train", "eval.run", "recurrent_drafting.train")  # dry runs of the tier --all

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the tracked files, without build folders, and return it."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(copy)], check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment with this one's dependencies and the wheel installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    dependencies = folder / "dependencies"  # all but the editable installation
    dependencies.mkdir()
    theirs = Path(sysconfig.get_path("purelib"))
    hidden = {*theirs.glob(EDITABLE), *theirs.glob("shallow_draft*")}
    for path in theirs.iterdir():
        if path not in hidden:
            (dependencies / path.name).symlink_to(path)
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return folder


@pytest.fixture(scope="module")
def folder(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working folder with a zero-padded model for distill.compact."""
    work = tmp_path_factory.mktemp("work")
    shutil.copytree(ROOT / "assets" / "target", work / "padded")
    return work


def run(installed: Path, folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the installation in a folder from which the checkout is not importable."""
    names = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment["PATH"] = f"{installed / 'bin'}{os.pathsep}{environment['PATH']}"
    program, *arguments = command.split()
    return subprocess.run(
        [str(installed / "bin" / program), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def output(installed: Path, folder: Path, command: str) -> str:
    """Run a command that must succeed, and return its output."""
    done = run(installed, folder, command)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_is_small(wheel: Path):
    assert wheel.stat().st_size < MOST_MEGABYTES * 1e6
    assert wheel.name.startswith("shallow_draft-0.2.0-")


def test_the_wheel_has_the_sources_of_the_fused_step(wheel: Path):
    with zipfile.ZipFile(wheel) as contents:
        found = {name for name in contents.namelist() if name.startswith(f"{STEP}/")}
    assert found == {f"{STEP}/{file.name}" for file in (ROOT / STEP).iterdir()}


def test_the_checkout_is_out_of_reach(installed: Path, folder: Path):
    code = "import decoding, jobs.paths; print(decoding.__file__); print(jobs.paths.ASSETS)"
    found = subprocess.run(
        [str(installed / "bin" / "python"), "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(line.startswith(str(installed)) for line in found.splitlines())


def test_the_command_lists_every_job(installed: Path, folder: Path):
    listed = output(installed, folder, "shallow-draft")
    assert [line.split()[0] for line in listed.partition("Jobs:\n")[2].splitlines()] == [*JOBS]
    assert {*SCHEMAS} <= {*JOBS}


def test_the_command_prints_its_version(installed: Path, folder: Path):
    assert output(installed, folder, "shallow-draft --version") == "shallow-draft 0.2.0\n"


def test_an_unknown_job_is_an_error_that_names_the_nearest(installed: Path, folder: Path):
    done = run(installed, folder, "shallow-draft eval.rnu")
    assert done.returncode == 2
    assert "'eval.rnu' is not a job; the nearest is 'eval.run'" in done.stderr


def test_help_lists_settings_and_configurations(installed: Path, folder: Path):
    listed = output(installed, folder, "shallow-draft eval.run --help")
    assert "target.path=embedded:target" in listed
    assert "llama3_1_8b" in listed


def test_the_embedded_target_is_distilled_and_measured(installed: Path, folder: Path):
    shape = "student.num_hidden_layers=1 held_out.max_prompts=2 held_out.max_new_tokens=4"
    train = f"shallow-draft distill.train data.max_samples=20 {TOY_LOOP} {shape}"
    output(installed, folder, f"{train} output_dir=runs/tiny")
    assert (folder / "runs/tiny/drafter/model.safetensors").is_file()
    measure = "max_prompts=2 sweep=[2] sweep_prompts=1 max_new_tokens=6 bootstrap_resamples=50"
    printed = output(
        installed,
        folder,
        f"shallow-draft eval.run drafters=[runs/tiny/drafter] {measure} timing_repeats=1 samples=1",
    )
    assert "prompt_lookup" in printed
    assert (folder / "runs/eval.run/default/results.jsonl").stat().st_size
    output(installed, folder, "shallow-draft eval.compare runs=[runs/eval.run/default]")
    assert (folder / "runs/eval.compare/default/comparison.html").stat().st_size


@pytest.mark.parametrize(
    "job",
    [job if job in OFTEN else pytest.param(job, marks=pytest.mark.exhaustive) for job in DRY_RUNS],
)
def test_every_job_has_a_dry_run(installed: Path, folder: Path, job: str):
    output(
        installed,
        folder,
        f"shallow-draft {job} {DRY_RUNS[job]} dry_run=true output_dir=runs/dry/{job}",
    )


def test_dry_runs_cover_every_job():
    assert {*DRY_RUNS} == {*SCHEMAS}
