"""Test published targets: their parameter counts, and dry runs without the target's folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decoding.errors import UserError
from decoding.models.native.weights import NativeConfig
from jobs.config import TargetConfig
from jobs.job import CONF
from tests.support.configurations import configuration
from tests.support.tiers import tiered
from training.models.build import describe_missing_target, published_targets, target_config

# name -> (parameters of the published weights, (layers, query heads, key/value heads, head width),
# rope base)
PUBLISHED = {
    "llama_7b": (6_738_415_616, (32, 32, 32, 128), 1e4),
    "llama_13b": (13_015_864_320, (40, 40, 40, 128), 1e4),
    "llama_65b": (65_285_660_672, (80, 64, 64, 128), 1e4),
    "llama2_7b": (6_738_415_616, (32, 32, 32, 128), 1e4),
    "llama2_13b": (13_015_864_320, (40, 40, 40, 128), 1e4),
    "llama2_70b": (68_976_648_192, (80, 64, 8, 128), 1e4),
    "llama3_8b": (8_030_261_248, (32, 32, 8, 128), 5e5),
    "llama3_1_8b": (8_030_261_248, (32, 32, 8, 128), 5e5),
    "llama3_1_70b": (70_553_706_496, (80, 64, 8, 128), 5e5),
    "smollm2_135m": (134_515_008, (30, 9, 3, 64), 1e5),
    "vicuna_7b_v1_3": (6_738_415_616, (32, 32, 32, 128), 1e4),
    "vicuna_7b_v1_5": (6_738_415_616, (32, 32, 32, 128), 1e4),
    "mistral_7b": (7_241_732_096, (32, 32, 8, 128), 1e6),
    "qwen2_7b": (7_615_616_512, (28, 28, 4, 128), 1e6),
    "qwen3_8b": (8_190_735_360, (36, 32, 8, 128), 1e6),
}


def composed(*overrides: str) -> TargetConfig:
    return configuration("distill.train", *overrides).target


def test_every_published_target_is_in_the_table():
    assert published_targets() == sorted(PUBLISHED)


@pytest.mark.parametrize(
    "name", tiered(PUBLISHED, ["llama2_70b", "llama3_1_8b", "smollm2_135m", "qwen3_8b"])
)
def test_parameter_counts_and_shapes_are_the_published_ones(name: str):
    target = composed(f"target={name}")
    config = target_config(target)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters, shape, rope = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    header = (CONF / "target" / f"{name}.yaml").read_text().splitlines()[0]
    assert f"{parameters:,} parameters" in header
    # the native backend accepts it: no sliding window, known rope
    native = NativeConfig.from_dict(json.loads(config.to_json_string()))
    assert (native.num_layers, native.num_heads, native.num_kv_heads, native.head_dim) == shape
    assert native.rope["rope_theta"] == rope
    assert native.rope["rope_type"] == ("llama3" if name.startswith("llama3_1") else "default")
    assert config.dtype in (torch.float16, torch.bfloat16)


def test_an_existing_folder_overrides_the_published_configuration(
    tiny_target: Path, tmp_path: Path
):
    target = composed("target=llama_7b", f"target.path={tiny_target}")
    assert target_config(target).to_dict() == AutoConfig.from_pretrained(tiny_target).to_dict()
    assert describe_missing_target(target) == ""
    shutil.copy(tiny_target / "tokenizer.json", tmp_path)
    with pytest.raises(UserError, match="has no config.json"):
        target_config(composed("target=llama_7b", f"target.path={tmp_path}"))


def test_a_missing_folder_and_tokenizer_are_reported():
    assert "models/llama_7b does not exist" in describe_missing_target(composed("target=llama_7b"))
    assert "tokenizer is missing" in describe_missing_target(composed("target=llama_7b"))
    assert describe_missing_target(composed()) == ""


def test_an_unknown_target_is_refused_with_the_known_names():
    with pytest.raises(
        UserError, match=r"/no/such/model does not exist, .* Hub .* target=llama2_13b \| .*qwen3_8b"
    ):
        target_config(composed("target.path=/no/such/model"))


@pytest.mark.parametrize(
    "config",
    [{"hidden_size": 64}, {"model_type": "no_such"}, {"model_type": "llama", "hidden_size": 65}],
)
def test_an_invalid_published_configuration_is_refused(config: dict[str, object]):
    with pytest.raises(
        UserError,
        match="target.config is not a model configuration: .*Expected the values of a config.json",
    ):
        target_config(TargetConfig(path="/no/such/model", config=config))
