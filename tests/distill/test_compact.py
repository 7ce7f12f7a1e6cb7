"""Test `distill.compact`: compact models keep the logits, and unsuitable folders are refused."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.rounds.settings import Settings
from distill.compact import find_zero_channels, run
from distill.config import CompactConfig
from scripts.to_safetensors import convert
from tests.support.configurations import configuration

STORED, TRUE, HEADS = 32, 20, 4  # stored channels, nonzero channels, heads of width 8


def configured(model: Path, folder: Path, *overrides: str) -> CompactConfig:
    return configuration("distill.compact", f"model={model}", f"output_dir={folder}", *overrides)


def padded(
    folder: Path,
    kv_heads: int,
    tied: bool,
    channels: int = TRUE,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a LLaMA of STORED hidden channels, `channels` of them nonzero, and return its folder.

    Nothing writes the other channels, and the weights that read them are random.
    """
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=STORED,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        intermediate_size=48,
        max_position_embeddings=64,
        rms_norm_eps=1e-2,  # large enough to reveal an unscaled epsilon
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    dead = torch.randperm(STORED)[channels:]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, dead] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[dead] = 0
            layer.mlp.down_proj.weight[dead] = 0
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    model.to(dtype).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    del written["head_dim"]  # as stored in April 2024
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def logits(folder: Path, tokens: int = 40) -> torch.Tensor:
    ids = torch.arange(tokens)[None] % 97
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


@pytest.mark.parametrize(("kv_heads", "tied"), [(4, False), (4, True), (2, False), (1, True)])
def test_a_compacted_model_gives_equal_logits(
    tmp_path: Path, kv_heads: int, tied: bool, capsys: pytest.CaptureFixture[str]
):
    stored = padded(tmp_path / "stored", kv_heads, tied)
    compact = run(configured(stored, tmp_path / "run"))
    before, after = logits(stored), logits(compact)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
    config = json.loads((compact / "config.json").read_text())
    assert (config["hidden_size"], config["head_dim"], config["num_key_value_heads"]) == (
        TRUE,
        8,
        kv_heads,
    )
    assert config["rms_norm_eps"] == pytest.approx(1e-2 * STORED / TRUE)
    weights = load_file(compact / "model.safetensors")
    assert weights["model.layers.0.self_attn.o_proj.weight"].shape == (TRUE, 32)
    assert ("lm_head.weight" in weights) is not tied
    assert not find_zero_channels(weights).any()
    assert "32 -> 20 channels" in capsys.readouterr().out
    run(configured(stored, tmp_path / "run"))
    assert "finished before" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_stored_and_compact_models_decode_alike(tmp_path: Path, backend: str, kv_heads: int):
    stored = padded(tmp_path / "stored", kv_heads, tied=False)
    compact = run(configured(stored, tmp_path / "run"))
    settings = Settings(max_new_tokens=24, temperature=0.0, seed=0, stop_token_ids=())
    prompts = [[1, 5, 9], [1, 40, 41, 42, 43]]
    texts = [
        [
            row.tokens
            for row in decode(load_target(folder, backend=backend), None, prompts, settings)
        ]
        for folder in (stored, compact)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0][0])) > 3, "a text that repeats one token could hide a difference"


def test_control_without_norm_factor_or_epsilon_the_logits_differ(tmp_path: Path):
    """Control: the logits differ if a compact model keeps the stored epsilon or norm weights."""
    stored = padded(tmp_path / "stored", 2, tied=False)
    compact = run(configured(stored, tmp_path / "run"))
    before = logits(stored)
    wrong = shutil.copytree(compact, tmp_path / "epsilon")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    assert float((logits(wrong) - before).abs().max() / before.abs().max()) > 1e-3
    wrong = shutil.copytree(compact, tmp_path / "norms")
    weights = load_file(wrong / "model.safetensors")
    weights = {n: w / math.sqrt(STORED / TRUE) if "norm" in n else w for n, w in weights.items()}
    save_file(weights, wrong / "model.safetensors", metadata={"format": "pt"})
    assert float((logits(wrong) - before).abs().max() / before.abs().max()) > 1e-2


