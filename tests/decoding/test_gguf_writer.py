"""Model folders written as GGUF files: what is read back equals the folder, or it is refused."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decoding.errors import UserError
from decoding.models.gguf import writer
from decoding.models.gguf.file import GgufFile
from decoding.models.gguf.model import config_of, weights_of
from decoding.models.gguf.tokenizer import tokenizer_of
from decoding.models.gguf.writer import write_gguf
from decoding.models.text.tokenizer import TOKENIZER_FILES
from decoding.models.text.tokenizer_repair import PROBES
from tests.support import tiny_folders

pytest.importorskip("gguf")
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "grouped queries": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64},
    "wide heads": {"head_dim": 24, "num_key_value_heads": 1},
    "one layer, padded vocabulary": {"num_hidden_layers": 1, "vocab_size": 2050},
}


def make(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """Write a random model folder with another folder's tokenizer."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 2048,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    LlamaForCausalLM(LlamaConfig(**(sizes | changes))).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, folder / name)
    return folder


def change(path: Path, **values: Any) -> None:
    """Change fields of a JSON file."""
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(held | values))


def read_back(path: Path) -> LlamaForCausalLM:
    file = GgufFile(path)
    config = config_of(file)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(weights_of(file, config), strict=not config["tie_word_embeddings"])
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(3, 40)[None]).logits


@pytest.fixture
def folder(tmp_path: Path, embedded_target: Path) -> Path:
    return make(tmp_path / "model", embedded_target)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_read_back_has_equal_logits(
    tmp_path: Path, embedded_target: Path, shape: str
) -> None:
    folder = make(tmp_path / "model", embedded_target, **SHAPES[shape])
    assert write_gguf(folder, tmp_path / "m.gguf") == []
    expected = logits(LlamaForCausalLM.from_pretrained(folder))
    assert torch.equal(logits(read_back(tmp_path / "m.gguf")), expected)


def test_control_rows_that_are_not_interleaved_change_the_logits(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "interleave", lambda weight, heads: weight)
    write_gguf(folder, tmp_path / "m.gguf")
    expected = logits(LlamaForCausalLM.from_pretrained(folder))
    assert not torch.allclose(logits(read_back(tmp_path / "m.gguf")), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matrices_are_rounded_and_vectors_are_not(tmp_path: Path, folder: Path, dtype: str) -> None:
    write_gguf(folder, tmp_path / "m.gguf", dtype)
    found = read_back(tmp_path / "m.gguf").state_dict()
    for name, weight in load_file(folder / "model.safetensors").items():
        rounded = weight.to(getattr(torch, dtype)).float() if weight.dim() > 1 else weight
        assert torch.equal(found[name], rounded), name


def test_the_tokenizer_read_back_has_equal_ids_template_and_special_tokens(
    tmp_path: Path, embedded_target: Path
) -> None:
    folder = make(tmp_path / "model", embedded_target, vocab_size=2050)
    change(folder / "generation_config.json", eos_token_id=[2, 5])
    write_gguf(folder, tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    found = tokenizer_of(file)
    ours = PreTrainedTokenizerFast.from_pretrained(embedded_target)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "  ok\n"}]
    text = ours.apply_chat_template(chat, tokenize=False)
    assert found.apply_chat_template(chat, tokenize=False) == text
    for probe in (*PROBES, text):
        assert found(probe)["input_ids"] == ours(probe)["input_ids"], probe
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")
    contents = {key: file._content(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")}
    assert contents == {"eos": 2, "eot": 5}


def byte_level(folder: Path, cut: Any) -> None:
    """Replace a folder's tokenizer by a byte-level one, trained on this file."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = cut
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core.train(
        [__file__],
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    fast.save_pretrained(folder)


def digits_and_bytes() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )


@pytest.mark.parametrize(
    ("name", "cut"),
    [("smollm", digits_and_bytes), ("gpt-2", lambda: pre_tokenizers.ByteLevel(False))],
)
def test_a_byte_level_tokenizer_keeps_its_cut_and_merges(
    tmp_path: Path, folder: Path, name: str, cut: Any
) -> None:
    byte_level(folder, cut())
    write_gguf(folder, tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    assert file._content("tokenizer.ggml.pre") == name
    found, ours = tokenizer_of(file), PreTrainedTokenizerFast.from_pretrained(folder)
    for probe in (*PROBES, "<|im_start|>user\nHi 42<|im_end|>"):
        assert found(probe)["input_ids"] == ours(probe)["input_ids"], probe


def test_the_rope_of_llama_3_becomes_factors(tmp_path: Path, embedded_target: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = make(tmp_path / "model", embedded_target, rope_parameters=rope)
    write_gguf(folder, tmp_path / "m.gguf")
    factors = GgufFile(tmp_path / "m.gguf").tensor("rope_freqs.weight")
    scaled = LlamaForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / factors, scaled)
    assert factors.max().item() == pytest.approx(8)


def test_a_tokenizer_without_blanks_after_special_tokens_is_noted(
    tmp_path: Path, embedded_target: Path, chat24m: Path
) -> None:
    folder = make(tmp_path / "model", chat24m, vocab_size=4096)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False})
    )
    (note,) = write_gguf(folder, tmp_path / "m.gguf")
    assert "a blank before a text that follows a special token" in note


def add_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"d2t": torch.zeros(4)}, folder / "model.safetensors", {"format": "pt"})


def overflow(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def config(**values: Any) -> Any:
    return lambda folder: change(folder / "config.json", **values)


REFUSED: dict[str, tuple[Any, str]] = {
    "another family": (config(model_type="mistral"), "model_type is 'mistral', expected 'llama'"),
    "activation": (config(hidden_act="gelu"), "hidden_act is 'gelu', expected 'silu'"),
    "scaled rope": (
        config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        "rope_type is 'linear', expected 'default' or 'llama3'",
    ),
    "a tensor of another model": (add_tensor, "tensor 'd2t' has no place"),
    "float16 overflow": (overflow, "has values up to 100000, expected at most 65504"),
    "end tokens": (
        lambda folder: change(folder / "generation_config.json", eos_token_id=[2, 3, 4, 5]),
        "name 4 end tokens",
    ),
    "no SentencePiece model": (
        lambda folder: (folder / "tokenizer.model").unlink(),
        "the folder has no tokenizer.model",
    ),
    "unknown cut": (
        lambda folder: byte_level(folder, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        'its pre_tokenizer is {"type": "ByteLevel", "add_prefix_space": true',
    ),
    "no BPE": (
        lambda folder: (
            [(folder / name).unlink(missing_ok=True) for name in TOKENIZER_FILES],
            tiny_folders.tokenizer().save_pretrained(folder),
        ),
        "its model is WordLevel",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_format_cannot_express_is_refused_by_name(
    tmp_path: Path, folder: Path, case: str
) -> None:
    spoil, words = REFUSED[case]
    spoil(folder)
    with pytest.raises(UserError) as error:
        write_gguf(folder, tmp_path / "m.gguf", "float16")
    assert words in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]  # no partial file


def test_biases_are_refused(tmp_path: Path, embedded_target: Path) -> None:
    folder = make(tmp_path / "model", embedded_target, attention_bias=True)
    with pytest.raises(UserError, match="attention_bias is True, expected False"):
        write_gguf(folder, tmp_path / "m.gguf")


def test_an_existing_file_is_kept(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(UserError, match="exists already. Delete it"):
        write_gguf(folder, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_text() == "mine"


def test_the_missing_package_is_named(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[gguf\]'"):
        write_gguf(folder, tmp_path / "m.gguf")
