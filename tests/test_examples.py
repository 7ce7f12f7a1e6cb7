"""The examples run: the three scripts as commands, and the notebook cell by cell.

One namespace executes the code cells, without a Jupyter kernel and its thirty packages.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "walkthrough.ipynb"
pytestmark = pytest.mark.long


def run(script: str, *arguments: object) -> str:
    """Run an example from the root of the repository, and return its output."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_the_scripts_distil_decode_with_and_measure_a_drafter(tmp_path: Path) -> None:
    drafter = tmp_path / "distil" / "drafter"
    printed = run("distil_a_drafter.py", f"output_dir={drafter.parent}", "loop.max_steps=8")
    assert "model.safetensors" in printed and drafter.is_dir()
    assert "forward passes" in run("decode_with_a_drafter.py", drafter)
    folder = tmp_path / "measure"
    printed = run(
        "measure_a_drafter.py", drafter, f"output_dir={folder}", "max_prompts=6", "sweep=[2]"
    )
    assert "prompt_lookup" in printed and (folder / "report.html").is_file()


def test_prompt_lookup_needs_no_drafter() -> None:
    assert "forward passes" in run("decode_with_a_drafter.py")


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALKTHROUGH_RUNS", str(tmp_path))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "the notebook is stored without outputs"
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert (tmp_path / "measure" / "report.html").is_file()
