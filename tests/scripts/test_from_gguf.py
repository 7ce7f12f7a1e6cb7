"""Conversion of a GGUF file to a model folder: complete or absent, and the same model."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding import generate, load
from decoding.errors import UserError
from decoding.models.folder import hash_input, sha256
from decoding.models.text.tokenizer import load_tokenizer
from scripts.from_gguf import convert
from tests.support.gguf_files import SPECIAL, tiny_llama, write
from training.model_card import license_of


def test_the_folder_is_the_files_model(tmp_path: Path):
    model, folder = tiny_llama(), tmp_path / "made"
    source = write(tmp_path / "m.gguf", model)
    convert(source, folder, "float32")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[1, 40, 77, 5]])
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.eos_token_id == 2 and loaded.dtype == torch.float32
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token == SPECIAL[2] and tokenizer.chat_template
    origin = json.loads((folder / "gguf.json").read_text())
    assert origin == {"file": "m.gguf", "sha256": sha256(source), "dtype": "float32"}
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "made"}


def test_the_folder_states_the_files_licence(tmp_path: Path):
    """Check what the cards of drafters for this model will state."""
    stated = {"general.license": "other", "general.license.name": "mine: own"}
    source = write(tmp_path / "m.gguf", tiny_llama(), change=lambda given, _: given.update(stated))
    convert(source, tmp_path / "made")
    assert license_of(tmp_path / "made") == {"license": "other", "license_name": "mine: own"}
    convert(write(tmp_path / "none.gguf", tiny_llama()), tmp_path / "without")
    assert license_of(tmp_path / "without") == {"license": "unknown"}
    assert hash_input(tmp_path / "made", ["gguf.json"]) == hash_input(
        tmp_path / "without", ["gguf.json"]
    ), "the hash of the target does not depend on it"


def test_it_decodes_as_a_target(tmp_path: Path):
    convert(write(tmp_path / "m.gguf", tiny_llama()), tmp_path / "made")
    engine = load(tmp_path / "made", dtype="bfloat16")
    reply = generate(engine, "the 12", max_new_tokens=4, stop_token_ids=[])
    assert len(reply.tokens) == 4


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path):
    source, folder = write(tmp_path / "m.gguf", tiny_llama()), tmp_path / "made"
    convert(source, folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match="is not empty, expected a new folder"):
        convert(source, folder)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


def test_a_failed_conversion_leaves_nothing(tmp_path: Path):
    source = write(
        tmp_path / "m.gguf",
        tiny_llama(),
        change=lambda _, tensors: tensors.pop("blk.1.ffn_down.weight"),
    )
    with pytest.raises(UserError, match="'blk.1.ffn_down.weight' is missing"):
        convert(source, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_an_unknown_dtype_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="dtype 'int8' is unknown, expected one of"):
        convert(tmp_path / "m.gguf", tmp_path / "made", "int8")
