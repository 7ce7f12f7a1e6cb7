"""Bad input of the llama.cpp backend, and what is read of a GGUF file without its library."""

import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import decoding
from decoding.drafters.fit import check_fits
from decoding.engine import stop_tokens
from decoding.errors import UserError
from decoding.models.folder import read_config
from decoding.models.llama_cpp import library
from decoding.models.llama_cpp.target import coarsest
from decoding.models.load import choose_execution, load_target
from decoding.models.taps import check_taps
from decoding.models.text.compatible import check_same_tokenizer
from decoding.models.text.tokenizer import load_tokenizer
from jobs.config import TargetConfig
from training.models.build import target_config

pytest.importorskip("gguf")
from tests.support.gguf_files import byte_level, tiny_llama, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


class Fake:
    """llama.cpp's functions as far as loading calls them, with a log and an answer."""

    def __init__(self, logged: list[tuple[int, bytes]], **answers: Any) -> None:
        self.logged, self.answers = logged, answers
        self.keep: Any = None

    def llama_log_callback(self, keep: Any) -> Any:
        return keep

    def llama_log_set(self, keep: Any, _data: None) -> None:
        self.keep = keep

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace()

    def llama_model_load_from_file(self, _path: bytes, _settings: Any) -> Any:
        for level, text in self.logged:
            self.keep(level, text, None)
        return self.answers.get("model")

    def __getattr__(self, name: str) -> Any:
        if name in self.answers.get("missing", ()):
            raise AttributeError(name)
        return lambda *_: self.answers.get(name, 0)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library be loaded again, within the test alone."""
    monkeypatch.setattr(library, "_loaded", [])


def use(patch: pytest.MonkeyPatch, fake: Fake) -> None:
    patch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_cpp=fake))


@pytest.mark.usefixtures("unloaded")
def test_without_the_library_the_line_that_installs_it_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UserError, match=r"not installed\. Run pip install -e '\.\[llamacpp\]'"):
        decoding.load(model)


@pytest.mark.usefixtures("unloaded")
def test_an_old_library_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Fake([], missing=("llama_memory_seq_rm",)))
    with pytest.raises(UserError, match="too old: it has no llama_memory_seq_rm.*--upgrade"):
        load_target(model)


@pytest.mark.usefixtures("unloaded")
def test_what_llama_cpp_logs_is_the_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [(2, b"loading"), (4, b"unknown model "), (5, b"architecture: 'x'\n"), (4, b"failed\n")]
    use(monkeypatch, Fake(lines))
    with pytest.raises(UserError, match=r"cannot load it \(unknown model architecture: 'x'; fail"):
        load_target(model)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        ("llama_model_has_encoder", True, "has an encoder"),
        ("llama_model_is_recurrent", True, "is recurrent"),
        ("llama_model_is_hybrid", True, "has recurrent layers"),
        ("llama_model_is_diffusion", True, "is a diffusion model"),
        ("llama_model_n_swa", 4096, "has a sliding attention window"),
    ],
)
def test_other_attention_is_refused_by_name(
    model: Path, monkeypatch: pytest.MonkeyPatch, question: str, answer: Any, words: str
) -> None:
    use(monkeypatch, Fake([], **{"model": 1, question: answer}))
    with pytest.raises(UserError, match=f"tiny.gguf: the model {words}, expected full causal"):
        load_target(model)


def test_an_error_without_a_reason_says_so() -> None:
    found = library.Library(None, deque(), None)
    assert found.reason() == "no reason was given"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "float64"}, "dtype is float64.*Use dtype=float32 or float16 or bfloat16"),
        ({"parallel": "tp"}, "parallel is tp.*Use parallel=none"),
        ({"execution": "fused"}, "execution is fused.*Use execution=auto"),
        ({"backend": "hf"}, "which backend=hf does not read.*from_gguf.py"),
        ({"max_length": 129}, "max_length 129 is more than the model's context of 128 tokens"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(model: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_target(model, **settings)


def test_a_folder_is_refused(embedded_target: Path) -> None:
    with pytest.raises(UserError, match="is a folder, but backend=llama_cpp runs GGUF.*to_gguf.py"):
        load_target(embedded_target, backend="llama_cpp")


def test_damaged_files_are_refused(model: Path, tmp_path: Path) -> None:
    whole = model.read_bytes()
    for size in (3, 200, len(whole) // 2, len(whole) - 40):
        path = tmp_path / f"{size}.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=f"{size} bytes and is damaged, incomplete"):
            decoding.load(path)
    with pytest.raises(UserError, match="does not exist"):
        decoding.load(tmp_path / "absent.gguf")
    with pytest.raises(UserError, match="is not a file, expected a GGUF file"):
        load_target(tmp_path / "absent.gguf")


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m-00001-of-00002.gguf",
        tiny_llama(),
        change=lambda metadata, _: metadata.update({"split.count": 2}),
    )
    with pytest.raises(UserError, match=r"one of 2 parts.*llama-gguf-split --merge"):
        decoding.load(path)


def test_an_architecture_without_its_sizes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny_llama(), architecture="other")
    with pytest.raises(UserError, match=r"other\.embedding_length is missing"):
        decoding.load(path)


def test_shape_tokenizer_and_end_are_those_of_the_file(model: Path, tmp_path: Path) -> None:
    config = read_config(model)
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == (
        "llama",
        64,
        2,
    )
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(tokenizer("the sea")["input_ids"]) == "the sea"
    assert stop_tokens(model, tokenizer) == (2,)
    with_turns = write(
        tmp_path / "turns.gguf",
        tiny_llama(),
        change=lambda metadata, _: metadata.update({"tokenizer.ggml.eot_token_id": 1}),
    )
    assert stop_tokens(with_turns, load_tokenizer(with_turns)) == (1, 2)
    assert choose_execution(model, backend="native", dtype="float32", device="cpu") == "auto"


def test_a_drafter_with_another_tokenizer_is_refused(
    model: Path, tmp_path: Path, embedded_target: Path
) -> None:
    same = write(tmp_path / "same.gguf", tiny_llama())
    check_same_tokenizer(model, same)
    other = write(tmp_path / "other.gguf", tiny_llama(), byte_level("gpt-2"))
    with pytest.raises(UserError, match="their tokenizers differ"):
        check_same_tokenizer(model, other)
    with pytest.raises(UserError, match="their tokenizers differ"):
        check_same_tokenizer(model, embedded_target)


def test_heads_are_checked_by_their_sizes(model: Path, tmp_path: Path) -> None:
    """The hash of a head's target is that of a folder, so a file cannot have it."""
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    (tmp_path / "drafter_card.json").write_text('{"target_hash": "of a folder"}')
    check_fits(model, tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 65}')
    with pytest.raises(UserError, match="hidden_size is 64 in the target and 65 in the head"):
        check_fits(model, tmp_path)


def test_taps_are_refused_by_name() -> None:
    target: Any = SimpleNamespace(
        only_final_state=True, backend="llama_cpp", name="tiny", num_layers=4
    )
    check_taps(target, ())
    check_taps(target, (4,))
    with pytest.raises(UserError, match=r"layers 1, 4, of which the llama_cpp backend has only la"):
        check_taps(target, (1, 4))


def test_training_names_the_conversion(model: Path) -> None:
    target = TargetConfig(path=str(model))
    with pytest.raises(UserError, match=r"is a file, expected a model folder\. Convert it once"):
        target_config(target)
    assert target_config(target, decodes=True).max_position_embeddings == 128


@pytest.mark.parametrize(
    ("types", "cache", "expected"),
    [
        (["F32"], "float32", "float32"),
        (["F32"], "float16", "float16"),
        (["BF16", "F32"], "float32", "bfloat16"),
        (["Q4_1", "Q6_K", "F32"], "float32", "q4_1"),
        (["F32", "Q8_0"], "float32", "q8_0"),
    ],
)
def test_the_coarsest_numbers_are_named(types: list[str], cache: str, expected: str) -> None:
    assert coarsest(types, cache) == expected
