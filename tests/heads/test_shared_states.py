"""Heads of several kinds train from one store of the target's states, which it reads once."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import heads.train
from decoding.errors import UserError
from tests.support import tiny_heads as tiny
from tests.support.head_ranks import configured
from training.data.packing import PackedData, collate
from training.features.layer_stores import LayerStores, layers_on_disk
from training.features.states import TargetStates
from training.heads.positions import positions

LAYERS = (0, 1, 2)  # of tiny.target()
TOLD = r"the target read [\d,]+ tokens in [\d.]+ s"


def on_disk(root: Path, layers: tuple[int, ...] = LAYERS) -> LayerStores:
    data = PackedData(tiny.samples(), tiny.ROW, 2, 0)
    sizes = tiny.HIDDEN, torch.float64
    return layers_on_disk(root, "hash", data, layers, *sizes, show=False)


@pytest.mark.parametrize("taps", [(), (1,), (1, 0), (0, 2, 1)])
@pytest.mark.parametrize("context", [False, True])
def test_shared_states_are_those_of_a_forward(taps: tuple[int, ...], context: bool, tmp_path: Path):
    model, data = tiny.target(), PackedData(tiny.samples(), tiny.ROW, 2, 0)
    batch = collate(data.samples, data.rows, tiny.ROW)
    TargetStates(model, on_disk(tmp_path))(batch, positions(batch, 2, uses_teacher=False))
    where = positions(batch, tiny.HEADS, uses_teacher=True, context=context)
    kept = TargetStates(model, on_disk(tmp_path, (1,)), taps)
    kept.store = on_disk(tmp_path)
    torch.testing.assert_close(kept(batch, where), TargetStates(model, taps=taps)(batch, where))
    assert kept.tokens_read == 0


def test_a_damaged_layer_is_read_again(tmp_path: Path):
    model, data = tiny.target(), PackedData(tiny.samples(), tiny.ROW, 2, 0)
    batch = collate(data.samples, data.rows, tiny.ROW)
    where = positions(batch, tiny.HEADS, uses_teacher=True)
    first = TargetStates(model, on_disk(tmp_path))
    first(batch, where)
    assert first.tokens_read == data.tokens
    for file in tmp_path.glob("*/states.bin"):
        with file.open("r+b") as stream:
            stream.write(b"damaged!")
    second = TargetStates(model, on_disk(tmp_path))
    torch.testing.assert_close(second(batch, where), TargetStates(model)(batch, where))
    assert second.tokens_read == batch.row(0).tokens


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "drafter" / "model.safetensors")


def test_several_kinds_train_from_one_reading(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Compare with heads that have stores of their own; the control reads the target again."""
    told = {}
    for name in ("eagle3", "dflash", "medusa"):
        for layers in ("[0,1,2]", "[]"):
            shared = layers != "[]"
            folder = tmp_path / f"{name}_{shared}"
            given = ["states.cache=disk", "states.fill=true"]
            given += [f"states.folder={tmp_path / f'states_{shared}'}"]
            given += [f"states.layers={layers}", "loop.max_steps=2"]
            heads.train.run(configured(name, tiny_target, folder, *given))
            told[name, shared] = bool(re.search(TOLD, capsys.readouterr().out))
        expected = weights(tmp_path / f"{name}_False")
        for part, tensor in weights(tmp_path / f"{name}_True").items():
            torch.testing.assert_close(tensor, expected[part], rtol=1e-5, atol=1e-6, msg=part)
    assert told.pop(("eagle3", True)), "the first head has the target read the data"
    assert told == {key: not key[1] for key in told}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["states.cache=memory"],
            r"states.layers is \[1\], expected \[\] without states.cache=disk",
        ),
        (["states.layers=[1,9]"], r"is \[1, 9\], expected layers from 0, .* embedding, to \d, its"),
        (["head=recurrent", "loss.name=continuations"], r"expected \[\] with loss.name=contin"),
    ],
)
def test_layers_that_cannot_be_shared_are_refused(
    given: list[str], words: str, tiny_target: Path, tmp_path: Path
):
    settings = ["states.cache=disk", "states.layers=[1]", *given]
    with pytest.raises(UserError, match=words):
        heads.train.run(configured("recurrent", tiny_target, tmp_path, *settings))
