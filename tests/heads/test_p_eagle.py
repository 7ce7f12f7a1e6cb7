"""P-EAGLE heads: mask elements, the sampling of depths in training, the layout, and drafting."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import heads.train
from decoding import generate, load
from decoding.drafters.registry import head_of
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.settings import Settings
from heads.eagle.checkpoint import load_head
from heads.eagle.drafter import EagleDrafter
from heads.eagle.drafts import Drafts
from heads.eagle.kind import PARALLEL
from heads.eagle.parallel import ParallelEagleDrafter
from tests.decoding.row_kinds.eagle import random_parallel_eagle
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_eagle import ROPE, random_head, reference, save
from tests.heads.test_heads_train import configured
from tests.support.tiny_targets import hf_model, native_of, random_prompts
from training.data.packing import Sample, collate
from training.heads.loss_config import HeadLossConfig, depth_shares
from training.heads.objective import HeadObjective
from training.heads.positions import positions

MASKED = {"parallel": 4, "mask_token_id": 10}


@pytest.mark.parametrize("by_depth", [False, True], ids=["p_eagle", "parallelspec"])
def test_mask_elements_follow_the_published_equations(by_depth: bool):
    """Compare all drafts of two packed texts with drafts that read one element after another."""
    head = random_head(**MASKED, masks_by_depth=by_depth).double()
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=4, max_position_embeddings=64, rope_parameters=ROPE
    )
    rotary = LlamaRotaryEmbedding(config)
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(11, 8, generator=generator, dtype=torch.float64)
    texts = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3]]
    samples = [Sample(np.asarray(ids, np.int32), np.ones(len(ids), bool)) for ids in texts]
    batch = collate(samples, [[0, 1]], 12)
    states_RTC = torch.randn(1, 12, 24, generator=generator, dtype=torch.float64)
    tips_M = torch.tensor([1, 3, 7, 8])
    drafts = Drafts(head, batch, embedding[batch.ids_RT], states_RTC, tips_M, 3)
    assert head.mask_hidden is not None
    for step in range(3):
        tips_MH = embedding[batch.ids_RT[0, tips_M]]
        found_MH = drafts.advance_masked(embedding[10]) if step else drafts.advance(tips_MH)
        for m, tip in enumerate(tips_M.tolist()):
            start = 0 if tip < 6 else 6
            ids = [*batch.ids_RT[0, start + 1 : tip + 1].tolist(), *[10] * step]
            masks_SC = head.mask_hidden[0, :step].expand(step, -1)
            states_TC = torch.cat((states_RTC[0, start:tip], masks_SC))
            expected_H = reference(head, rotary, embedding[ids], states_TC, step)
            torch.testing.assert_close(found_MH[m], expected_H, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------- training of few depths


def text(tokens: int = 48) -> Sample:
    ids = np.random.default_rng(0).integers(0, 61, tokens).astype(np.int32)
    return Sample(ids, np.arange(tokens) > 0)


def test_deeper_tokens_train_in_fewer_drafts():
    """Check that the drafts of a depth are some of those of the depth before, new in each step."""
    batch = collate([text(400)], [[0]], 400)
    shares = depth_shares(HeadLossConfig(depth_share=0.7, least_depth_share=0.3), 6)
    assert shares == pytest.approx([1, 0.7, 0.49, 0.343, 0.3, 0.3])
    kept = []
    for step in range(2):
        where = positions(batch, 6, False, key=(0, step), context=True, shares_K=shares)
        pairs = zip(where.draft_N.tolist(), where.head_N.tolist(), strict=True)
        kept.append([set() for _ in range(6)])
        for draft, depth in pairs:
            kept[-1][depth].add(draft)
    everything = positions(batch, 6, False, context=True).counts_K
    for at in kept:
        assert all(later <= earlier for earlier, later in pairwise(at))
        for one, all_drafts, share in zip(at, everything, shares, strict=True):
            assert len(one) == pytest.approx(share * all_drafts, abs=30)
    assert kept[0][0] == kept[1][0] and kept[0][3] != kept[1][3]


def test_figures_of_few_drafts_are_those_of_all():
    """Check that the sums by depth estimate those of all drafts, and that depths weigh less."""
    row = next(row for row in HEAD_ROWS if row.name == "p_eagle")
    model = law_6.target()
    head, states = law_6.head_of(row, model), law_6.states_of(row, model)
    batch = collate([text(400)], [[0]], 400)
    sums, totals = [], []
    for share in (1.0, 0.6):
        loss = HeadLossConfig("cross_entropy", predict_n_tokens=4, depth_share=share)
        total, found = HeadObjective(PARALLEL, head, states, loss)(batch)
        sums.append(found)
        totals.append(float(total))
    torch.testing.assert_close(sums[1][4:], sums[0][4:], rtol=0.1, atol=0.0)
    assert float(sums[1][4]) == pytest.approx(float(sums[0][4]))
    assert totals[1] == pytest.approx(totals[0], rel=0.1)


# ------------------------------------------------------------------------------------- the layout


def test_a_folder_has_what_servers_read(tmp_path: Path):
    head = random_head(**MASKED)
    folder = save(head, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    architectures = config["architectures"]
    assert architectures == ["LlamaForCausalLMEagle3", "PeagleLlamaForCausalLM"]
    assert (config["pard_token"], config["num_parallel_tokens"]) == (10, 4)
    assert load_file(folder / "model.safetensors")["mask_hidden"].shape == (1, 1, 24)
    back = load_head(folder)
    assert back.config == head.config and head_of(folder) == "p_eagle"
    (folder / "config.json").write_text(json.dumps(config | {"architectures": architectures[1:]}))
    assert load_head(folder).config == head.config and head_of(folder) == "p_eagle"
    assert all(torch.equal(back.state_dict()[name], t) for name, t in head.state_dict().items())


def test_masks_by_depth_are_this_projects_own(tmp_path: Path):
    """Check the extension of the layout, which servers refuse; the control is a shared state."""
    head = random_head(**MASKED, masks_by_depth=True)
    folder = save(head, tmp_path / "head")
    assert load_file(folder / "model.safetensors")["mask_hidden"].shape == (1, 3, 24)
    assert json.loads((folder / "config.json").read_text())["masks_by_depth"] is True
    back = load_head(folder)
    assert back.config == head.config and head_of(folder) == "p_eagle"
    shared = random_head(**MASKED).config
    for shape, words in (
        (head.config, "does not read a head with masks_by_depth true"),
        (shared, ""),
    ):
        assert PARALLEL.contract.servers[0].refusal("served", shape) == words
        assert bool(PARALLEL.layout.extensions(shape)) == bool(words)
        wrong = PARALLEL.contract.layouts["speculators"].cannot_hold(shape)
        assert ("masks_by_depth is true, expected false" in wrong) == bool(words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"masks_by_depth": "yes"}, "masks_by_depth is 'yes', expected true or false"),
        (
            {"masks_by_depth": True},
            r"mask_hidden has the shape \[1, 1, 24\], expected \[1, 3, 24\]",
        ),
        ({"pard_token": None}, "pard_token is None, expected a whole number from 0 to 10"),
        ({"pard_token": 11}, "pard_token is 11, expected a whole number from 0 to 10"),
        ({"num_parallel_tokens": 1}, "num_parallel_tokens is 1, expected a whole number of 2"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "mask_hidden is unknown"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, expected 1"),
    ],
    ids=str,
)
def test_inconsistent_folders_are_refused(change: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        load_head(save(random_head(**MASKED), tmp_path / "head", **change))


# ------------------------------------------------------------------------------------- drafting


def test_a_head_is_used_as_it_was_trained():
    with pytest.raises(UserError, match="trained to draft in one pass. Use `use: p_eagle`"):
        EagleDrafter(head=random_head(**MASKED))
    with pytest.raises(UserError, match="trained to draft a token a step. Use `use: eagle3`"):
        ParallelEagleDrafter(head=random_head())


def test_a_chain_is_one_pass_and_no_longer_than_trained():
    target = native_of(hf_model(layers=2))
    head = random_parallel_eagle(target)
    drafter = ParallelEagleDrafter(head=head)
    sizes: list[int] = []
    head.midlayer.self_attn.q_proj.register_forward_hook(
        lambda _, given, found: sizes.append(found.shape[1])
    )
    (done,) = decode(target, drafter, random_prompts(1), Settings(40, num_draft_tokens=9))
    assert drafter.width(9) == 6 and len(done.tested_by_depth) <= 6
    assert len(sizes) <= done.rounds and max(sizes) == 6, "a pass has an element for each token"


# ------------------------------------------------------------------------------------- the job


def test_a_head_is_trained_and_loaded_by_the_front_door(tiny_target: Path, tmp_path: Path):
    """Check that a trained head drafts, and that greedy output stays the target's."""
    given = ["head=p_eagle", f"target.path={tiny_target}", f"output_dir={tmp_path / 'run'}"]
    given += ["loss=forward_kl", "head.draft_vocab_size=300", "loss.predict_n_tokens=4"]
    folder = heads.train.run(configured("heads.train", *given))
    card = json.loads((folder / "drafter_card.json").read_text())
    assert card["acceptance"]["chain_block_efficiency"] >= 1
    assert '"parallel_drafting": true' in (folder / "README.md").read_text()
    plain = generate(load(tiny_target, dtype="float64"), "def add(a, b):", max_new_tokens=12)
    engine = load(tiny_target, str(folder), dtype="float64")
    assert isinstance(engine.drafter, ParallelEagleDrafter) and engine.drafter.width(9) == 4
    drafted = generate(engine, "def add(a, b):", max_new_tokens=12, stopping="fixed")
    assert drafted.tokens == plain.tokens and drafted.stats.tested > 0


