"""The published layout: names, shapes, dtypes and keys, and the refusal of invalid folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decoding.errors import UserError
from recurrent_drafting.checkpoint import LAYOUT, load_head, read_head_config, save_head
from tests.support import tiny_heads as tiny

H, V = tiny.HIDDEN, tiny.VOCABULARY
RECURRENCE = {"rnn_u.weight": [H, H], "rnn_u.bias": [H], "rnn_w.weight": [H, H]}


def blocks(count: int, width: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {f"lm_head.{count}.weight": [V, width]}
    for i in range(count):
        found |= {f"lm_head.{i}.linear.weight": [width, width], f"lm_head.{i}.linear.bias": [width]}
    return found


PUBLISHED = {
    "recurrent": blocks(2, 2 * H) | RECURRENCE,
    "without recurrence": blocks(2, 2 * H),
    "projected": blocks(2, 24)
    | RECURRENCE
    | {"input_proj.weight": [24, 2 * H], "input_proj.bias": [24]},
    "projected without recurrence": blocks(1, H)
    | {"input_proj.weight": [H, 2 * H], "input_proj.bias": [H]},
    "without blocks": blocks(0, 2 * H) | RECURRENCE,
}


@pytest.mark.parametrize("form", PUBLISHED)
def test_names_shapes_dtypes_and_keys_are_the_published_ones(form: str, tmp_path: Path):
    head = tiny.head(form, torch.float32)
    save_head(head, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == PUBLISHED[form]
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": V,
        "hidden_size": H,
        "exit_dim": head.config.exit_dim,
        "num_draft_layers": head.config.num_draft_layers,
        "num_lookback_tokens": -1,
        "rnn": head.config.rnn,
        "torch_dtype": "float32",
    }
    assert not LAYOUT.extensions(head.config)


def test_a_head_trained_in_bfloat16_is_stored_in_float32(tmp_path: Path):
    save_head(tiny.head(dtype=torch.bfloat16), tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.parametrize("form", tiny.FORMS)
def test_a_saved_head_loads_equal(form: str, tmp_path: Path):
    head = tiny.head(form, torch.float32)
    save_head(head, tmp_path)
    again = load_head(tmp_path)
    assert again.config == head.config
    assert all(
        torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items()
    )
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_a_shortlist_is_described_as_an_extension(tmp_path: Path):
    head = tiny.head("shortlist", torch.float32)
    assert "a shortlist of 20 of 61 tokens" in LAYOUT.extensions(head.config)[0]
    save_head(head, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["token_ids_V"].dtype == torch.int64
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(tiny.head(dtype=torch.float32), tmp_path / "head")
    return tmp_path / "head"


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, remove: str = "", **more: Tensor) -> None:
    stored = load_file(folder / "model.safetensors")
    stored.pop(remove, None)
    save_file(stored | more, folder / "model.safetensors", metadata={"format": "pt"})


def test_another_model_type_is_refused(folder: Path):
    change_config(folder, model_type="llama")
    with pytest.raises(
        UserError, match="model_type is 'llama', expected 'recurrent_drafting_drafter'"
    ):
        load_head(folder)


def test_a_target_is_refused_as_a_head(tiny_target: Path):
    with pytest.raises(UserError, match="model_type is 'llama'"):
        read_head_config(tiny_target)


def test_weights_of_the_other_form_are_refused_by_name(folder: Path, tmp_path: Path):
    change_config(folder, rnn=False)
    with pytest.raises(
        UserError,
        match="rnn=false.*rnn_u.weight is unknown.* Use config.json and model.safetensors of",
    ):
        load_head(folder)
    save_head(tiny.head("without recurrence", torch.float32), tmp_path / "plain")
    change_config(tmp_path / "plain", rnn=True)
    with pytest.raises(UserError, match="rnn=true.*rnn_u.weight is missing"):
        load_head(tmp_path / "plain")


def test_missing_unknown_and_misshapen_tensors_are_all_named(folder: Path):
    change_tensors(
        folder,
        remove="lm_head.0.linear.bias",
        **{"lm_head.1.linear.bias": torch.zeros(3), "extra": torch.ones(1)},
    )
    with pytest.raises(UserError) as error:
        load_head(folder)
    words = str(error.value)
    assert "lm_head.0.linear.bias is missing" in words
    assert "extra is unknown" in words
    assert f"lm_head.1.linear.bias has the shape [3], expected [{2 * H}]" in words
    assert "2 residual blocks" in words
    assert "Use config.json and model.safetensors of the same head" in words


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -1),
        ("hidden_size", 0),
        ("vocab_size", True),
        ("vocab_size", 61.0),
        ("num_draft_layers", False),
        ("draft_vocab_size", V + 1),
        ("draft_vocab_size", -1),
        ("draft_vocab_size", True),
        ("exit_dim", None),
        ("num_draft_layers", "two"),
        ("draft_vocab_size", "few"),
        ("rnn", "false"),
    ],
)
def test_invalid_keys_are_named(folder: Path, key: str, value: Any):
    change_config(folder, **{key: value})
    with pytest.raises(
        UserError, match=f"config.json: {key} is {value!r}, expected (a whole number|true)"
    ):
        load_head(folder)


def test_a_damaged_shortlist_is_refused(tmp_path: Path):
    save_head(tiny.head("shortlist", torch.float32), tmp_path)
    ids = load_file(tmp_path / "model.safetensors")["token_ids_V"]
    for wrong in (ids.flip(0), ids + V):
        change_tensors(tmp_path, token_ids_V=wrong)
        with pytest.raises(UserError, match="token_ids_V is not a rising list of token ids"):
            load_head(tmp_path)


def test_a_folder_without_weights_is_named(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UserError, match="model.safetensors is missing"):
        load_head(tmp_path / "bare")


def test_too_many_blocks_are_refused_before_any_is_built(folder: Path):
    change_config(folder, num_draft_layers=10**9)
    with pytest.raises(
        UserError,
        match="num_draft_layers is 1000000000, expected a whole number from 0 to 64",
    ):
        load_head(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(folder: Path, value: float):
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.startswith("lm_head"))
    change_tensors(folder, **{name: torch.full_like(state[name], value)})
    with pytest.raises(UserError, match=f"tensor '{name}' holds non-finite weights"):
        load_head(folder)
