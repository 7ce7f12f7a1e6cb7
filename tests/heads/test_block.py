"""Block drafters: the published equations, what a block sees, corrections, trees, and training."""

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
from decoding.drafters.with_lookup import LookupFirst
from decoding.errors import UserError
from decoding.interfaces import Drafter, RoundCosts
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from heads import drafts_in_rows
from heads.block.confidence import count_kept
from heads.block.context import StoredContext
from heads.block.drafter import BlockDrafter
from heads.block.kind import KIND as BLOCK
from heads.block.model import BlockHead, after
from heads.block.shape import spread_taps
from heads.block.tree import TreePlanner
from heads.layers import rope_at
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_heads_train import configured
from tests.support.block_heads import random_block, sizes_of
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


# ---------------------------------------------------------------------------------- drafting


def small_target(**changes: Any) -> NativeTarget:
    return native_of(hf_model("llama", layers=2, **changes))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "bush"}, "shape is 'bush', expected tree or chain"),
        ({"children": "drawn"}, "children is 'drawn'"),
        ({"max_nodes": 0}, "max_nodes is 0, expected 1 or more"),
        ({"stop_below": 0.5}, "stop_below is 0.5, expected 0, or a chance below 1 if its head"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        BlockDrafter(head=random_block(SIZES), **options)


def test_a_tree_of_a_corrected_head_is_refused():
    head = random_block(SIZES, correction="markov", rank=3)
    with pytest.raises(UserError, match="has a markov correction, whose distributions differ"):
        BlockDrafter(head=head, shape="tree")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48}, "hidden size of 32, but"),
        ({"vocab_size": 50}, "vocabulary of 48, but"),
        ({"layers": 3}, "reads a target of 2 layers, but 'in-memory' has 3"),
    ],
    ids=str,
)
def test_a_head_of_another_target_is_refused(changes: dict[str, Any], words: str):
    drafter = BlockDrafter(head=random_block(sizes_of(small_target())))
    other = native_of(hf_model("llama", **{"layers": 2, **changes}))
    with pytest.raises(UserError, match=words):
        decode(other, drafter, [[3, 4]], Settings(4))


def test_a_tap_beyond_the_target_is_refused():
    head = random_block(sizes_of(small_target()))
    head.config = replace(head.config, taps=(3,))
    with pytest.raises(UserError, match="taps holds 3, expected layers of"):
        decode(small_target(), BlockDrafter(head=head), [[3, 4]], Settings(4))


def test_a_draft_longer_than_the_block_ends_with_it():
    head = random_block(sizes_of(small_target()))
    drafter = BlockDrafter(head=head)
    done = decode(small_target(), drafter, [[3, 4]], Settings(40, num_draft_tokens=9))[0]
    assert drafter.width(9) == 6 and len(done.tested_by_depth) <= 6
    assert done.drafted >= 6 * (done.rounds - 7)


def test_a_confident_draft_ends_where_it_stops_to_pay():
    assert count_kept([0.9, 0.9, 0.1, 0.9], 0.0, None) == 4
    assert count_kept([0.9, 0.9, 0.1, 0.9], 0.5, None) == 2
    assert count_kept([0.4, 0.9], 0.5, None) == 0
    steep = RoundCosts(0.5, tuple(1 + 0.4 * n for n in range(6)))
    assert count_kept([0.9, 0.9, 0.1, 1.0], 0.0, steep) == 2
    flat = RoundCosts(0.5, (1.0,) * 6)
    assert count_kept([0.9, 0.9, 0.1, 1.0], 0.0, flat) == 4


@pytest.mark.parametrize("later", [0.0, 0.3, 0.6, 1.0])
def test_a_token_is_kept_whatever_the_later_confidences(later: float):
    """Check that no decision depends on a confidence that has seen the token.

    These costs have a step, over which a search of the best length would look.
    """
    stepped = RoundCosts(0.1, (1.0, 1.9, 2.0, 2.0, 2.0))
    assert count_kept([0.6, later, later, later], 0.0, stepped) == 0


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


