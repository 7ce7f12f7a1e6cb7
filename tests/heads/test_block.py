"""Block drafters: the published equations, what a block sees, corrections, and training."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

import heads.train
from decoding import generate, load
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.settings import Settings
from heads import drafts_in_rows
from heads.block.drafter import BlockDrafter
from heads.block.kind import KIND as BLOCK
from heads.block.model import BlockHead, after
from heads.block.shape import spread_taps
from heads.layers import rope_at
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_heads_train import configured
from tests.support.block_heads import random_block
from tests.support.tiny_targets import hf_model, native_of, random_prompts
from training.data.packing import PackedBatch, Sample, collate
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.heads.positions import positions
from training.heads.temperatures import describe_calibration, read_temperatures

LATER = [
    pytest.param(name, marks=pytest.mark.long)
    for name in ("dflash", "domino", "dflash2", "jetspec", "specdiff")
]
SIZES = {"vocab_size": 61, "hidden_size": 16, "target_layers": 4}


def text(seed: int = 0, tokens: int = 24) -> Sample:
    ids = np.random.default_rng(seed).integers(0, 61, tokens).astype(np.int32)
    return Sample(ids, np.arange(tokens) > 3)


def features_of(head: BlockHead, batch: PackedBatch, **options: Any) -> dict[Any, Tensor]:
    """Return training's features by (place of the tip, depth)."""
    states = TargetStates(law_6.target().double(), taps=head.config.taps, final=False)
    where = positions(batch, head.config.num_drafts, False, context=True, **options)
    with torch.no_grad():
        found_NE = BLOCK.features(head, states, batch, where, states.read(batch, where))
    tips_N = (where.kept_P[where.drafts_M] + 1)[where.draft_N]
    keys = zip(tips_N.tolist(), where.head_N.tolist(), strict=True)
    return dict(zip(keys, found_NE, strict=True))


# ------------------------------------------------------------------------------- the backbone


