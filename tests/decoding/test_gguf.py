"""GGUF files: the model and the tokenizer that were written are read, and bad files are refused."""

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.errors import UserError
from decoding.models.gguf.file import GgufFile
from decoding.models.gguf.model import config_of, weights_of
from decoding.models.gguf.tokenizer import tokenizer_of
from decoding.models.text.sentence_pieces import SentencePieces
from decoding.models.text.tokenizer_repair import PROBES
from tests.support.gguf_files import (
    SPECIAL,
    USER,
    byte_level,
    permute,
    sentence_piece,
    tiny_llama,
    write,
)

# how llama.cpp cuts a text, one regular expression after the other (llama-vocab.cpp)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CUTS = {"gpt-2": [_GPT2], "smollm": [r"\p{N}", _GPT2]}
IDS = torch.tensor([[1, 40, 77, 5, 9, 100, 2, 33]])


def read_model(path: Path, config: dict[str, Any] | None = None) -> LlamaForCausalLM:
    """Return the model of a GGUF file in float32."""
    file = GgufFile(path)
    fields = config or config_of(file)
    model = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    model.load_state_dict(weights_of(file, fields), strict=not fields["tie_word_embeddings"])
    return model


def read_all(path: Path) -> None:
    read_model(path)
    tokenizer_of(GgufFile(path))


@torch.inference_mode()
def largest_difference(one: LlamaForCausalLM, other: LlamaForCausalLM) -> float:
    return (one(IDS).logits - other(IDS).logits).abs().max().item()


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_holds_the_model_that_was_written(tmp_path: Path, tied: bool):
    model = tiny_llama(tied)
    found = read_model(write(tmp_path / "m.gguf", model))
    assert largest_difference(found, model) == 0
    fields = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
        "num_key_value_heads max_position_embeddings rms_norm_eps rope_parameters hidden_act "
        "tie_word_embeddings"
    )
    for field in fields.split():
        assert getattr(found.config, field) == getattr(model.config, field), field
    special = (found.config.bos_token_id, found.config.eos_token_id, found.config.pad_token_id)
    assert special == (1, 2, 2)