def test_a_block_is_written_after_the_stored_context_and_nothing_is_copied():
    head = random_block(SIZES)
    context = StoredContext(head, 2, 20)
    context.append(torch.randn(2, 9, 16, dtype=torch.float64), [9, 4])
    first, second = (torch.full((2, 2, 7, 4), value, dtype=torch.float64) for value in (1.0, 2.0))
    keys, values = context.join(0, (first, first))
    text = keys[:, :, :9].clone()
    again, _ = context.join(0, (second, second))
    assert again.data_ptr() == keys.data_ptr() and keys.shape == values.shape == (2, 2, 16, 4)
    assert torch.equal(keys[:, :, 9:], second) and torch.equal(keys[:, :, :9], text)


def passes_of(
    drafter: BlockDrafter, rounds: int, costs: RoundCosts, **more: Any
) -> tuple[int, int]:
    """Return the passes and the drafted tokens of a text of so many rounds."""
    passes: list[int] = []
    count = drafter.head.register_forward_hook(lambda *_: passes.append(1))
    settings = Settings(rounds, num_draft_tokens=3, costs=costs, temperature=1.0, **more)
    (done,) = decode(small_target(), drafter, [[3, 4]], settings)
    count.remove()
    return len(passes), done.drafted


def test_no_tree_is_drafted_if_none_pays():
    """Check that trees that do not pay cost no passes, and that a useless head soon pauses."""
    head = random_block(sizes_of(small_target()), in_block_mask="causal")
    by_cost = BlockDrafter(head=head, shape="tree", by_cost=True)
    flat = RoundCosts(0.3, (1.0,) * 40)
    assert passes_of(by_cost, 60, RoundCosts(9.0, (1.0, 2.0))) == (0, 0)
    passes, drafted = passes_of(by_cost, 60, flat)
    assert 0 < passes < 30 and drafted > 0, "it pauses, as hardly a token is accepted"
    fixed = BlockDrafter(head=head, shape="tree")
    assert passes_of(fixed, 60, flat)[0] > 50, "the control"


def test_a_pass_whose_tokens_are_dropped_counts():
    """Check a confidence that keeps no token: the stopping rule learns what its passes cost."""
    head = random_block(sizes_of(small_target()), correction="markov", rank=4, confidence=True)
    assert head.confidence is not None
    head.confidence.proj.weight.zero_()
    head.confidence.proj.bias.fill_(-20.0)
    drafter, costs = BlockDrafter(head=head, stop_below=0.5), RoundCosts(0.3, (1.0,) * 9)
    passes, drafted = passes_of(drafter, 100, costs)
    assert drafted == 0 < passes < 50
    fixed = BlockDrafter(head=head, stop_below=0.5)
    assert passes_of(fixed, 100, costs, stopping="fixed")[0] > 90, "the control"


@pytest.mark.parametrize("before", [False, True])
def test_trees_by_cost_work_where_a_round_asks_for_none(before: bool):
    """Check texts of one token, rows that end and rows that a lookup drafts for."""
    head = random_block(sizes_of(small_target()), in_block_mask="causal")
    drafter: Drafter = BlockDrafter(head=head, shape="tree", by_cost=True)
    if before:
        drafter = LookupFirst(drafter, min_match=1)
    costs = RoundCosts(0.3, (1.0,) * 40)
    for tokens in (1, 2, 30):
        prompts = [[3, 4, 3, 4, 3, 4], [5], [8, 9, 10]]
        settings = Settings(tokens, num_draft_tokens=3, costs=costs, stop_token_ids=(7, 11))
        drafted, plain = (decode(small_target(), one, prompts, settings) for one in (drafter, None))
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_a_small_tree_that_is_always_accepted_keeps_paying():
    """Check that only the levels of a tree count as tested."""
    planner = TreePlanner(1)
    costs = RoundCosts(0.7, tuple(1 + 0.1 * n for n in range(9)))
    planner.open(1, costs)
    sure = torch.full((1, 3, 61), -20.0)
    sure[:, :, 5] = 20.0
    chooser = TokenChooser(Warper(0.0, 0, 1.0, 0.0), "greedy", 0, 61, torch.device("cpu"))
    for _ in range(40):
        (depth,) = planner.depths([3])
        assert depth == 3
        assert planner.proposal(sure, [depth], chooser).counts_B == [1]
        planner.learn([1])


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
