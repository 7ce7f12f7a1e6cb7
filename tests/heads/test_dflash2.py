"""DFlash2: the published equations of its convolution and selector, its loss, and its folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear

import heads.train
from decoding.drafters.registry import head_of
from decoding.errors import UserError
from heads.block.checkpoint import load_head
from heads.block.convolution import BlockConvolution
from heads.block.corrections import Selector
from heads.block.kind import KIND as BLOCK
from heads.block.layouts import SERVED as LAYOUT
from heads.block.model import BlockHead
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_block import features_of, text
from tests.heads.test_block_folders import change, save
from tests.heads.test_heads_train import configured
from tests.support.block_heads import random_block
from training.data.packing import collate
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective

SIZES = {"vocab_size": 61, "hidden_size": 16, "target_layers": 4}
FIELDS: dict[str, Any] = {
    "correction": "selector",
    "rank": 4,
    "candidates": 5,
    "conv_taps": 2,
    "conv_group": 4,
}
ROW = next(row for row in HEAD_ROWS if row.name == "dflash2")


def test_the_convolution_follows_the_published_equation():
    """Compare with plain loops over slots and channels, of two blocks."""
    layer: Any = random_block(SIZES, **FIELDS, block_size=3).layers[0]
    convolution: BlockConvolution = layer.mlp_conv
    base, projection = convolution.base_kernel, convolution.kernel_projection.weight
    x_NH = torch.randn(6, 16, dtype=torch.float64)
    given: list[Tensor] = []

    def double(y_BNH: Tensor) -> Tensor:
        given.append(y_BNH[0])
        return 2 * y_BNH

    def mixed(y_NH: Tensor, side: int) -> Tensor:
        found = torch.zeros_like(y_NH)
        for slot in range(6):
            delta = linear(x_NH[slot], projection).view(2, 2, 4)[side]
            for channel in range(16):
                for tap in range(2):
                    if slot % 3 >= tap:
                        weight = base[side, tap, channel] + delta[tap, channel // 4]
                        found[slot, channel] += weight * y_NH[slot - tap, channel]
        return found

    found_NH = convolution(x_NH[None], double)[0]
    torch.testing.assert_close(given[0], mixed(x_NH, 0), atol=1e-9, rtol=0)
    torch.testing.assert_close(found_NH, mixed(2 * mixed(x_NH, 0), 1), atol=1e-9, rtol=0)


def test_the_selector_follows_the_published_equation():
    """Compare with a plain loop over the likeliest tokens of a slot."""
    selector = random_block(SIZES, **FIELDS).correction
    assert isinstance(selector, Selector)
    logits_V = torch.randn(61, dtype=torch.float64)
    hidden_H = torch.randn(16, dtype=torch.float64)
    state = selector.advance(None, torch.tensor([7]), lambda ids: torch.empty(0))
    features = selector.features(hidden_H[None], state, 2)
    found_V = selector.correct(logits_V[None], features)[0]
    expected_V = torch.full((61,), float("-inf"), dtype=torch.float64)
    projected = selector.hidden_projection.weight @ hidden_H
    for token in logits_V.argsort(descending=True)[:5]:
        pair = selector.predecessor_codebook[7] * projected * selector.successor_codebook[token]
        expected_V[token] = logits_V[token] + pair.sum()
    torch.testing.assert_close(found_V, expected_V, atol=1e-9, rtol=0)


def test_a_new_head_predicts_like_dflash():
    """Check that a new convolution and a new selector change no logits of the candidates."""
    plain = BlockHead(random_block(SIZES).config)
    new = BlockHead(replace(plain.config, **FIELDS))
    new.load_state_dict(plain.state_dict(), strict=False)
    batch = collate([text()], [[0]], 48)
    found, changed = [], random_block(SIZES, **FIELDS)
    changed.load_state_dict(plain.state_dict(), strict=False)
    for head in (plain, new, changed):
        features = features_of(head.double().requires_grad_(False), batch)
        found.append(torch.stack([each[:16] for each in features.values()]))
    torch.testing.assert_close(found[1], found[0])
    assert new.correction is not None and not new.correction.weight.any()
    assert not torch.allclose(found[2], found[0]), "a random convolution matters"


def test_the_loss_has_a_term_of_the_candidates():
    """Compare loss and gradients with those of plain formulas, by autograd."""
    model = law_6.target()
    head = law_6.head_of(ROW, model).requires_grad_(True)
    head.correction.successor_codebook.data.mul_(300)  # it changes which candidate is first
    states = TargetStates(model, taps=head.config.taps, final=False)
    loss = HeadLossConfig("cross_entropy", predict_n_tokens=4)
    objective = HeadObjective(BLOCK, head, states, loss)
    batch = collate([text(0), text(1)], [[0], [1]], 24)
    total, sums = objective(batch)
    total.backward()
    gradients = {name: each.grad.clone() for name, each in head.named_parameters()}

    head.zero_grad()
    where, states_PC = objective.read_target(batch)
    features_NE = BLOCK.features(head, states, batch, where, states.select_taps(states_PC))
    logits_NV = linear(features_NE[:, :16], states.lm_head)
    candidates_NC = logits_NV.topk(5).indices
    listed_NCE = embedding(candidates_NC, head.correction.successor_codebook)
    scores_NC = logits_NV.gather(1, candidates_NC)
    scores_NC = scores_NC + (features_NE[:, None, 16:] * listed_NCE).sum(-1)
    same_NC = candidates_NC == where.labels_N[:, None]
    known_N = same_NC.any(1)
    assert 0 < known_N.sum() < len(known_N), "some tokens must be candidates, and others not"
    first = cross_entropy(logits_NV, where.labels_N, reduction="sum")
    among = cross_entropy(scores_NC[known_N], same_NC.long().argmax(1)[known_N], reduction="sum")
    (first + among).backward()
    torch.testing.assert_close(total, first + among)
    torch.testing.assert_close(sums[4:8].sum(), first + among)
    right = (scores_NC.argmax(1) == same_NC.long().argmax(1)) & known_N
    base = logits_NV.argmax(1) == where.labels_N
    figures = dict(zip(objective.metric_names, sums.tolist(), strict=True))
    for k in range(4):
        assert figures[f"block{k}_top1"] == int(right[where.head_N == k].sum())
        assert figures[f"block{k}_base_top1"] == int(base[where.head_N == k].sum())
    assert not torch.equal(right, base), "control: the selector changes predictions"
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["forward_kl", "tv", "lk"])
def test_losses_against_the_target_fall(name: str):
    model = law_6.target()
    head = law_6.head_of(ROW, model).requires_grad_(True)
    states = TargetStates(model, taps=head.config.taps, final=True)
    loss = HeadLossConfig(name=name, predict_n_tokens=4, depth_weights="d_pace")
    objective = HeadObjective(BLOCK, head, states, loss)
    batch = collate([text(0), text(1)], [[0], [1]], 24)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    accepted = []
    for _ in range(25):
        optimizer.zero_grad()
        total, sums = objective(batch)
        total.backward()
        optimizer.step()
        accepted.append(float(sums[:4].sum()))
    assert accepted[-1] > 1.5 * accepted[0]


def test_a_folder_has_the_published_names(tmp_path: Path):
    made = random_block(SIZES, **FIELDS)
    folder = save(made, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    sizes = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 5}
    assert sizes.items() <= config["dflash_config"].items()
    assert config["sample_from_anchor"] is False and LAYOUT.extensions(made.config) == []
    state = load_file(folder / "model.safetensors")
    assert state["candidate_selector.predecessor_codebook"].shape == (61, 4)
    assert state["candidate_selector.successor_codebook"].shape == (61, 4)
    assert state["candidate_selector.hidden_projection.weight"].shape == (4, 16)
    assert state["layers.0.attention_conv.base_kernel"].shape == (2, 2, 16)
    assert state["layers.1.mlp_conv.kernel_projection.weight"].shape == (16, 16)
    change(folder, {}, {"projector_type": None})
    back = load_head(folder, torch.float64)
    assert back.config == made.config and head_of(folder) == "block"
    assert all(torch.equal(back.state_dict()[name], t) for name, t in made.state_dict().items())


def test_forms_that_no_server_reads_are_named():
    shape = random_block(SIZES, **FIELDS).config
    apart = replace(shape, conv_taps=0, confidence=True, layout="anchor_first")
    assert LAYOUT.extensions(apart) == [
        "a confidence head that reads the features of a selector",
        "a selector without a convolution",
        "a selector in blocks whose first slot predicts too",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"conv_group_size": 5}, "conv_group_size is 5, expected a divisor of hidden_size 16"),
        ({"conv_group_size": None}, "conv_group_size is None, expected a whole number of 1"),
        ({"conv_kernel_size": None}, r"attention_conv\.base_kernel is unknown"),
        ({"conv_kernel_size": 3}, r"base_kernel has the shape \[2, 2, 16\], expected \[2, 3"),
        ({"selector_rank": 3}, r"codebook has the shape \[61, 4\], expected \[61, 3\]"),
        ({"selector_top_k": 0}, "selector_top_k is 0, expected a whole number of 1 or more"),
        ({"output_multiplier": 0.5}, "output_multiplier is 0.5, which this project does not read"),
    ],
    ids=str,
)
def test_inconsistent_folders_are_refused(options: dict[str, Any], words: str, tmp_path: Path):
    folder = save(random_block(SIZES, **FIELDS), tmp_path / "head")
    change(folder, {}, options)
    with pytest.raises(UserError, match=words):
        load_head(folder)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["head.candidates=1"], "head.candidates is 1, expected 2 to"),
        (["head.conv_taps=9"], "head.conv_taps is 9, expected 1 to 8, the slots of a block"),
        (["head.conv_group=5"], "head.conv_group is 5, expected a divisor of"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(given: list[str], words: str, tiny_target: Path):
    config = configured("heads.train", "head=dflash2", f"target.path={tiny_target}", *given)
    with pytest.raises(UserError, match=words):
        heads.train.run(config)