def test_control_rows_in_another_order_are_another_model(tmp_path: Path):
    """Check that queries and keys whose rows are not in GGUF's order give other logits."""
    model = tiny_llama()

    def unpermute(_: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name, heads in (("attn_q", 4), ("attn_k", 2)):
            own = model.state_dict()[f"model.layers.0.self_attn.{name[-1]}_proj.weight"].numpy()
            assert (tensors[f"blk.0.{name}.weight"] == permute(own, heads)).all()
            tensors[f"blk.0.{name}.weight"] = own

    assert (
        largest_difference(read_model(write(tmp_path / "m.gguf", model, change=unpermute)), model)
        > 1e-3
    )


def test_quantized_weights_are_those_of_the_gguf_package(tmp_path: Path):
    model, name = tiny_llama(), "blk.1.ffn_up.weight"
    file = GgufFile(write(tmp_path / "m.gguf", model, quantized=(name,)))
    written = model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = torch.tensor(gguf.dequantize(gguf.quantize(written.numpy(), kind), kind))
    found = weights_of(file, config_of(file))["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(found, expected) and not torch.equal(found, written)
    half = weights_of(file, config_of(file), torch.bfloat16)
    assert {weight.dtype for weight in half.values()} == {torch.bfloat16}


@pytest.mark.parametrize("pre", CUTS)
def test_a_text_is_cut_as_in_llama_cpp(tmp_path: Path, pre: str):
    tokenizer = tokenizer_of(GgufFile(write(tmp_path / "m.gguf", tiny_llama(), byte_level(pre))))
    cutter = tokenizer.backend_tokenizer.pre_tokenizer
    for text in [*PROBES, "x  1234 5½ it's  12,345.6", "a\n\n b\t 7"]:
        parts = [text]
        for pattern in CUTS[pre]:
            parts = [
                piece for part in parts for piece in regex.split(f"({pattern})", part) if piece
            ]
        found = [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)]
        assert found == parts


def test_control_other_cuts_are_found():
    assert regex.findall(CUTS["gpt-2"][0], "x  12") == ["x", " ", " 12"]
    assert [p for p in regex.split(rf"({CUTS['smollm'][0]})", "x  12") if p] == ["x  ", "1", "2"]


def test_texts_and_special_tokens_round_trip(tmp_path: Path):
    tokenizer = tokenizer_of(GgufFile(write(tmp_path / "m.gguf", tiny_llama())))
    vocabulary = tokenizer.get_vocab()
    for text in [*PROBES, f"{SPECIAL[1]}the 12{USER[0]} he{SPECIAL[2]}"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer(f"{SPECIAL[1]}{USER[0]} the12")["input_ids"]
    assert ids == [vocabulary[token] for token in (SPECIAL[1], USER[0], "Ġthe", "1", "2")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"{USER[0]} the12"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert rendered == "<|im_start|>he<|im_end|>"
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token)
    assert names == (SPECIAL[1], SPECIAL[2], SPECIAL[0], SPECIAL[2])


@pytest.mark.parametrize("ends", ["bos", "eos"])
def test_a_file_that_asks_for_it_adds_an_end(tmp_path: Path, ends: str):
    tokenizer = byte_level() | {f"tokenizer.ggml.add_{ends}_token": True}
    ids = tokenizer_of(GgufFile(write(tmp_path / "m.gguf", tiny_llama(), tokenizer)))("he")[
        "input_ids"
    ]
    assert ids[{"bos": 0, "eos": -1}[ends]] == {"bos": 1, "eos": 2}[ends] and len(ids) == 2


@pytest.mark.long
def test_a_sentencepiece_tokenizer_gives_its_ids(tmp_path: Path, llama_tokenizer: Path):
    model = llama_tokenizer / "tokenizer.model"
    file = GgufFile(write(tmp_path / "m.gguf", tiny_llama(), sentence_piece(model)))
    tokenizer = tokenizer_of(file)
    reference = SentencePieces(model.read_bytes(), tokenizer.added_tokens_decoder, legacy=True)
    for text in [*PROBES, "hi</s>USER: x  1234"]:
        ids = tokenizer(text)["input_ids"]
        assert ids == [1, *reference.encode(text)]
        assert tokenizer.decode(ids[1:]) == text or "</s>" in text


def _set(key: str, value: Any):
    def change(metadata: dict[str, Any], _: dict[str, np.ndarray]) -> None:
        metadata[key] = value

    return change


def _tensor(name: str, value: np.ndarray | None):
    def change(_: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


ONES = np.ones((4, 4), dtype=np.float32)
BAD = {
    "experts": (_set("llama.expert_count", 8), "a mixture of 8 experts"),
    "scaled rope": (
        _set("llama.rope.scaling.type", "yarn"),
        "scaling.type is 'yarn', expected 'none'",
    ),
    "positions of an older key": (
        _set("llama.rope.scale_linear", 4.0),
        "scale_linear is '4.0', expected '1.0'",
    ),
    "part of a head": (_set("llama.rope.dimension_count", 8), "rotary positions cover 8 of 16"),
    "a part": (_set("split.count", 3), "one of 3 parts.*--merge"),
    "no depth": (
        _set("llama.block_count", None),
        "block_count is missing, expected a whole number",
    ),
    "no number": (
        _set("llama.block_count", "two"),
        "block_count is 'two', expected a whole number",
    ),
    "a layer more": (_set("llama.block_count", 3), "'blk.2.attn_q.weight' is missing"),
    "a layer less": (_set("llama.block_count", 1), "'blk.1.attn_k.weight' has no place"),
    "a bias": (_tensor("blk.0.attn_q.bias", ONES[0]), "'blk.0.attn_q.bias' has no place"),
    "no norm": (_tensor("output_norm.weight", None), "'output_norm.weight' is missing"),
    "another shape": (
        _tensor("blk.0.ffn_up.weight", ONES),
        r"is \[4, 4\], expected shape \[96, 64\]",
    ),
    "another tokenizer": (_set("tokenizer.ggml.model", "t5"), "tokenizer.ggml.model is 't5'"),
    "another cut": (
        _set("tokenizer.ggml.pre", "llama-bpe"),
        "pre is 'llama-bpe', expected one of gpt-2, smollm",
    ),
    "no tokens": (_set("tokenizer.ggml.tokens", None), "tokens is missing"),
    "few types": (_set("tokenizer.ggml.token_type", [1, 1]), "has 2 entries, expected"),
    "a token twice": (
        _set("tokenizer.ggml.tokens", ["a"] * len(byte_level()["tokenizer.ggml.tokens"])),
        "different tokens",
    ),
    "a wrong merge": (_set("tokenizer.ggml.merges", ["h zz"]), "merges holds 'h zz'"),
    "an id beyond": (_set("tokenizer.ggml.eos_token_id", 9999), "the eos token has id 9999"),
    "no scores": (_set("tokenizer.ggml.model", "llama"), "scores is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, case: str):
    change, words = BAD[case]
    path = write(tmp_path / "m.gguf", tiny_llama(), change=change)
    with pytest.raises(UserError, match=words) as caught:
        read_all(path)
    assert str(path) in str(caught.value)


def test_another_architecture_is_refused_by_name(tmp_path: Path):
    path = write(tmp_path / "m.gguf", tiny_llama(), architecture="qwen2")
    with pytest.raises(UserError, match="the architecture is 'qwen2', expected 'llama'"):
        config_of(GgufFile(path))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path):
    whole = write(tmp_path / "m.gguf", tiny_llama()).read_bytes()
    path = tmp_path / "cut.gguf"
    for share in range(20):
        path.write_bytes(whole[: len(whole) * share // 20])
        with pytest.raises(UserError, match="bytes and is damaged, incomplete or no GGUF file"):
            GgufFile(path)


def test_other_files_and_folders_are_refused(tmp_path: Path, embedded_target: Path):
    with pytest.raises(UserError, match="damaged, incomplete or no GGUF file"):
        GgufFile(embedded_target / "model.safetensors")
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(UserError, match="is not a file, expected a GGUF file"):
            GgufFile(path)


def test_without_the_package_the_install_line_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write(tmp_path / "m.gguf", tiny_llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[gguf\]'"):
        GgufFile(path)
