"""Conversion of pickled weights to safetensors: an equal model; pickled code is refused."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decoding.errors import UserError
from decoding.models.load import load_target
from scripts.to_safetensors import convert


@pytest.fixture
def pickled(tiny_target: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_converted_weights_load_as_the_same_model(pickled: Path, tiny_target: Path):
    with pytest.raises(UserError, match=r"python scripts/to_safetensors\.py"):
        load_target(pickled)
    before, after = load_file(tiny_target / "model.safetensors"), load_file(convert(pickled))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    load_target(pickled)
    with pytest.raises(UserError, match="exists already"):
        convert(pickled)


def test_a_pickle_that_runs_code_is_refused(pickled: Path, tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"w": Evil()}, pickled / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        convert(pickled)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_pickles_is_refused(tiny_target: Path):
    with pytest.raises(UserError, match=r"has no pytorch_model\*\.bin"):
        convert(tiny_target)
