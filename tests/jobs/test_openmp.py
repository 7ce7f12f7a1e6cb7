"""A job's threads spin briefly while they wait, unless the environment chooses otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.openmp import SPINS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("way", "given", "spins"),
    [
        (["-m", "package.job"], {}, "2000"),
        (["-m", "package.job"], {SPINS: "7"}, "7"),
        (["-m", "package.job"], {"OMP_WAIT_POLICY": "active"}, "None"),
        (["-c", "import package.job"], {}, "None"),
    ],
    ids=["job", "chosen", "policy", "import"],
)
def test_only_a_job_sets_how_long_threads_spin(
    way: list[str], given: dict[str, str], spins: str, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text((ROOT / "eval" / "__init__.py").read_text())
    (package / "job.py").write_text(f"import os\nprint(os.environ.get({SPINS!r}))\n")
    usual = {k: v for k, v in os.environ.items() if k not in (SPINS, "OMP_WAIT_POLICY")}
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *way], env={**usual, "PYTHONPATH": path, **given}, capture_output=True
    )
    assert done.stdout.decode() == f"{spins}\n"
