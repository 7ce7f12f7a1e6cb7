"""Conversion of pickled weights to safetensors: an equal model; pickled code is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from decoding.errors import UserError
from decoding.models.folder import INDEX, load_state
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
    with pytest.raises(UserError, match=r"holds more than tensors, or is damaged .*not opened"):
        convert(pickled)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_pickles_is_refused(tiny_target: Path):
    with pytest.raises(UserError, match=r"has no pytorch_model\*\.bin"):
        convert(tiny_target)


@pytest.fixture
def sharded(pickled: Path) -> Path:
    """Return a folder with the same weights in several .bin files and their index."""
    weights = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    (pickled / "pytorch_model.bin").unlink()
    save_torch_state_dict(weights, pickled, max_shard_size="150KB", safe_serialization=False)
    assert len(list(pickled.glob("pytorch_model-0000?-of-0000?.bin"))) > 2
    return pickled


def logits(folder: Path) -> torch.Tensor:
    target = load_target(folder)
    target.open(1, 8)
    with torch.inference_mode():
        return target.forward(torch.tensor([[1, 5, 7, 9]]))[0]


def test_sharded_weights_load_as_the_single_file(sharded: Path, tiny_target: Path):
    assert convert(sharded) == sharded / INDEX
    before, after = load_state(tiny_target), load_state(sharded)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(sharded), logits(tiny_target))
    model = AutoModelForCausalLM.from_pretrained(sharded)
    with torch.inference_mode():
        theirs = model(torch.tensor([[1, 5, 7, 9]])).logits
    assert torch.allclose(theirs, logits(sharded), atol=1e-4)
    with pytest.raises(UserError, match=r"index\.json exists already"):
        convert(sharded)


def test_sharded_safetensors_load_as_the_single_file(tiny_target: Path, tmp_path: Path):
    shutil.copytree(tiny_target, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    save_torch_state_dict(weights, tmp_path / "model", max_shard_size="150KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "model"), logits(tiny_target))
    next((tmp_path / "model").glob("model-00002*")).unlink()
    with pytest.raises(UserError, match=r"model-00002-of-0000\d\.safetensors is missing"):
        load_target(tmp_path / "model")


def test_a_missing_shard_is_named(sharded: Path):
    next(sharded.glob("pytorch_model-00002*")).unlink()
    with pytest.raises(UserError, match=r"the shard pytorch_model-00002-of-0000\d.bin is missing"):
        convert(sharded)
    assert not list(sharded.glob("*.safetensors"))


def test_a_damaged_shard_is_named(sharded: Path):
    shard = next(sharded.glob("pytorch_model-00002*"))
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(UserError, match=r"pytorch_model-00002-of-0000\d.bin holds more than"):
        convert(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["weight_map"].popitem(), r"differ in 1 tensors \(such as '"),
        (lambda index: index.pop("weight_map"), r"has no weight_map"),
        (
            lambda index: index["weight_map"].update(x="../pytorch_model.bin"),
            r"the shard \.\./pytorch_model\.bin is missing",
        ),
    ],
)
def test_a_wrong_index_is_refused(change, message: str, sharded: Path):
    file = sharded / "pytorch_model.bin.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        convert(sharded)


def test_shards_without_an_index_are_refused(sharded: Path):
    (sharded / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(UserError, match=r"has the shard .*, but no pytorch_model\.bin\.index"):
        convert(sharded)
