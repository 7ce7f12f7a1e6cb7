"""Masked diffusion in blocks: passes, random masks and their weights, folders, and bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, linear

import heads.train
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.settings import Settings
from heads.block.checkpoint import load_head
from heads.block.drafter import BlockDrafter
from heads.block.kind import KIND as BLOCK
from heads.block.layouts import SERVED as LAYOUT
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS, HeadRow
from tests.heads.test_block import text
from tests.heads.test_block_drafting import small_target
from tests.heads.test_block_folders import change, save
from tests.heads.test_heads_train import configured
from tests.support.block_heads import random_block, sizes_of
from training.data.packing import PackedBatch, Sample, collate
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig
from training.heads.masks import MASKED
from training.heads.objective import HeadObjective
from training.heads.positions import Positions, positions

SIZES = {"vocab_size": 61, "hidden_size": 16, "target_layers": 4}
ROW = next(row for row in HEAD_ROWS if row.name == "specdiff")
K = 4  # drafted tokens of the row's head


def in_steps(steps: int) -> HeadRow:
    """Return the row of a head that drafts in this number of passes."""
    return replace(ROW, shape=lambda target: replace(ROW.shape(target), denoising_steps=steps))


def masked(batch: PackedBatch, step: int = 0) -> Positions:
    return positions(batch, K, False, key=(0, step), context=True, random_masks=True)


# ------------------------------------------------------------------------------- the passes


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_every_pass_of_a_draft_is_a_forward_of_training(steps: int):
    """Denoise by plain loops over training's predictions, and compare with what is drafted."""
    row, model = in_steps(steps), law_6.target()
    head, states = law_6.head_of(row, model), law_6.states_of(row, model)
    drafted = [one for one in law_6.drafts(row.drafter(head), model) if len(one.tokens) > 1][:8]
    filled_early = 0
    for one in drafted:
        ids = np.asarray([*one.text, *[0] * K], dtype=np.int32)
        batch = collate([Sample(ids, np.arange(len(ids)) > 0)], [[0]], law_6.ROW)
        where = positions(batch, K, False, context=True)
        states_PC = states.select_taps(states.read(batch, where))
        (draft,) = (where.kept_P[where.drafts_M] == len(one.text) - 2).nonzero()[:, 0].tolist()
        filled, found = [MASKED] * K, [torch.empty(0)] * K
        for step in range(steps):
            filled_MK = torch.full((len(where.drafts_M), K), MASKED)
            filled_MK[draft] = torch.tensor(filled)
            given = replace(where, filled_MK=filled_MK)
            features_NE = BLOCK.features(head, states, batch, given, states_PC)
            q_NV = linear(features_NE, states.lm_head).softmax(-1)
            masks = [depth for depth in range(K) if filled[depth] == MASKED]
            for depth in masks:
                at = (where.draft_N == draft) & (where.head_N == depth)
                (found[depth],) = q_NV[at]
            masks.sort(key=lambda depth: -float(found[depth].max()))
            for depth in masks[: len(masks) - K + K * (step + 1) // steps]:
                filled[depth] = int(found[depth].argmax())
                filled_early += depth > min(masks)
        for depth, q_V in enumerate(one.q_KV):
            torch.testing.assert_close(found[depth], q_V, **law_6.CLOSE)
    assert filled_early, "some slots must be filled before earlier ones"


def test_the_law_rejects_one_pass_in_place_of_three():
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        law_6.check_training_equals_drafting(in_steps(3))


def test_the_chain_that_selects_checkpoints_is_drafted_in_several_passes():
    law_6.check_the_chain_is_real_decoding(in_steps(3))


def test_the_number_of_passes_can_be_chosen():
    target = small_target()
    head = random_block(sizes_of(target), taps=(0,), denoising_steps=3)
    settings = Settings(24, num_draft_tokens=6)

    def drafts(**options: Any) -> list[Any]:
        done = decode(target, BlockDrafter(head=head, **options), [[3, 4]], settings)
        return [each.trace for each in done]

    assert drafts() == drafts(denoising_steps=3) and BlockDrafter(head=head).width(9) == 6
    runs: list[int] = []
    head.layers[0].register_forward_hook(lambda *_: runs.append(1))
    for steps in (1, 2, 6):
        runs.clear()
        drafter = BlockDrafter(head=head, denoising_steps=steps)
        drafter.prepare(target, None)
        drafter.open([[3, 4]], None, 20)
        drafter.time_step()
        assert len(runs) == steps


# ------------------------------------------------------------------------------- random masks


def test_masked_slots_are_predicted_and_the_others_hold_the_text():
    samples = [text(0), text(1, 20)]
    batch = collate(samples, [[0, 1]], 48)
    where, ids, tips = masked(batch), batch.ids_RT[0], []
    assert where.filled_MK is not None and where.masked_N is not None
    for draft, filled in enumerate(where.filled_MK.tolist()):
        tip = int(where.kept_P[where.drafts_M[draft]]) + 1
        tips.append(tip)
        end = 24 if tip < 24 else 44
        depths = where.head_N[where.draft_N == draft].tolist()
        for depth, token in enumerate(filled):
            place = tip + 1 + depth
            assert token in (MASKED, int(ids[place]) if place < end else MASKED)
            supervised = bool(batch.host.supervised_RT[0, place - 1]) if place < end else False
            assert (depth in depths) == (supervised and token == MASKED)
    shares = (where.filled_MK == MASKED).float().mean(0)
    assert all(0.3 < share < 0.95 for share in shares.tolist())
    other = masked(batch, step=1).filled_MK
    assert not torch.equal(other, where.filled_MK), "masks are sampled anew in each step"
    new = torch.full((len(tips), K + 1), 7)
    assert set(where.with_tokens(new).filled_MK.unique().tolist()) == {MASKED, 7}


def test_a_slot_has_the_expected_weight_1():
    batch = collate([text(0)], [[0]], 24)
    plain = positions(batch, K, False, context=True)
    total: dict[tuple[int, int], float] = dict.fromkeys(
        zip(plain.draft_N.tolist(), plain.head_N.tolist(), strict=True), 0.0
    )
    steps = 300
    for step in range(steps):
        where = masked(batch, step)
        assert where.scale_N is None or (where.scale_N == 1).all()
        places = zip(where.draft_N.tolist(), where.head_N.tolist(), strict=True)
        for place, count in zip(places, where.masked_N.tolist(), strict=True):
            total[place] += K / count / steps
    assert all(0.75 < weight < 1.25 for weight in total.values())


def test_a_prediction_reads_the_filled_slots_and_no_masked_one():
    model = law_6.target()
    head, states = law_6.head_of(ROW, model), law_6.states_of(ROW, model)
    samples = [text(0)]
    batch = collate(samples, [[0]], 24)
    where = masked(batch)

    def features(sample: Sample) -> torch.Tensor:
        other = collate([sample], [[0]], 24)
        given = masked(other)
        return BLOCK.features(head, states, other, given, states.read(other, given))

    plain_NE = features(samples[0])
    seen = 0
    for draft, filled in list(enumerate(where.filled_MK.tolist()))[::6]:
        of_draft_N = where.draft_N == draft
        tip = int(where.kept_P[where.drafts_M[draft]]) + 1
        for depth, token in enumerate(filled):
            if tip + 1 + depth < 24 and of_draft_N.any():
                ids = samples[0].ids.copy()
                ids[tip + 1 + depth] = (ids[tip + 1 + depth] + 7) % 61
                found_NE = features(replace(samples[0], ids=ids))[of_draft_N]
                same = torch.allclose(found_NE, plain_NE[of_draft_N], atol=1e-6)
                assert same == (token == MASKED)
                seen += not same
    assert seen


def test_the_loss_is_weighted_by_the_mask_ratio():
    """Compare loss and gradients with those of a plain formula, by autograd."""
    model = law_6.target()
    head = law_6.head_of(ROW, model).requires_grad_(True)
    states = TargetStates(model, taps=(0,), final=False)
    loss = HeadLossConfig("cross_entropy", predict_n_tokens=K)
    objective = HeadObjective(BLOCK, head, states, loss)
    batch = collate([text(0), text(1)], [[0], [1]], 24)
    objective.step = 5
    total, _ = objective(batch)
    total.backward()
    gradients = {name: each.grad.clone() for name, each in head.named_parameters()}
    head.zero_grad()
    where, states_PC = objective.read_target(batch)
    features_NE = BLOCK.features(head, states, batch, where, states_PC)
    losses_N = cross_entropy(linear(features_NE, states.lm_head), where.labels_N, reduction="none")
    for draft, filled in enumerate(where.filled_MK.tolist()):
        place = int(where.kept_P[where.drafts_M[draft]]) % 24 + 2
        if place + K <= 24:  # slots past the text are masked, but do not count
            assert all(where.masked_N[where.draft_N == draft] == filled.count(MASKED))
    expected = (losses_N * K / where.masked_N).sum()
    expected.backward()
    torch.testing.assert_close(total, expected)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------- folders, bad input


def test_a_folder_names_what_no_server_reads(tmp_path: Path):
    made = random_block(SIZES, taps=(0,), denoising_steps=3)
    folder = save(made, tmp_path / "head")
    options = json.loads((folder / "config.json").read_text())["dflash_config"]
    assert (options["target_layer_ids"], options["denoising_steps"]) == ([-1], 3)
    assert load_head(folder, torch.float64).config == made.config
    assert LAYOUT.extensions(made.config) == [
        "blocks that are filled in 3 passes",
        "the target's embedding (target_layer_ids -1) among the layers",
    ]
    assert not made.config.is_dflash and random_block(SIZES).config.is_dflash


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ({}, {"taps": None}, "target_layer_ids is .*-1.*, expected different layers from 0"),
        ({}, {"denoising_steps": 0}, "denoising_steps is 0, expected a whole number of 1"),
        ({}, {"denoising_steps": 7}, "denoising_steps is 7, expected at most 6"),
        ({"sample_from_anchor": True}, {}, "denoising_steps is 3, expected .* sample_from_anchor"),
        (
            {},
            {"projector_type": "dspark", "markov_rank": 3},
            "denoising_steps is 3, expected .* projector_type dflash",
        ),
    ],
    ids=str,
)
def test_inconsistent_folders_are_refused(
    values: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
):
    folder = save(random_block(SIZES, taps=(0,), denoising_steps=3), tmp_path / "head")
    change(folder, values, options)
    with pytest.raises(UserError, match=words):
        load_head(folder)