@pytest.mark.parametrize("layout", ["fill_in", "anchor_first"])
@pytest.mark.parametrize("mask", ["bidirectional", "causal"])
def test_a_block_follows_the_published_equations(layout: str, mask: str):
    """Compare with plain loops over slots and heads, on weights under their published names."""
    head = random_block(SIZES, layout=layout, in_block_mask=mask, num_layers=2)
    config, w = head.config, head.state_dict()
    T, S, D = 5, config.block_size, config.head_dim
    taps_TX = torch.randn(T, 16, dtype=torch.float64)
    blocks_SH = torch.randn(S, 16, dtype=torch.float64)
    tables = head.rope_tables(T + S)
    context = head.context(taps_TX[None], rope_at(tables, torch.arange(T)[None]))
    rope = rope_at(tables, torch.arange(T, T + S)[None])
    visible = torch.ones(1, 1, T, dtype=torch.bool)
    found = head(blocks_SH[None, None], rope, after(context), visible)[0, 0]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (x.shape[-1],), w[name], config.norm_eps)

    def turned(x_D: Tensor, position: int) -> Tensor:
        half = D // 2
        angles = position * 10000.0 ** (-torch.arange(half).double() / half)
        a, b = x_D[:half], x_D[half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()))

    context_TH = norm(linear(taps_TX, w["fc.weight"]), "hidden_norm.weight")
    x_SH = blocks_SH
    for layer in range(2):
        at = f"layers.{layer}."
        y_SH = norm(x_SH, f"{at}input_layernorm.weight")
        both = torch.cat((context_TH, y_SH))
        queries = linear(y_SH, w[f"{at}self_attn.q_proj.weight"]).view(S, 4, D)
        keys = linear(both, w[f"{at}self_attn.k_proj.weight"]).view(T + S, 2, D)
        values = linear(both, w[f"{at}self_attn.v_proj.weight"]).view(T + S, 2, D)
        outputs = []
        for slot, number in itertools.product(range(S), range(4)):
            seen = range(T + slot + 1) if mask == "causal" else range(T + S)
            q = turned(norm(queries[slot, number], f"{at}self_attn.q_norm.weight"), T + slot)
            key_norm = f"{at}self_attn.k_norm.weight"
            scores = torch.stack(
                [q @ turned(norm(keys[j, number // 2], key_norm), j) / D**0.5 for j in seen]
            )
            outputs.append(scores.softmax(0) @ values[list(seen), number // 2])
        joined_SE = torch.stack(outputs).view(S, 4 * D)
        x_SH = x_SH + linear(joined_SE, w[f"{at}self_attn.o_proj.weight"])
        z_SH = norm(x_SH, f"{at}post_attention_layernorm.weight")
        gate, up = (linear(z_SH, w[f"{at}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        x_SH = x_SH + linear(silu(gate) * up, w[f"{at}mlp.down_proj.weight"])
    expected_SH = norm(x_SH, "norm.weight")
    torch.testing.assert_close(found, expected_SH[S - config.num_drafts :], atol=1e-6, rtol=0)


@pytest.mark.parametrize("layers", range(2, 40))
def test_taps_are_layers_of_the_target(layers: int):
    for count in range(1, 8):
        taps = spread_taps(count, layers)
        assert 1 <= len(taps) <= count and sorted(set(taps)) == list(taps)
        assert taps[0] >= 1 and taps[-1] < max(layers, 2)


def test_the_formula_of_the_taps_is_the_published_one():
    """Check against the published layers, whose numbers are those of outputs, one less."""
    assert spread_taps(5, 36) == (2, 10, 18, 26, 34)
    assert spread_taps(5, 32) == (2, 9, 16, 23, 30)
    assert spread_taps(5, 30) == (2, 9, 15, 21, 28)
    assert spread_taps(1, 36) == (19,)


# -------------------------------------------------------------------------- blocks in training


def test_other_blocks_texts_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    """Compare drafts of packed rows of different lengths with those of a text in its own row."""
    samples = [text(0), text(1, 20), text(2, 17)]
    head = random_block(SIZES)
    packed = features_of(head, collate(samples, [[0, 1], [2]], 48))
    for number, (row, start) in enumerate(((0, 0), (0, 24), (1, 0))):
        alone = features_of(head, collate(samples, [[number]], 48))
        assert len(alone) > 20
        for (tip, depth), each in alone.items():
            there = packed[row * 48 + start + tip, depth]
            torch.testing.assert_close(there, each, atol=1e-9, rtol=0)
    few = features_of(head, collate(samples, [[0, 1], [2]], 48), drafts_per_row=3, key=(0, 1))
    assert 0 < len({tip for tip, _ in few}) <= 6 < len({tip for tip, _ in packed})
    monkeypatch.setattr(drafts_in_rows, "SLOTS_AT_ONCE", 14)
    chunks = features_of(head, collate(samples, [[0, 1], [2]], 48))
    for place, each in few.items():
        torch.testing.assert_close(packed[place], each, atol=1e-9, rtol=0)
    for place, each in chunks.items():
        torch.testing.assert_close(packed[place], each, atol=1e-9, rtol=0)


def test_a_batch_without_drafts_depends_on_the_head():
    """Check that a rank without rows in a step still has gradients, of zero."""
    head = random_block(SIZES, correction="markov", rank=3).requires_grad_(True)
    states = TargetStates(law_6.target().double(), taps=(1,), final=False)
    batch = collate([text()], [], 48)
    where = positions(batch, 6, False, context=True)
    found_NE = BLOCK.features(head, states, batch, where, torch.zeros(0, 16).double())
    assert found_NE.shape == (0, 19) and found_NE.requires_grad


def test_the_slots_of_a_causal_block_ignore_later_slots():
    """Change the mask token's embedding: only the first slot, which precedes it, is unchanged."""
    same = {}
    for mask in ("bidirectional", "causal"):
        head = random_block(SIZES, layout="anchor_first", in_block_mask=mask)
        batch = collate([text()], [[0]], 48)
        plain = features_of(head, batch)
        head.config = replace(head.config, mask_token_id=5)
        other = features_of(head, batch)
        same[mask] = {depth for (_, depth) in plain} - {
            place[1] for place in plain if not torch.allclose(plain[place], other[place])
        }
    assert same == {"bidirectional": set(), "causal": {0}}


def test_own_tokens_replace_those_of_the_text():
    """Check that drafts with own tokens have the features of the chain that the head drafts."""
    head = random_block(SIZES, layout="anchor_first", correction="markov", rank=5)
    batch = collate([text()], [[0]], 48)
    true = features_of(head, batch)
    own = features_of(head, batch, own_tokens=1.0)
    first = [place for place in true if place[1] == 0]
    later = [place for place in true if place[1] > 0]
    assert all(torch.equal(true[place], own[place]) for place in first)
    assert any(not torch.allclose(true[place], own[place]) for place in later)


@pytest.mark.parametrize("correction", ["markov", "gru"])
def test_a_new_correction_changes_nothing(correction: str):
    """Check that corrected logits start as those of the same head without a correction."""
    plain = BlockHead(random_block(SIZES, layout="anchor_first").config)
    corrected = BlockHead(replace(plain.config, correction=correction, rank=4, gru_size=3))
    corrected.load_state_dict(plain.state_dict(), strict=False)
    assert corrected.correction is not None and not corrected.correction.weight.any()
    model = hf_model("llama", layers=4, vocab_size=61, hidden_size=16)
    target, settings = native_of(model), Settings(16, num_draft_tokens=6)
    traces = [
        [done.trace for done in decode(target, drafter, random_prompts(4), settings)]
        for drafter in (
            BlockDrafter(head=plain.double().requires_grad_(False)),
            BlockDrafter(head=corrected.double().requires_grad_(False)),
        )
    ]
    assert traces[0] == traces[1]


def test_the_confidence_learns_the_chance_of_acceptance():
    """Train only the confidence of a random head, and compare it with the chances."""
    row = next(row for row in HEAD_ROWS if row.name == "dspark")
    model = law_6.target()
    head, states = law_6.head_of(row, model), law_6.states_of(row, model)
    states = TargetStates(model, taps=states.layers, final=True)
    assert head.confidence is not None
    head.confidence.requires_grad_(True)
    loss = HeadLossConfig(name="forward_kl", predict_n_tokens=4)
    objective = HeadObjective(BLOCK, head, states, loss)
    batch = collate([text(seed) for seed in range(8)], [[seed] for seed in range(8)], 24)
    optimizer = torch.optim.Adam(head.confidence.parameters(), lr=3e-2)
    totals = []
    for _ in range(60):
        optimizer.zero_grad()
        total, sums = objective(batch)
        total.backward()
        optimizer.step()
        totals.append(float(total.detach() - sums[4:].sum()))  # without the loss of the tokens
    where, states_PC = objective.read_target(batch)
    with torch.no_grad():
        features_NE = BLOCK.features(head, states, batch, where, states.select_taps(states_PC))
        mean = float(head.confidence(features_NE).sigmoid().mean())
    acceptance = float(sums[:4].sum()) / len(features_NE)
    assert totals[-1] < totals[0] and abs(mean - acceptance) < 0.05


# ----------------------------------------------------------------------------------- the job


@pytest.mark.parametrize("name", ["dspark", *LATER])
def test_heads_are_trained_and_loaded_by_the_front_door(
    name: str, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Check that a trained head drafts, and that greedy output stays the target's."""
    given = [f"head={name}", f"target.path={tiny_target}", "head.rank=8", "head.num_layers=1"]
    given += ["head.gru_size=8", "head.confidence=true"]
    if name == "dspark":
        given += ["loss=forward_kl", "loss.own_tokens=0.5", "on_policy.share=0.5"]
    folder = heads.train.run(configured("heads.train", *given, f"output_dir={tmp_path / 'run'}"))
    card = json.loads((folder / "drafter_card.json").read_text())
    figure = "tree_block_efficiency" if name == "jetspec" else "chain_block_efficiency"
    assert card["acceptance"][figure] >= 1
    assert "target layers" in (folder / "README.md").read_text()
    assert BlockDrafter(folder).config.mask_token_id == 6  # the byte 0
    figures = json.loads((tmp_path / "run" / "manifest.json").read_text())["metrics"]
    fitted = read_temperatures(figures)
    # several passes are not calibrated
    assert (
        len(fitted) == (0 if name == "specdiff" else 7)
        and BlockDrafter(folder).config.temperatures == fitted
    )
    assert describe_calibration(figures) in capsys.readouterr().out
    plain = generate(load(tiny_target, dtype="float64"), "def add(a, b):", max_new_tokens=12)
    engine = load(tiny_target, {"use": str(folder), "by_cost": False}, dtype="float64")
    assert isinstance(engine.drafter, BlockDrafter)
    drafted = generate(engine, "def add(a, b):", max_new_tokens=12, stopping="fixed")
    assert drafted.tokens == plain.tokens and drafted.stats.tested > 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["head.taps=[9]"], "reads layer 9 of the target, expected a layer from 0"),
        (["head.taps=[4]"], "head.taps is .*4.*, expected different layers of the target from 0"),
        (
            ["head.mask_token_id=999999"],
            "head.mask_token_id is 999999, expected an id from 0 to 20",
        ),
        (["head.mask_token_id=2"], "head.mask_token_id is 2, expected .* that is no padding"),
        (["head.layout=first"], "head.layout is first, expected one of fill_in, anchor_first"),
        (["head.in_block_mask=full"], "expected one of bidirectional, causal"),
        (["head.correction=rnn"], "is rnn, expected one of none, markov, gru, selector"),
        (["loss.own_tokens=0.5"], "no draft reads its own tokens"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(given: list[str], words: str, tiny_target: Path):
    config = configured("heads.train", "head=dflash", f"target.path={tiny_target}", *given)
    with pytest.raises(UserError, match=words):
        heads.train.run(config)