@pytest.mark.parametrize(
    ("head", "setting", "words"),
    [
        ("p_eagle", "loss.own_tokens=0.5", "no draft reads its own tokens"),
        ("p_eagle", "loss.depth_share=0", "expected a share above 0 and at most 1"),
        ("p_eagle", "loss.least_depth_share=2", "expected a share from 0 to 1"),
        ("p_eagle", "head.mask_token_id=999999", "head.mask_token_id is 999999, expected an id"),
        ("eagle3", "head.masks_by_depth=true", "expected false, as only head=p_eagle has masks"),
        ("medusa", "loss.depth_share=0.5", "1: this head trains at all depths"),
    ],
)
def test_invalid_settings_are_refused(head: str, setting: str, words: str):
    with pytest.raises(UserError, match=words):
        heads.train.run(configured("heads.train", f"head={head}", "target=embedded", setting))


def test_a_head_of_another_kind_is_not_continued(tmp_path: Path):
    """Check a head of a token a step, and one that drafts fewer tokens in a pass."""
    options: Any = PARALLEL.config()
    options.loss.predict_n_tokens = 6
    for shape, words in ((random_head().config, "not 0"), (random_head(**MASKED).config, "not 4")):
        fits, expected = PARALLEL.rules(options, shape)["head.path"]
        assert not fits and "passes draft 6 tokens" in expected and words in expected