@pytest.mark.parametrize(
    ("own", "given", "words"),
    [
        (0, 2, "denoising_steps is 2, but its head was trained on masks alone; expected 1"),
        (3, 7, "denoising_steps is 7, expected 1 to 6, the number of tokens of its blocks"),
        (3, 0, "denoising_steps is 0, expected 1 to 6"),
        (3, "all", "denoising_steps is 'all', expected 1 to 6"),
    ],
)
def test_a_number_of_passes_that_does_not_fit_is_refused(own: int, given: Any, words: str):
    with pytest.raises(UserError, match=words):
        BlockDrafter(head=random_block(SIZES, denoising_steps=own), denoising_steps=given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["head.denoising_steps=8"], "head.denoising_steps is 8, expected 1 to 7, the number of"),
        (["head.layout=anchor_first"], "head.denoising_steps is 2, expected 0 with head.layout="),
        (["loss.depth_weights=d_pace"], "loss.depth_weights is d_pace, expected decay with head"),
        (["head.correction=gru"], "head.denoising_steps is 2, expected 0 with .*correction=gru"),
        (["on_policy.share=0.5"], "none of whose predictions reads a token that it drafts"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(given: list[str], words: str, tiny_target: Path):
    config = configured("heads.train", "head=specdiff", f"target.path={tiny_target}", *given)
    with pytest.raises(UserError, match=words):
        heads.train.run(config)
