"""Contradictions between config.json and the weights are reported before any weight is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from decoding.errors import UserError
from decoding.models.load import load_target
from decoding.models.model_check import check_model, expected_tensors
from jobs.config import ParallelConfig
from tests.support.llama_folders import INDEX, NAN, WEIGHTS, change, edit, save_llama
from tests.support.tiny_targets import SHAPES, hf_model
from training.models.build import load_causal_lm
from training.models.frozen import load_frozen
from training.parallel.strategy import Parallel


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight"


def grow(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.1.mlp.extra.weight"] = torch.zeros(2)


STATES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a tensor is missing": (
        lambda state: state.pop(UP),
        f"the weights have no tensor '{UP}', expected one of shape",
    ),
    "a tensor is left over": (
        grow,
        "tensor 'model.layers.1.mlp.extra.weight' has no place .*this one tensor",
    ),
    "a bias nobody reads": (
        lambda state: state.update({Q.replace("weight", "bias"): torch.zeros(32)}),
        "q_proj.bias' has no place in the llama model",
    ),
    "another shape": (
        lambda state: state.update({UP: torch.zeros(32, 40)}),
        r"up_proj.weight' has shape \[32, 40\], expected \[40, 32\]",
    ),
    "another rank": (
        lambda state: state.update({UP: torch.zeros(1280)}),
        r"has shape \[1280\], expected \[40, 32\]",
    ),
    "integers": (
        lambda state: state.update({UP: torch.zeros(40, 32, dtype=torch.int8)}),
        "is stored as I8, expected one of F64",
    ),
    "no head": (
        lambda state: state.pop("lm_head.weight"),
        "no tensor 'lm_head.weight'.*tie_word_embeddings is false",
    ),
    "no layers": (
        lambda state: [state.pop(name) for name in list(state) if "layers" in name],
        "num_hidden_layers is 3, but the weights hold 0 layers",
    ),
}


@pytest.mark.parametrize(("changed", "message"), STATES.values(), ids=STATES)
def test_weights_of_another_model_are_named(folder: Path, changed: Callable, message: str) -> None:
    change(folder, changed)
    with pytest.raises(UserError, match=message):
        check_model(folder)


def test_harmless_extra_tensors_are_accepted(folder: Path) -> None:
    change(
        folder,
        lambda state: state.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
        ),
    )
    check_model(folder)
    # A tied head may be stored if its shape and values are the embedding's.
    edit(folder, tie_word_embeddings=True)
    change(folder, lambda state: state.update({HEAD: state[EMBEDDING].clone()}))
    check_model(folder)
    for name in ("native", "hf", "training"):
        LOADERS[name](folder)
    change(folder, lambda state: state.update({"lm_head.weight": torch.zeros(47, 32)}))
    with pytest.raises(
        UserError, match=r"'lm_head.weight' has shape \[47, 32\], expected \[48, 32\]"
    ):
        check_model(folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_familys_tensors_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    model = hf_model(shape, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    check_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {tensor.name: tensor.shape for tensor in expected_tensors(config)}
    assert wanted == {name: list(tensor.shape) for name, tensor in model.named_parameters()}


LOADERS: dict[str, Callable[[Path], object]] = {
    "native": load_target,
    "hf": lambda folder: load_target(folder, backend="hf"),
    "tp": lambda folder: load_target(folder, parallel="tp", processes=2),
    "layers": lambda folder: load_target(folder, parallel="layers", processes=2),
    "training": lambda folder: load_causal_lm(folder, torch.float32),
    "frozen": lambda folder: load_frozen(folder, torch.float32, Parallel(ParallelConfig(), "cpu")),
    "frozen, in shares": lambda folder: load_frozen(
        folder, torch.float32, cast(Parallel, SimpleNamespace(shards_weights=True))
    ),
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_every_loader_checks_before_it_reads_weights(
    folder: Path, load: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(folder, num_hidden_layers=2)

    def read(*_: object, **__: object) -> None:
        pytest.fail("weights were read")

    for reader in (
        "decoding.models.load.load_state",
        "decoding.models.distributed.shards.load_state",
    ):
        monkeypatch.setattr(reader, read)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(UserError, match="num_hidden_layers is 2, but the weights hold 3 layers"):
        load(folder)


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_every_loader_refuses_a_tied_head_that_differs(
    folder: Path, load: Callable[[Path], object]
) -> None:
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(
        UserError, match="'lm_head.weight' differs from .*tie_word_embeddings true, expected equal"
    ):
        load(folder)


def shard(folder: Path, weight_map: Callable[[list[str]], dict[str, Any]]) -> None:
    """Split the weights over two files and write their index, which may be wrong.

    weight_map: function from the names of all tensors to the index's `weight_map`.
    """
    state = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    for part in (0, 1):
        save_file(
            dict(list(state.items())[part::2]), folder / f"part{part}.safetensors", {"format": "pt"}
        )
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map(list(state))}))


def right(names: list[str]) -> dict[str, Any]:
    return {name: f"part{place % 2}.safetensors" for place, name in enumerate(names)}


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (
            "/etc/passwd",
            "weight_map assigns '.*' to '/etc/passwd', expected the name of a file in the folder",
        ),
        ("../other/model.safetensors", "expected the name of a file in the folder"),
        ("inner/../../model.safetensors", "expected the name of a file in the folder"),
        ("..\\model.safetensors", "expected the name of a file in the folder"),
        ("C:\\model.safetensors", "expected the name of a file in the folder"),
        ("a\0b", "expected the name of a file in the folder"),
        ("a" * 5000, "to 'a{50,60}[.]{3}, expected the name of a file in the folder"),
        ("\ud800", r"to '.ud800', expected the name of a file in the folder"),
        ("", "expected the name of a file in the folder"),
        (3, "to 3, expected the name of a file in the folder"),
        (None, "to None, expected the name of a file in the folder"),
        (["part0.safetensors"], "expected the name of a file in the folder"),
        (
            "part1.safetensors",
            "weight_map assigns '.*' to part1.safetensors, which does not contain it",
        ),
        ("part2.safetensors", "part2.safetensors is missing"),
    ],
)
def test_an_invalid_index_is_refused(folder: Path, first: Any, message: str) -> None:
    (folder.parent / "model.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    shard(folder, lambda names: {**right(names), names[0]: first})
    for load in (check_model, load_target):
        with pytest.raises(UserError, match=message):
            load(folder)


def test_shards_are_checked_like_one_file(folder: Path) -> None:
    shard(folder, right)
    check_model(folder)
    # The Hub's cache consists of links to files outside the folder.
    (folder / "part0.safetensors").rename(folder.parent / "blob")
    (folder / "part0.safetensors").symlink_to(folder.parent / "blob")
    check_model(folder)
    edit(folder, intermediate_size=48)
    with pytest.raises(
        UserError,
        match=r"part\d.safetensors: tensor 'model.layers.0.mlp.gate_proj.weight' has shape \[40, "
        r"32\]",
    ):
        check_model(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    shard(folder, right)
    state = load_file(folder / "part1.safetensors") | {Q: torch.zeros(32, 32)}
    save_file(state, folder / "part1.safetensors", {"format": "pt"})
    other = load_file(folder / "part0.safetensors") | {Q: torch.ones(32, 32)}
    save_file(other, folder / "part0.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=f"tensor '{Q}' is also in part0.safetensors, expected it in one file"
    ):
        check_model(folder)


def gpt2(folder: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, ""),
        ({"n_layer": 10**9}, "n_layer is 1000000000, but the weights hold 2 layers"),
        ({"n_layer": 1}, "'transformer.h.1.*' is in the weights and has no place in the model"),
        ({"layer_norm_epsilon": NAN}, "layer_norm_epsilon is nan, expected a finite number"),
        (
            {"quantization_config": {"quant_method": "magic"}},
            "quantization_config is .*magic.*, expected one with a quant_method",
        ),
        ({"quantization_config": 4}, "quantization_config is 4, expected one with a quant_method"),
        ({"n_head": 0}, "transformers cannot load it as a causal LM"),
        ({"n_embd": 64}, "transformers cannot load it as a causal LM"),
        ({"n_layer": "two"}, "n_layer.*'two'"),
    ],
    ids=str,
)
def test_other_families_have_the_general_checks(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = gpt2(tmp_path)
    edit(folder, **fields)
    if not message:
        load_target(folder, backend="hf")
        return
    with pytest.raises(UserError, match=message):
        load_target(folder, backend="hf")
    if "cannot load" not in message and "n_layer" in fields:
        with pytest.raises(UserError, match=message):
            load_causal_lm(folder, torch.float32)
