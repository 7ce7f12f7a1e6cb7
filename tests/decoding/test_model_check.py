"""Contradictions between config.json and the weights are reported before any weight is read."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import decoding
from decoding.errors import UserError
from decoding.models.load import load_target
from decoding.models.model_check import check_model, expected_tensors
from decoding.models.text.compatible import check_same_tokenizer
from jobs.config import ParallelConfig
from tests.support.tiny_targets import LLAMA3_ROPE, SHAPES, hf_model
from training.models.build import known_config, load_causal_lm
from training.models.frozen import load_frozen
from training.parallel.strategy import Parallel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random llama with 3 layers and a vocabulary of 48.

    Its width is 32, its MLP's 40, and it has 4 query and 2 key/value heads.
    """
    folder = tmp_path_factory.mktemp("made")
    hf_model("llama", layers=3, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **fields}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))


def change(folder: Path, changed: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(folder / WEIGHTS)
    changed(state)
    save_file(state, folder / WEIGHTS, {"format": "pt"})


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight"
FIELDS: list[tuple[dict[str, Any], str]] = [
    (
        {"num_hidden_layers": 2},
        "num_hidden_layers is 2, but the weights hold 3 layers, expected the same number",
    ),
    ({"num_hidden_layers": 4}, "num_hidden_layers is 4, but the weights hold 3 layers"),
    (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000, but the weights hold 3 layers",
    ),
    ({"num_hidden_layers": 10**30}, r"num_hidden_layers is 10+, expected a whole number from 1"),
    (
        {"vocab_size": 47},
        r"embed_tokens.weight' has shape \[48, 32\], expected \[47, 32\] .*vocab_size",
    ),
    ({"vocab_size": 49}, r"has shape \[48, 32\], expected \[49, 32\]"),
    ({"hidden_size": 0}, "hidden_size is 0, expected a whole number from 1"),
    ({"hidden_size": 64}, r"has shape \[48, 32\], expected \[48, 64\]"),
    (
        {"num_attention_heads": 8},
        r"q_proj.weight' has shape \[32, 32\], expected \[64, 32\] .*num_attention_heads",
    ),
    (
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        "num_attention_heads is 3, expected a multiple of num_key_value_heads 2",
    ),
    (
        {"num_key_value_heads": 4},
        r"k_proj.weight' has shape \[16, 32\], expected \[32, 32\] .*num_key_value_heads",
    ),
    ({"num_key_value_heads": 1}, r"k_proj.weight' has shape \[16, 32\], expected \[8, 32\]"),
    (
        {"num_key_value_heads": "absent"},
        r"k_proj.weight' has shape \[16, 32\], expected \[32, 32\]",
    ),
    ({"head_dim": 16}, r"q_proj.weight' has shape \[32, 32\], expected \[64, 32\]"),
    ({"head_dim": 7}, "head_dim is 7, expected an even number"),
    (
        {"head_dim": "absent", "num_attention_heads": 5, "num_key_value_heads": 5},
        "hidden_size is 32, expected a multiple of num_attention_heads 5",
    ),
    (
        {"intermediate_size": 41},
        r"gate_proj.weight' has shape \[40, 32\], expected \[41, 32\] .*intermediate_size",
    ),
    (
        {"attention_bias": True},
        r"no tensor 'model.layers.0.self_attn.q_proj.bias', expected one of shape \[32\]",
    ),
    ({"mlp_bias": True}, "no tensor 'model.layers.0.mlp.gate_proj.bias'"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps is nan, expected a finite number"),
    ({"rms_norm_eps": INF}, "rms_norm_eps is inf, expected"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, expected"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": NAN}},
        "rope_parameters.rope_theta is nan, expected",
    ),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        "rope_parameters.factor is None, expected",
    ),
    (
        {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": LLAMA3_ROPE["low_freq_factor"]}},
        "rope_parameters.high_freq_factor is .*, expected more than low_freq_factor",
    ),
    (
        {"quantization_config": {"quant_method": "magic"}},
        "quantization_config is .*magic.*, expected none",
    ),
    ({"quantization_config": 4}, "quantization_config is 4, expected none"),
    ({"model_type": "qwen2"}, "no tensor 'model.layers.0.self_attn.q_proj.bias'"),
    ({"model_type": "qwen3"}, "no tensor 'model.layers.0.self_attn.q_norm.weight'"),
]
FIELDS += [
    ({key: value}, rf"config.json: {key} is {shown}, expected ")
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
    for value, shown in ((True, "True"), ("8", "'8'"), (8.5, r"8\.5"), (-8, "-8"), ([8], r"\[8\]"))
]
FIELDS += [
    ({key: value}, f"config.json: {key} is .*, expected ")
    for key, value in (
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", True),
        ("rope_theta", "large"),
        ("rope_theta", 0),
        ("rope_parameters", [1]),
        ("tie_word_embeddings", "no"),
        ("attention_bias", 1),
        ("mlp_bias", "yes"),
        ("hidden_act", 3),
        ("dtype", "float3"),
        ("torch_dtype", 32),
        ("architectures", "LlamaForCausalLM"),
        ("bos_token_id", "one"),
        ("eos_token_id", [1, "two"]),
        ("initializer_range", NAN),
        ("attention_dropout", 2),
        ("use_cache", "yes"),
    )
]


