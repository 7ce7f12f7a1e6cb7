"""Fusion of the target's states in block drafters: equations, gradients, folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import heads.train
from decoding.errors import UserError
from decoding.models.native.rope import rotate
from heads.block.checkpoint import load_head
from heads.block.kind import KIND as BLOCK
from heads.block.model import BlockHead
from heads.export import export
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_block_folders import change, save
from tests.heads.test_heads_train import configured
from tests.support import tiny_heads as tiny
from tests.support.block_heads import random_block
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective

SIZES = {"vocab_size": 11, "hidden_size": 6, "target_layers": 4}
FUSIONS = ("fc", "per_layer", "both")
of_fusions = pytest.mark.parametrize("fusion", FUSIONS)


def block(fusion: str, **fields: Any) -> BlockHead:
    return random_block(SIZES, fusion=fusion, taps=(1, 3), num_layers=2, **fields)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@of_fusions
def test_the_context_follows_the_published_equations(fusion: str):
    """Compare the keys and values of a text with the equations, on weights by their names."""
    head = block(fusion)
    w, eps, T, D = head.state_dict(), head.config.norm_eps, 5, head.config.head_dim
    first, second = torch.randn(2, T, 6, dtype=torch.float64).unbind()
    rope = tuple(each[:T] for each in head.rope_tables(T))
    found = head.context(torch.cat((first, second), -1)[None], rope)
    for layer, (keys, values) in enumerate(found):
        c = torch.zeros(T, 6, dtype=torch.float64)
        if fusion != "per_layer":
            c = c + torch.cat((first, second), -1) @ w["fc.weight"].T
        if fusion != "fc":
            a, b = w["fusion.layer_fusion_weights"][layer].softmax(-1)
            c = c + a * first + b * second
        c = normed(c, w["hidden_norm.weight"], eps)
        end = "_target" if fusion == "per_layer" else ""
        of = f"layers.{layer}.self_attn"
        expected = c @ w[f"{of}.v_proj{end}.weight"].T
        torch.testing.assert_close(values[0].transpose(0, 1).flatten(1), expected)
        k = (c @ w[f"{of}.k_proj{end}.weight"].T).unflatten(-1, (-1, D))
        k = rotate(normed(k, w[f"{of}.k_norm.weight"], eps), *rope)
        torch.testing.assert_close(keys[0].transpose(0, 1), k)


@pytest.mark.parametrize("name", ["fusion per layer", "fusion both", "dflash"])
def test_a_step_of_training_reaches_every_weight_of_a_fusion(name: str):
    """Check the gradient of each fusion's weights; the control has none of a mixture."""
    row = next(row for row in HEAD_ROWS if row.name == name)
    model = law_6.target()
    head = law_6.head_of(row, model).requires_grad_(True).train()
    loss = HeadLossConfig("cross_entropy", predict_n_tokens=4)
    total, _ = HeadObjective(BLOCK, head, law_6.states_of(row, model), loss)(
        tiny.packed(tiny.samples())
    )
    total.backward()
    found = {
        part: [each for name, each in head.named_parameters() if part in name]
        for part in ("layer_fusion_weights", "fc.weight", "_proj_target")
    }
    counts = {part: len(each) for part, each in found.items()}
    expected = {"fusion per layer": (1, 0, 4), "fusion both": (1, 1, 0), "dflash": (0, 1, 0)}
    assert tuple(counts.values()) == expected[name]
    for part, weights in found.items():
        assert all(each.grad is not None and each.grad.any() for each in weights), part


@of_fusions
def test_a_folder_keeps_its_fusion(fusion: str, tmp_path: Path):
    made = block(fusion)
    folder = save(made, tmp_path / "head")
    loaded = load_head(folder, torch.float64)
    assert loaded.config == made.config
    state, names = loaded.state_dict(), {*load_file(folder / "model.safetensors")}
    assert all(torch.equal(state[name], each) for name, each in made.state_dict().items())
    assert ("layer_fusion_weights" in names) == (fusion != "fc")
    options = json.loads((folder / "config.json").read_text())["dflash_config"]
    assert options.get("fusion", "fc") == fusion
    if fusion == "fc":
        export(folder, "speculators", tmp_path / "out")  # control
        return
    with pytest.raises(UserError, match=f"fusion {fusion}, each layer's own mixture"):
        export(folder, "speculators", tmp_path / "out")


def test_a_folder_with_another_fusion_is_refused(tmp_path: Path):
    folder = save(block("both"), tmp_path / "head")
    change(folder, {}, {"fusion": "per_layer"})
    with pytest.raises(UserError, match="fc.weight is unknown|_target.weight is missing"):
        load_head(folder)
    change(folder, {}, {"fusion": "all"})
    with pytest.raises(UserError, match="fusion is 'all', expected one of fc, per_layer, both"):
        load_head(folder)
    config = configured("heads.train", "head=dflash", "target=embedded", "head.fusion=all")
    with pytest.raises(UserError, match="head.fusion is all, expected one of fc, per_layer, both"):
        heads.train.run(config)
