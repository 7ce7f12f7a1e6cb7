"""Tokenizers with a tokenizer.model give SentencePiece's ids, or are refused by name."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer

from decoding import generate, load
from decoding.errors import UserError
from decoding.models.text.compatible import check_same_tokenizer, check_tokenizer_of
from decoding.models.text.text_stream import TextStream
from decoding.models.text.tokenizer import copy_tokenizer, load_tokenizer
from decoding.models.text.tokenizer_repair import PROBES
from tests.support.tiers import tiered
from training.config import StudentConfig
from training.drafter_folder import write_model
from training.models.build import build_llama

Build = Callable[..., Path]

# Files of LLaMA tokenizer folders, as published and as older recipes wrote them.
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
VICUNA = {
    "tokenizer_class": "LlamaTokenizer",
    **SPECIAL,
    "sp_model_kwargs": {},
    "clean_up_tokenization_spaces": False,
}
FAST = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **SPECIAL,
    "clean_up_tokenization_spaces": False,
}
FILES = {
    "model": ["tokenizer.model"],
    "json": ["tokenizer.json"],
    "both": ["tokenizer.model", "tokenizer.json"],
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vicuna_1.3": ("model", VICUNA),
    "vicuna_1.5": ("model", {**VICUNA, "add_bos_token": True, "legacy": False}),
    "fast_class": ("model", {**VICUNA, "tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
    "class_and_json": ("both", VICUNA),
    "class_and_json_1.5": ("both", {**VICUNA, "legacy": False}),
    "class_and_json_alone": ("json", {**VICUNA, "add_bos_token": True}),
    "model_alone": ("model", {}),  # its config.json has model_type llama
    "json_alone": ("json", FAST),
    "json_and_model": ("both", FAST),
}
BRIEF = ("vicuna_1.5", "class_and_json", "model_alone")  # a folder of each kind of files
PADDED = {**VICUNA, "pad_token": "[PAD]"}
VICUNA_TURNS = (
    "A chat. USER: Write code. ASSISTANT: def f():\n    pass",
    "USER: Again ASSISTANT:  ok ",
    " USER: Bye",
)


@pytest.fixture
def build(tmp_path: Path, llama_tokenizer: Path) -> Build:
    """Return a function that writes a folder of LLaMA's tokenizer files and returns its path.

    Its arguments: the folder's name, a key of FILES, the content of tokenizer_config.json (empty
    for a config.json instead), and whether a token [PAD] is added.
    """

    def made(name: str, files: str, settings: dict[str, Any], pad: bool = False) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in FILES[files]:
            shutil.copy(llama_tokenizer / file, folder)
        if settings:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        else:
            (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 32000}')
        if pad:
            (folder / "added_tokens.json").write_text(json.dumps({"[PAD]": 32_000}))
        return folder

    return made


@pytest.fixture(scope="session")
def pieces(llama_tokenizer: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(llama_tokenizer / "tokenizer.model"))


@pytest.fixture(scope="session")
def real_texts(shared_data: Path) -> list[str]:
    """Return code, encyclopedia articles in two languages, and chats."""
    texts = []
    for name, count in (
        ("github/sample_github1", 12),
        ("wiki/sample_wiki1", 2),
        ("arxiv/sample_arxiv1", 1),
    ):
        with (shared_data / "text" / "redpajama_sample" / f"{name}.jsonl").open() as lines:
            texts += [json.loads(next(lines))["text"][:6000] for _ in range(count)]
    chats = json.loads((shared_data / "chat" / "sgd_dialogues.json").read_text())[:5]
    return texts + [turn["value"] for chat in chats for turn in chat["conversations"]]


def bare(pieces: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
    """Return a text's ids without SentencePiece's leading blank.

    The text is encoded after a byte that merges with nothing.
    """
    return list(pieces.encode("\x01" + text)[2:])


@pytest.mark.parametrize("name", tiered(LAYOUTS, BRIEF))
def test_ids_are_sentencepieces_and_decode_to_the_text(
    name: str,
    build: Build,
    pieces: sentencepiece.SentencePieceProcessor,
    real_texts: list[str],
    tmp_path: Path,
) -> None:
    files, settings = LAYOUTS[name]
    tokenizer = load_tokenizer(build(name, files, settings), of_model=False)
    copy_tokenizer(tmp_path / name, tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)  # as a serving engine loads it
    for text in [*PROBES, *real_texts]:
        ids = pieces.encode(text)
        assert tokenizer(text)["input_ids"] == exported(text)["input_ids"] == [1, *ids]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    parts = [pieces.encode(turn) for turn in VICUNA_TURNS]
    if settings.get("legacy") is False:
        parts[1:] = [bare(pieces, turn) for turn in VICUNA_TURNS[1:]]
    turns = "</s>".join(VICUNA_TURNS)
    expected = [1, *parts[0], 2, *parts[1], 2, *parts[2]]
    assert tokenizer(turns)["input_ids"] == exported(turns)["input_ids"] == expected
    # Loss masks are computed from tokens' characters.
    places = tokenizer(turns, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    for place, text in zip(places, tokenizer.convert_ids_to_tokens(expected[1:]), strict=True):
        assert (
            turns[slice(*place)].strip() == text.replace("▁", " ").replace("<0x0A>", "\n").strip()
        )


def test_other_tokenizers_are_left_unchanged(
    chat24m: Path,
    stories260k: Path,
    embedded_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    for folder in (chat24m, stories260k, embedded_target):
        copy_tokenizer(folder, tmp_path)
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
            assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
        load_tokenizer(folder)
    assert not capsys.readouterr().err


def test_a_repair_is_reported_once_and_text_streams_after_it(
    build: Build, capsys: pytest.CaptureFixture
) -> None:
    folder = build("new", "model", {**VICUNA, "model_max_length": 1234})
    tokenizer = load_tokenizer(folder, of_model=False)
    load_tokenizer(folder, of_model=False)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        f"note: {folder}: transformers loads this tokenizer wrongly (the ids of 'def f(x)" in said
    )
    assert "[268, 2457, 921], expected [1678, 736, 921] according to tokenizer.model): " in said
    assert (tokenizer.name_or_path, tokenizer.model_max_length) == (str(folder), 1234)
    for text in PROBES:
        stream = TextStream(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)))
        told = [stream.add([token]) for token in [*tokenizer(text)["input_ids"], 2]]
        assert "".join([*told, stream.end()]) == text


def test_a_repair_without_disk_space_is_refused(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build("roomless", "both", VICUNA)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "nowhere"))
    with pytest.raises(
        UserError, match="roomless: its repaired tokenizer cannot be written .* set TMPDIR"
    ):
        load_tokenizer(folder, of_model=False)


def test_unrepairable_tokenizers_are_refused(
    build: Build, llama_tokenizer: Path, stories260k: Path, tmp_path: Path
) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(UserError) as told:
            load_tokenizer(folder, of_model=False)
        assert str(folder) in str(told.value)
        return str(told.value)

    other = build("other", "json", FAST)
    shutil.copy(stories260k / "tokenizer.model", other)
    assert "different vocabularies (512 and 32000 tokens; id 2" in refusal(other)

    damaged = build("damaged", "json", FAST)
    (damaged / "tokenizer.model").write_bytes(
        (llama_tokenizer / "tokenizer.model").read_bytes()[:-100]
    )
    assert "tokenizer.model is not a SentencePiece model" in refusal(damaged)
    (damaged / "tokenizer.model").write_bytes(b"")
    assert "is not a SentencePiece model (it holds no pieces)" in refusal(damaged)
    (damaged / "tokenizer.json").write_text("[" * 10**5)
    assert "tokenizer.json cannot be read as JSON (maximum recursion" in refusal(damaged)

    empty = build("empty", "model", {**VICUNA, "bos_token": "", "eos_token": "", "unk_token": ""})
    assert "special tokens are empty strings" in refusal(empty)

    unigram = build("unigram", "model", VICUNA)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROBES),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (unigram / "tokenizer.model").write_bytes(model.getvalue())
    assert "in a tokenizer with that model's scores, the ids of" in refusal(unigram)


def test_tokenizers_are_compared_by_the_ids_of_texts(build: Build, llama_tokenizer: Path) -> None:
    target, other = (build(name, "json", FAST) for name in ("target", "other"))
    core = json.loads((other / "tokenizer.json").read_text())
    core["normalizer"] = core["normalizer"]["normalizers"][1]  # without the leading blank
    (other / "tokenizer.json").write_text(json.dumps(core))
    for folder in (target, other):
        (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 32000}')
    expected = "though every id is the same token: the ids of .*, expected "
    with pytest.raises(UserError, match=f"their tokenizers differ {expected}"):
        check_same_tokenizer(target, other)
    with pytest.raises(
        UserError, match=f"T is not the tokenizer of {target}: they differ {expected}"
    ):
        check_tokenizer_of(load_tokenizer(other), target, "T")
    check_same_tokenizer(target, target)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(build: Build) -> None:
    folder = build("large", "json", {**FAST, "pad_token": "[PAD]"})
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 32000}')
    with pytest.raises(
        UserError,
        match=r"large: its tokenizer has ids up to 32000 \('\[PAD\]'\), but vocab_size in con",
    ):
        load(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 32001}')
    assert len(load_tokenizer(folder)) == 32_001


@pytest.fixture
def pair(build: Build, tmp_path: Path) -> tuple[Path, Path]:
    """Return two model folders with random weights; the second has [PAD] as its last token."""
    shape = StudentConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    folders = []
    for name, settings, words in (("plain", FAST, 32_000), ("padded", PADDED, 32_001)):
        torch.manual_seed(words)
        model = build_llama(
            shape,
            torch.float32,
            vocab_size=words,
            max_position_embeddings=64,
            initializer_range=0.5,
        )
        files = build(
            f"{name}_files", "json" if settings is FAST else "model", settings, pad=words > 32_000
        )
        write_model(model, files, tmp_path / name, torch.float32)
        folders.append(tmp_path / name)
    return folders[0], folders[1]


def test_a_trailing_pad_token_is_accepted_in_either_model(pair: tuple[Path, Path]) -> None:
    for target, drafter in (pair, pair[::-1]):
        assert AutoTokenizer.from_pretrained(target)("a  b</s>c")["input_ids"] == [
            1,
            263,
            29871,
            289,
            2,
            274,
        ]
        drafted = load(target, drafter)
        plain = replace(drafted, drafter=None)
        for settings in ({}, {"temperature": 1.0, "verify": "coupled", "seed": 3}):
            fixed = {"max_new_tokens": 8, "stopping": "fixed", **settings}
            for prompt in ("def f(x):\n    return x", "a [PAD]"):
                assert (
                    generate(drafted, prompt, **fixed).tokens
                    == generate(plain, prompt, **fixed).tokens
                )
        assert generate(
            drafted, "x", max_new_tokens=8, stopping="fixed", temperature=1.0, verify="token"
        ).stats.drafted


def test_a_note_reports_the_missing_sentencepiece(
    chat24m: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that a tokenizer loads without sentencepiece, with a note that it was not compared."""
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(chat24m / name, tmp_path / name)
    (tmp_path / "tokenizer_config.json").write_text(
        (tmp_path / "tokenizer_config.json").read_text() + " "
    )
    monkeypatch.delitem(sys.modules, "decoding.models.text.sentence_pieces", raising=False)
    # importing it raises ModuleNotFoundError
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    tokenizer = load_tokenizer(tmp_path, of_model=False)
    assert "not compared with tokenizer.model" in capsys.readouterr().err
    assert tokenizer("hi").input_ids == load_tokenizer(chat24m)("hi").input_ids
