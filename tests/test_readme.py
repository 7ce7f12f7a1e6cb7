"""What the README tells a newcomer to type works: the Python example runs, and every command composes."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from distill.config import PretrainConfig, QualityConfig, TrainConfig
from eval.config import EvalConfig
from training.config import JobConfig, typed
from training.job import CONF, check_arguments, register

ROOT = CONF.parent
README = (ROOT / "README.md").read_text()
SCHEMAS: dict[str, type[JobConfig]] = {
    "distill.pretrain": PretrainConfig,
    "distill.quality": QualityConfig,
    "distill.train": TrainConfig,
    "eval.run": EvalConfig,
}


def commands() -> list[str]:
    files = [README, (ROOT / "assets" / "README.md").read_text(), (ROOT / "scripts" / "quickstart.sh").read_text()]
    found = [match for text in files for match in re.findall(r"python -m ([\w.]+(?: [^`\n|]*)?)", text)]
    return sorted({command.strip() for command in found if command.split()[0] in SCHEMAS})


def test_the_readme_names_every_job():
    named = {command.split()[0] for command in commands()}
    assert named == set(SCHEMAS)
    assert {path.stem.replace("_", ".", 1) for path in CONF.glob("*_*.yaml")} == set(SCHEMAS)


@pytest.mark.parametrize("command", commands())
def test_every_command_composes(command: str):
    job, *arguments = (word for word in shlex.split(command) if word != "...")
    check_arguments(arguments, job, SCHEMAS[job])
    register(job, SCHEMAS[job])
    swept = "-m" in arguments
    single = [
        re.sub(r"=(\d+)(,\d+)+$", r"=\1", word) if swept else word for word in arguments if word not in ("-m", '"$@"')
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert typed(compose(job.replace(".", "_"), single), SCHEMAS[job]).job == job


def test_every_script_named_is_there():
    for path in re.findall(r"(?:\./|python )(scripts/[\w/]+\.(?:sh|py))", README):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / path).is_file(), path


def test_the_python_example_runs(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    for name in ("assets/target", "runs/quickstart/distill.train/drafter"):
        assert f'"{name}"' in code
        shutil.copytree(tiny_target, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_scripts_are_executable_and_parse():
    for script in [*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"]:
        assert subprocess.run(["bash", "-n", script]).returncode == 0
        assert script.name == "environment.sh" or os.access(script, os.X_OK)
