"""Every kind of head trains in ranks as in one process, and resumes bit for bit."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import heads.train
from heads.registry import KINDS
from tests.support.head_ranks import configured, losses, train_in_ranks
from training import checkpoint

# one of each way to read the target, its layers and its lm_head
FEW = ["eagle1", "early_exit", "dflash", "domino", "sdsat"]


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "drafter" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a kind's name to the folder of its run in one process."""
    folder = tmp_path_factory.mktemp("alone")

    def train(name: str) -> Path:
        if not (folder / name).exists():
            heads.train.run(configured(name, tiny_target, folder / name))
        return folder / name

    return train


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param("ddp", [*KINDS], id="ddp"),
        pytest.param("fsdp", FEW, id="fsdp-few"),
        pytest.param("zero3", FEW, id="zero3-few"),
        *(
            pytest.param(kind, [*KINDS], id=kind, marks=pytest.mark.exhaustive)
            for kind in ("fsdp", "zero1", "zero2", "zero3")
        ),
    ],
)
def test_ranks_train_every_kind_of_head_as_one_process_does(
    kind: str,
    names: list[str],
    alone: Callable[[str], Path],
    tiny_target: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
):
    """Compare losses and weights; rows weigh as in one process where drafts are sampled."""
    if kind.startswith("zero"):
        request.getfixturevalue("deepspeed")
    given = (f"parallel={kind}", "parallel.processes=2")
    train_in_ranks(tiny_target, tmp_path, names, *given)
    for name in names:
        theirs = losses(alone(name))
        assert losses(tmp_path / name) == pytest.approx(theirs, rel=1e-5), name
        weights, expected = weights_of(tmp_path / name), weights_of(alone(name))
        assert weights.keys() == expected.keys()
        for part, tensor in expected.items():
            torch.testing.assert_close(weights[part], tensor, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_head_equals_an_uninterrupted_one(
    name: str, alone: Callable[[str], Path], tiny_target: Path, tmp_path: Path
):
    """Continue from the checkpoint in the middle of a run, as after a kill."""
    middle = Path("checkpoints", checkpoint.name_of(2))
    shutil.copytree(alone(name) / middle, tmp_path / middle)
    heads.train.run(configured(name, tiny_target, tmp_path))
    assert losses(tmp_path) == losses(alone(name))[2:]
    last = Path("checkpoints", checkpoint.name_of(4))
    for part in ("drafter", last):
        for file in (alone(name) / part).glob("*.safetensors"):
            ours, theirs = load_file(tmp_path / part / file.name), load_file(file)
            assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in theirs), file.name
    # the control: the steps after the checkpoint change the weights
    before, after = (load_file(alone(name) / one / "model.safetensors") for one in (middle, last))
    assert any(not torch.equal(before[part], after[part]) for part in after)