@pytest.mark.parametrize(
    ("fields", "message"), FIELDS, ids=[str(fields)[:50] for fields, _ in FIELDS]
)
def test_a_configuration_of_another_model_is_refused(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    edit(folder, **fields)
    with pytest.raises(UserError, match=message) as caught:
        check_model(folder)
    assert str(folder) in str(caught.value)
    assert "expected" in str(caught.value)


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


ROPES: list[tuple[dict[str, Any], str]] = [
    (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": LLAMA3_ROPE,
        },
        "rope_scaling is .*, which contradicts rope_parameters",
    ),
    (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": {"rope_theta": 5e4},
        },
        "rope_scaling is .*, which contradicts rope_parameters",
    ),
    (
        {"rope_parameters": LLAMA3_ROPE, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling.type 'linear'",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "type": "yarn", "factor": 2.0}},
        "rope_parameters.type 'yarn'",
    ),
    (
        {"rope_parameters": "absent", "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling.type 'linear'",
    ),
    (
        {"rope_parameters": {"rope_type": "magic"}},
        "rope_parameters.rope_type is 'magic', expected one of default",
    ),
    (
        {"rope_parameters": LLAMA3_ROPE, "rope_scaling": {"type": ["x"]}},
        r"rope_scaling.type is \['x'\], expected",
    ),
    (
        {"rope_scaling": {"rope_type": "linear"}},
        "rope_scaling.factor is None, expected a number more than 0",
    ),
]


@pytest.mark.parametrize(
    ("fields", "message"), ROPES, ids=[str(fields)[:80] for fields, _ in ROPES]
)
def test_native_refuses_unsupported_rotary_positions(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    edit(folder, **fields)
    with pytest.raises(UserError, match=message) as caught:
        load_target(folder)
    assert "config.json" in str(caught.value)


def test_equal_rotary_fields_are_accepted(folder: Path) -> None:
    edit(folder, rope_parameters=LLAMA3_ROPE, rope_scaling={**LLAMA3_ROPE, "type": "llama3"})
    load_target(folder)
    edit(
        folder,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        rope_scaling="absent",
    )
    load_target(folder, backend="hf")  # which transformers supports


@pytest.fixture(scope="module")
def spoken(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the llama's folder with a tokenizer, which is loaded before the model."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("spoken") / "model"))
    core = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "red": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": "x"}, "quantization_config is 'x', expected"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0, expected"),
    ({"num_hidden_layers": "4"}, "num_hidden_layers is '4', expected"),
    ({"hidden_size": "x"}, "hidden_size is 'x', expected"),
    ({"rms_norm_eps": -1}, "rms_norm_eps is -1, expected"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps is nan, expected"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected"),
    ({"eos_token_id": "x"}, "eos_token_id is 'x', expected"),
    ({"eos_token_id": 48}, "eos_token_id is 48, expected ids from 0 to 47, as vocab_size is 48"),
    ({"eos_token_id": [2, 99]}, r"eos_token_id is \[2, 99\], expected ids from 0 to 47"),
    ({"eos_token_id": -1}, "eos_token_id is -1, expected ids from 0 to 47"),
    ({"dtype": "x"}, "dtype is 'x', expected"),
    ({"vocab_size": None}, "vocab_size is None, expected"),
    ({"max_position_embeddings": "2048"}, "max_position_embeddings is '2048', expected"),
    (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        "rope_parameters.factor is None, expected",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "longrope.*[Ee]xpected the values",
    ),
    ({"model_type": "gpt2", "quantization_config": "x"}, "quantization_config is 'x', expected"),
    ({"model_type": "gpt2", "n_head": "x"}, "n_head.*[Ee]xpected the values"),
    ({"model_type": "gpt2", "dtype": "x"}, "'x'.*[Ee]xpected the values"),
]


@pytest.mark.parametrize(
    ("fields", "message"), UNREAD, ids=[str(fields)[:60] for fields, _ in UNREAD]
)
def test_a_configuration_is_checked_before_the_tokenizer_is_loaded(
    spoken: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(spoken, tmp_path / "model"))
    edit(folder, **fields)
    for start in (decoding.load, known_config, lambda folder: check_same_tokenizer(spoken, folder)):
        with pytest.raises(UserError, match=message) as caught:
            start(folder)
        assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer_config.json", "[1]", "holds a list, expected a JSON object"),
        ("config.json", '{"x": ' + "9" * 5000 + "}", "cannot be read as JSON .Exceeds the limit"),
        ("tokenizer.json", "[1]", "holds a list, expected a JSON object"),
        ("tokenizer.json", '{"model": {"type": "Magic"}}', "cannot be read as a tokenizer"),
    ],
)
def test_a_damaged_tokenizer_file_is_named(
    spoken: Path, tmp_path: Path, name: str, text: str, message: str
) -> None:
    folder = Path(shutil.copytree(spoken, tmp_path / "model"))
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=f"{name} {message}") as caught:
        decoding.load(folder)
    assert str(folder) in str(caught.value)


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
