"""A config.json that no model of its family can have is refused before any weight is read."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import decoding
from decoding.errors import UserError
from decoding.models.load import load_target
from decoding.models.model_check import check_model
from decoding.models.text.compatible import check_same_tokenizer
from tests.support.llama_folders import INF, NAN, edit, save_llama
from tests.support.tiny_targets import LLAMA3_ROPE
from training.models.build import known_config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


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
