"""Folders of block drafters: the published layout, its convention of layers, and bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.drafters.registry import head_of
from decoding.errors import UserError
from heads.block.checkpoint import load_head
from heads.block.drafter import BlockDrafter
from heads.block.layouts import SERVED as LAYOUT
from heads.block.model import BlockHead
from heads.registry import kind_in
from tests.support.block_heads import random_block
from training.heads import checkpoint

SIZES = {"vocab_size": 11, "hidden_size": 6, "target_layers": 8}
FORMS: list[dict[str, Any]] = [
    {},
    {"layout": "anchor_first", "correction": "markov", "rank": 3},
    {"correction": "markov", "rank": 3, "confidence": True},
    {"layout": "anchor_first", "correction": "gru", "rank": 3, "gru_size": 4},
    {"num_layers": 1, "confidence": True},
    {"in_block_mask": "causal", "num_layers": 1},
    {"draft_vocab_size": 4},
    {"denoising_steps": 3},
]


def save(head: BlockHead, folder: Path) -> Path:
    checkpoint.save_head(LAYOUT, head.config, head, folder, torch.float64)
    return folder


def change(folder: Path, values: dict[str, Any], options: dict[str, Any]) -> None:
    """Change keys of config.json and of its dflash_config; None removes a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for found, new in ((config, values), (config["dflash_config"], options)):
        found.update(new)
        for key in [key for key, value in new.items() if value is None]:
            del found[key]
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_a_saved_folder_loads_equal(fields: dict[str, Any], tmp_path: Path):
    made = random_block(SIZES, **fields)
    made.config = replace(made.config, taps=(1, 5))
    made = BlockHead(made.config).double()
    if made.token_ids_V is not None:
        made.token_ids_V = torch.tensor([1, 3, 4, 9])
    back = load_head(save(made, tmp_path / "head"), torch.float64)
    assert back.config == made.config and head_of(tmp_path / "head") == "block"
    assert kind_in(tmp_path / "head").read_shape(tmp_path / "head") == made.config
    assert all(torch.equal(back.state_dict()[name], t) for name, t in made.state_dict().items())


def test_the_folder_has_the_published_keys_and_names(tmp_path: Path):
    made = random_block(SIZES, layout="anchor_first", correction="markov", rank=3)
    made.config = replace(made.config, taps=(1, 5))
    folder = save(BlockHead(made.config), tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DSparkDraftModel"] and config["model_type"] == "qwen3"
    assert config["sample_from_anchor"] is True and config["block_size"] == 6
    options = config["dflash_config"]
    assert options["target_layer_ids"] == [0, 4], "layers are numbered by their outputs"
    assert (options["taps"], options["mask_token_id"]) == ([1, 5], 10)
    assert (options["projector_type"], options["markov_rank"]) == ("dspark", 3)
    names = load_file(folder / "model.safetensors").keys()
    assert {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.1.self_attn.k_norm.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.post_attention_layernorm.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    } <= names


def test_a_folder_of_domino_has_the_published_names(tmp_path: Path):
    made = random_block(SIZES, layout="anchor_first", correction="gru", rank=3, gru_size=4)
    folder = save(made, tmp_path / "head")
    options = json.loads((folder / "config.json").read_text())["dflash_config"]
    sizes = {"emb_dim": 3, "gru_hidden_dim": 4, "pure_draft_prefix_len": 1, "shift_label": True}
    assert sizes.items() <= options.items() and options["projector_type"] == "domino"
    state = load_file(folder / "model.safetensors")
    assert state["prefix_gru.weight_ih_l0"].shape == (12, 6)
    assert state["prefix_gru.weight_hh_l0"].shape == (12, 4)
    assert state["embed_proj.0.weight"].shape == (3, 10)
    assert state["embed_proj.2.weight"].shape == (11, 3)
    change(folder, {"sample_from_anchor": None}, {})
    assert load_head(folder).config.layout == "anchor_first", "shift_label names the layout too"


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ({"dflash_config": {}}, {}, "expected dflash_config with target_layer_ids"),
        ({"num_hidden_layers": 3}, {}, r"layers\.2\.mlp\.up_proj\.weight is missing"),
        ({"num_hidden_layers": 1}, {}, r"layers\.1\.mlp\.up_proj\.weight is unknown"),
        ({"intermediate_size": 9}, {}, r"has the shape \[24, 6\], expected \[9, 6\]"),
        ({"block_size": 1}, {}, "block_size is 1, expected a whole number of 2 or more"),
        ({"rms_norm_eps": "x"}, {}, "rms_norm_eps is 'x', expected a number above 0"),
        ({"sample_from_anchor": "no"}, {}, "sample_from_anchor is 'no', expected true or false"),
        ({"sample_from_anchor": None}, {}, "has no sample_from_anchor, so it is unknown"),
        ({}, {"causal": 1}, "causal is 1, expected true or false"),
        ({}, {"mask_token_id": 11}, "mask_token_id is 11, expected an id from 0 to 10"),
        ({}, {"target_layer_ids": [-2]}, "target_layer_ids is .*, expected different layers"),
        ({}, {"target_layer_ids": [0, 4]}, r"are the taps \[1, 5\], but taps is"),
        ({}, {"projector_type": "other"}, "projector_type is 'other', expected one of dflash"),
        ({}, {"projector_type": "dspark", "markov_rank": 2}, "markov_w1.weight is missing"),
        ({}, {"use_swa": True}, "use_swa is True, which this project does not read"),
        ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu', which this project does not read"),
        ({"rope_scaling": {"factor": 2}}, {}, "rope_scaling is .*, which this project does not"),
        ({"rope_parameters": {"rope_type": "yarn"}}, {}, "rope_type is 'yarn', which this"),
        ({"layer_types": ["sliding_attention"]}, {}, "layer_types is .*, which this project"),
        ({}, {"enable_confidence_head": True}, r"confidence_head\.proj\.bias is missing"),
        (
            {},
            {"enable_confidence_head": True, "confidence_head_with_markov": True},
            "confidence_head_with_markov is True, expected False with projector_type dflash",
        ),
        ({}, {"projector_type": "domino"}, "emb_dim is None, expected a whole number"),
        ({}, {"pure_draft_prefix_len": 2}, "pure_draft_prefix_len is 2, which this project"),
    ],
    ids=str,
)
def test_inconsistent_folders_are_refused(
    values: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
):
    folder = save(random_block(SIZES, num_layers=2), tmp_path / "head")
    if "dflash_config" in values:
        (folder / "config.json").write_text('{"block_size": 3}')
    else:
        change(folder, values, options)
    with pytest.raises(UserError, match=words):
        load_head(folder)


