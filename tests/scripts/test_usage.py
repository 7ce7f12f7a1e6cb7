"""Every script prints its usage when asked for help, and does nothing else."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PYTHON = [path for path in sorted(SCRIPTS.rglob("*.py")) if "__main__" in path.read_text()]
SHELL = [
    *(path for path in sorted(SCRIPTS.rglob("*.sh")) if path.name != "environment.sh"),
    *sorted(SCRIPTS.rglob("*.sbatch")),
]


def name_of(path: Path) -> str:
    return str(path.relative_to(SCRIPTS))


def refuse(*given: Any, **named: Any) -> NoReturn:
    raise AssertionError("a script that was asked for help does something")


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("script", PYTHON, ids=name_of)
def test_a_python_script_prints_its_usage(
    script: Path, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the script in this process, which has imported the heavy packages already."""
    monkeypatch.setattr(sys, "argv", [str(script), flag])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(script), run_name="imported")  # packages may write caches when imported
    for name in ("write_text", "write_bytes", "mkdir", "rename", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code
    shown, docstring = capsys.readouterr().out, ast.get_docstring(ast.parse(script.read_text()))
    assert docstring is not None
    line = docstring.splitlines()[0]
    assert line in shown or f"usage: {script.name} [-h]" in shown
    assert f"python scripts/{name_of(script)}" in docstring or f"scripts.{script.stem}" in docstring


@pytest.mark.parametrize(
    ("name", "words", "error"),
    [
        (
            "model_card.py",
            ["folder=x", "licence=mit"],
            "'licence'; the nearest valid key is 'license'",
        ),
        ("model_card.py", ["folder=/nowhere"], "/nowhere.*README.md"),
        ("to_safetensors.py", ["/nowhere"], "/nowhere has no pytorch_model"),
        ("bench/teacher_cache.py", ["dtype=float7"], "float7"),
    ],
)
def test_a_user_error_ends_a_script_with_one_line(
    name: str, words: list[str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match=f"^error: .*{error}") as ended:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    assert "\n" not in str(ended.value.code)


@pytest.mark.parametrize("script", SHELL, ids=name_of)
def test_a_shell_script_prints_its_usage(script: Path, tmp_path: Path) -> None:
    """Run the script where no Python, pip or Slurm can be found."""
    for name in ("bash", "sed", "dirname", "cat"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    environment = {"PATH": str(tmp_path), "PYTHON": "/nowhere/python", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(script), "--help"],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        cwd=tmp_path,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, "")
    header = [line[2:] for line in script.read_text().splitlines()[1:] if line.startswith("# ")]
    assert header[0] in done.stdout or done.stdout.startswith("usage: sbatch")


def test_the_scripts_are_found() -> None:
    names = {*map(name_of, [*PYTHON, *SHELL])}
    assert {"data/make_chats.py", "from_gguf.py", "bench/engines.py", "engines/vllm.sh"} <= names