def test_unequal_logits_are_refused_and_nothing_is_written(tmp_path: Path):
    stored = padded(tmp_path / "stored", 2, tied=False)
    with pytest.raises(
        UserError, match=r"with 20 channels .* logits differ by .* expected at most tolerance"
    ):
        run(configured(stored, tmp_path / "run", "tolerance=1e-12"))
    assert not (tmp_path / "run" / "model").exists()


def test_rounded_norms_are_refused_with_a_remedy_that_works(tmp_path: Path):
    stored = padded(tmp_path / "stored", 2, tied=False, dtype=torch.bfloat16)
    with pytest.raises(
        UserError, match="norms' new weights were rounded, so store them with dtype=float32"
    ):
        run(configured(stored, tmp_path / "run"))
    compact = run(configured(stored, tmp_path / "run", "dtype=float32"))
    before = logits(stored)
    torch.testing.assert_close(
        logits(compact), before, rtol=1e-4, atol=1e-4 * float(before.abs().max())
    )


def test_compact_widths_are_multiples_of_the_heads(tmp_path: Path):
    stored = padded(tmp_path / "stored", 2, tied=False, channels=21)
    compact = run(configured(stored, tmp_path / "run"))
    assert json.loads((compact / "config.json").read_text())["hidden_size"] == 24
    before = logits(stored)
    torch.testing.assert_close(
        logits(compact), before, rtol=1e-4, atol=1e-4 * float(before.abs().max())
    )


def test_unpadded_checkpoints_are_refused(tmp_path: Path, tiny_target: Path):
    with pytest.raises(UserError, match="is not padded: 0 of its 32 residual channels are zero"):
        run(configured(tiny_target, tmp_path / "run"))
    almost = padded(tmp_path / "almost", 2, tied=False, channels=30)
    with pytest.raises(
        UserError,
        match="2 of its 32 .* too few to drop because 4 heads must divide the rest",
    ):
        run(configured(almost, tmp_path / "run"))
    written_late = padded(tmp_path / "late", 2, tied=False)
    weights = load_file(written_late / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][:, 0] = 1.0  # one layer writes to every channel
    save_file(weights, written_late / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="is not padded: 0 of its 32"):
        run(configured(written_late, tmp_path / "run"))


@pytest.mark.parametrize("tolerance", [-1.0, math.nan])
def test_a_tolerance_that_no_logits_keep_is_refused(tolerance: float, tmp_path: Path):
    config = configured(padded(tmp_path / "padded", 4, False), tmp_path / "run", "dry_run=true")
    run(config)  # control
    config.tolerance = tolerance
    with pytest.raises(UserError, match=f"tolerance is {tolerance}, expected a share of the large"):
        run(config)


def test_unsuitable_folders_are_refused(tmp_path: Path):
    stored = padded(tmp_path / "stored", 2, tied=False)
    pickled = shutil.copytree(stored, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"Convert them once: python scripts/to_safetensors\.py"):
        run(configured(pickled, tmp_path / "run"))
    convert(pickled)
    assert run(configured(pickled, tmp_path / "run")).is_dir()
    zeros = shutil.copytree(stored, tmp_path / "zeros")
    weights = {
        name: torch.zeros_like(tensor)
        for name, tensor in load_file(zeros / "model.safetensors").items()
    }
    save_file(weights, zeros / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="every weight is zero"):
        run(configured(zeros, tmp_path / "zeros_run"))
    other = shutil.copytree(stored, tmp_path / "other")
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('"llama"', '"qwen3"')
    )
    with pytest.raises(UserError, match="model_type is 'qwen3', expected 'llama'"):
        run(configured(other, tmp_path / "other_run"))


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    compact = run(
        configured(padded(tmp_path / "stored", 2, tied=False), tmp_path / "run", "dry_run=true")
    )
    assert "for zero channels and" in capsys.readouterr().out
    assert not compact.exists()
