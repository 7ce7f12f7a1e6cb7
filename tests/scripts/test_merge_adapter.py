"""A merged LoRA adapter computes what base and adapter do; those of other bases are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.errors import UserError
from decoding.models.folder import WEIGHTS
from scripts.merge_adapter import base_of, merge, read_adapter
from tests.support import tiny_folders
from training.data.packing import Sample, collate
from training.models.build import load_causal_lm
from training.objectives import hidden_states

LAYERS = {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 64)}
RANK, ALPHA = 4, 6


def write_adapter(folder: Path, layers: int = 2, inputs: int = 0, **config: Any) -> Path:
    """Write a random adapter as PEFT does. inputs: of every layer; 0: those of the base."""
    folder.mkdir()
    torch.manual_seed(3)
    tensors = {}
    for number in range(layers):
        for name, (wide, narrow) in LAYERS.items():
            prefix = f"base_model.model.model.layers.{number}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, inputs or narrow) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(wide, RANK) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "base_model_name_or_path": "maker/base",
        "bias": "none",
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder


def logits(model: Any) -> torch.Tensor:
    sample = Sample(np.arange(24, dtype=np.int32), np.arange(24) > 0)
    with torch.no_grad():
        states = hidden_states(model, collate([sample], [[0]], 24))
        return model.lm_head(states)  # type: ignore[no-any-return]


def hooked(base: Path, adapter: Path, scale: float) -> Any:
    """Return the base model with the adapter's products added to its layers' outputs."""
    model = load_causal_lm(base, torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, module in model.named_modules():
        up = tensors.get(f"base_model.model.{name}.lora_B.weight")
        if up is not None:
            down = tensors[f"base_model.model.{name}.lora_A.weight"]

            def add(_: Any, given: Any, out: Any, up: Any = up, down: Any = down) -> Any:
                return out + scale * (given[0] @ down.T) @ up.T

            module.register_forward_hook(add)
    return model


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / math.sqrt(RANK)),
        ({"alpha_pattern": {"self_attn.q_proj|mlp.down_proj": 2}}, 2 / RANK),
    ],
)
def test_merged_equals_unmerged(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    base = tiny_folders.save(tmp_path / "base", layers=2)
    adapter = write_adapter(tmp_path / "adapter", **config)
    assert merge(read_adapter(adapter), base, tmp_path / "merged") == 4
    found = logits(load_causal_lm(tmp_path / "merged", torch.float32))
    torch.testing.assert_close(found, logits(hooked(base, adapter, scale)), rtol=1e-4, atol=1e-3)
    # the controls: another scale, and the base
    for other in (
        logits(hooked(base, adapter, 2 * scale)),
        logits(load_causal_lm(base, torch.float32)),
    ):
        assert (found - other).abs().max() > 0.1
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    origin = json.loads((tmp_path / "merged" / "merged_adapter.json").read_text())
    assert origin["base"] == "maker/base" and len(origin["adapter_hash"]) == 64


def test_whole_modules_replace_those_of_the_base(tmp_path: Path) -> None:
    base, adapter = (
        tiny_folders.save(tmp_path / "base", layers=2),
        write_adapter(tmp_path / "adapter"),
    )
    file = adapter / "adapter_model.safetensors"
    norm = torch.full((32,), 0.5)
    save_file({**load_file(file), "base_model.model.model.norm.weight": norm}, file)
    merge(read_adapter(adapter), base, tmp_path / "merged")
    assert torch.equal(load_file(tmp_path / "merged" / WEIGHTS)["model.norm.weight"], norm)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    base = tiny_folders.save(tmp_path / "base", layers=2)
    other = tiny_folders.save(tmp_path / "other", layers=2)
    adapter = read_adapter(write_adapter(tmp_path / "adapter"))
    with pytest.raises(UserError, match="is an adapter of maker/base, not of .*other"):
        base_of(adapter, str(other), renamed=False)
    assert base_of(adapter, str(base), renamed=False) == base
    assert base_of(adapter, str(other), renamed=True) == other
    deep = read_adapter(write_adapter(tmp_path / "deep", layers=3))
    with pytest.raises(UserError, match=r"layers.2.mlp.down_proj.weight .* has no such tensor"):
        merge(deep, base, tmp_path / "merged")
    wide = read_adapter(write_adapter(tmp_path / "wide", inputs=48))
    with pytest.raises(
        UserError, match=r"of the shape \[32, 48\],? and the base has one of the shape"
    ):
        merge(wide, base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base"),
        ({"lora_alpha": None}, "lora_alpha is None, expected a number"),
    ],
)
def test_other_adapters_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_adapter(write_adapter(tmp_path / "adapter", **config))


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: one for name, one in tensors.items() if "lora_B" not in name}, file)
    with pytest.raises(UserError, match=r"expected A \[r, inputs\] and B"):
        read_adapter(adapter)
    file.write_bytes(b"\0" * 20)
    with pytest.raises(UserError, match="damaged or incomplete"):
        read_adapter(adapter)
    file.unlink()
    with pytest.raises(UserError, match="has no adapter_model.safetensors"):
        read_adapter(adapter)
    whole = read_adapter(write_adapter(tmp_path / "whole"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        merge(whole, tiny_folders.save(tmp_path / "base", layers=2), tmp_path / "full")