@pytest.mark.parametrize(
    ("values", "options", "causal"),
    [
        ({}, {}, False),  # the control
        ({}, {"causal": True}, True),
        ({}, {"causal_head": True}, True),
        ({"is_causal": True}, {}, True),
        ({"causal": True}, {}, True),
        ({"is_causal": True}, {"causal": True}, True),
        ({"is_causal": False}, {"causal": False}, False),
    ],
    ids=str,
)
def test_causal_blocks_are_read_under_every_spelling(
    values: dict[str, Any], options: dict[str, Any], causal: bool, tmp_path: Path
):
    folder = save(random_block(SIZES, in_block_mask="causal"), tmp_path / "head")
    change(folder, values, {"causal": None, **options})
    assert load_head(folder).config.causal is causal


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ({"is_causal": True}, {}, "is_causal is True, expected False, as under another key"),
        ({"causal": False}, {"causal": True}, "causal is False, expected True, as under another"),
        ({"is_causal": True, "causal": False}, {"causal": None}, "causal is False, expected True"),
        ({"is_causal": 1}, {"causal": None}, "is_causal is 1, expected true or false"),
    ],
    ids=str,
)
def test_contradicting_spellings_of_causal_blocks_are_refused(
    values: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
):
    folder = save(random_block(SIZES), tmp_path / "head")
    load_head(folder)  # the control
    change(folder, values, options)
    with pytest.raises(UserError, match=words):
        load_head(folder)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path):
    folder = save(random_block(SIZES), tmp_path / "head")
    state = load_file(folder / "model.safetensors")
    state["fc.weight"][0, 0] = float("nan")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match="non-finite weights"):
        load_head(folder)


def test_a_folder_without_a_layout_needs_it_given(tmp_path: Path):
    """Check a folder in DeepSpec's form: keys at the top level, and copies of the target's ends."""
    made = random_block(SIZES, layout="anchor_first", correction="markov", rank=3)
    folder = save(made, tmp_path / "head")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    options = config.pop("dflash_config")
    del config["sample_from_anchor"], options["taps"], options["projector_type"]
    file.write_text(json.dumps({**config, **options}))
    copies = {name: torch.zeros(11, 6) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file({**load_file(folder / "model.safetensors"), **copies}, folder / "model.safetensors")
    with pytest.raises(UserError, match="Set layout=fill_in for files of z-lab's"):
        BlockDrafter(folder)
    drafter = BlockDrafter(folder, layout="anchor_first", dtype="float64")
    assert drafter.config == made.config
    with pytest.raises(UserError, match="layout is 'left', expected one of fill_in"):
        BlockDrafter(folder, layout="left")


def test_a_layout_that_contradicts_the_folder_is_refused(tmp_path: Path):
    folder = save(random_block(SIZES), tmp_path / "head")
    assert BlockDrafter(folder, layout="fill_in").config.num_drafts == 6
    with pytest.raises(UserError, match="the layout fill_in, but layout=anchor_first was given"):
        BlockDrafter(folder, layout="anchor_first")
