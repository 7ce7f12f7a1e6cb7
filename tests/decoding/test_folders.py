"""Errors for damaged model folders, different tokenizers and invalid prompts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.text.compatible import check_same_tokenizer
from decoding.rounds.settings import Settings
from tests.support.tiny_targets import hf_model, native_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    hf_model("llama", dtype=torch.float32).save_pretrained(path)
    return path


def edit(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def drop_tensor(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors")


def lose_shard(folder: Path) -> None:
    only_bin(folder)
    (folder / "pytorch_model.bin").unlink()
    weight_map = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def into_a_run(folder: Path) -> None:
    files = list(folder.iterdir())
    (folder / "drafter").mkdir()
    for file in files:
        file.rename(folder / "drafter" / file.name)


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", shutil.rmtree, "does not exist, expected a model folder"),
    (
        "empty",
        lambda f: [p.unlink() for p in f.iterdir()],
        "has no config.json .found nothing., expected",
    ),
    ("a run's folder", into_a_run, "is not a model folder, but contains .*/drafter. Use the"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    (
        "cut weights",
        cut,
        r"model.safetensors has \d+ bytes and is damaged or incomplete .*Copy it again",
    ),
    (
        "empty weights",
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "has 0 bytes and is damaged or incomplete",
    ),
    (
        "damaged header",
        lambda f: (f / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"nonsense"),
        "is damaged or incomplete .*header",
    ),
    ("pickle", only_bin, "python scripts/to_safetensors.py .*model"),
    ("lost shard", lose_shard, "model-00001-of-00002.safetensors is missing"),
    ("lost tensor", drop_tensor, "no tensor 'model.layers.1.mlp.up_proj.weight'"),
    (
        "broken config",
        lambda f: (f / "config.json").write_text('{\n"model_type": '),
        "config.json, line 2 is not valid JSON",
    ),
    (
        "list config",
        lambda f: (f / "config.json").write_text("[]"),
        "holds a list, expected a JSON object",
    ),
    ("no type", lambda f: (f / "config.json").write_text("{}"), "has no model_type"),
    (
        "family",
        lambda f: edit(f, model_type="falcon"),
        "'falcon' is not one of the native backend's .*backend=hf",
    ),
    (
        "window",
        lambda f: edit(f, sliding_window=4096),
        "llama has a sliding attention window of 4096",
    ),
    (
        "hybrid",
        lambda f: edit(f, layer_types=["full_attention", "linear_attention"]),
        "has layers of type linear_attention",
    ),
    ("seq2seq", lambda f: edit(f, is_encoder_decoder=True), "encoder-decoder"),
    ("activation", lambda f: edit(f, hidden_act="gelu"), "hidden_act 'gelu' is not 'silu'"),
    (
        "rope",
        lambda f: edit(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}),
        "rope_type 'yarn' is not known",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_folders_are_named(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_target(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [case[1:] for case in BAD if case[0] in ("cut weights", "pickle", "window", "seq2seq")],
)
def test_the_hf_backend_makes_the_same_checks(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    with pytest.raises(UserError, match=message):
        load_target(folder, backend="hf")


def test_sharded_folders_load(folder: Path) -> None:
    whole = load_target(folder, batch_size=1)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in (0, 1):
        shard = {name: tensor for i, (name, tensor) in enumerate(state.items()) if i % 2 == part}
        save_file(shard, folder / f"part{part}.safetensors")
        weight_map |= dict.fromkeys(shard, f"part{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tokens = torch.tensor([[4, 5, 6]])
    sharded = load_target(folder, batch_size=1)
    torch.testing.assert_close(sharded.forward(tokens)[0], whole.forward(tokens)[0])


def test_bad_choices_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match="dtype 'int4' is unknown, expected one of float64"):
        load_target(folder, dtype="int4")
    with pytest.raises(UserError, match="backend 'onnx' is unknown, expected one of native, hf"):
        load_target(folder, backend="onnx")
    with pytest.raises(UserError, match="max_length 9999 is more than the model's context of 256"):
        load_target(folder, max_length=9999)


def test_bad_prompts_are_named() -> None:
    target = native_of(hf_model(), max_length=8)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        decode(target, None, [[4], []], Settings())
    with pytest.raises(
        UserError, match="prompt 0 has 8 tokens, but 'in-memory' holds at most 8, output included"
    ):
        decode(target, None, [[4] * 8], Settings())
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        Settings(max_new_tokens=0)
    with pytest.raises(UserError, match="stopping 'mood' is unknown, expected one of fixed"):
        decode(target, None, [[4]], Settings(stopping="mood"))
    assert decode(target, None, [], Settings()) == []


def test_every_id_of_two_tokenizers_is_compared(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def write(where: Path, words: list[str]) -> Path:
        shutil.copytree(folder, where)
        core = Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
        )
        PreTrainedTokenizerFast(
            tokenizer_object=core, unk_token="<unk>", eos_token="</s>"
        ).save_pretrained(where)
        return where

    target = write(tmp_path / "target", ["<unk>", "</s>", "red", "green"])
    check_same_tokenizer(target, write(tmp_path / "same", ["<unk>", "</s>", "red", "green"]))
    # the same tokens and vocabulary size
    swapped = write(tmp_path / "swapped", ["<unk>", "</s>", "green", "red"])
    with pytest.raises(
        UserError, match=r"2 of 4 ids: id 2 is 'red' in the target and 'green' in the drafter; id 3"
    ):
        check_same_tokenizer(target, swapped)
    longer = write(tmp_path / "longer", ["<unk>", "</s>", "red", "green", "blue"])
    with pytest.raises(
        UserError, match="1 of 5 ids: id 4 is None in the target and 'blue' in the drafter"
    ):
        check_same_tokenizer(target, longer)
