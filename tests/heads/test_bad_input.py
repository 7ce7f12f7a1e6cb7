"""Heads that do not fit their target, and texts with the mask token, which stay exact."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

import heads.train
from decoding import generate, load
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.folder import CARD
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from heads.block.checkpoint import load_head
from heads.block.drafter import BlockDrafter
from heads.eagle.checkpoint import load_head as load_eagle
from heads.eagle.drafter import EagleDrafter
from heads.eagle.kind import KIND, PARALLEL
from heads.eagle.parallel import ParallelEagleDrafter
from tests.decoding.row_kinds.eagle import random_eagle, random_parallel_eagle
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_block_folders import change
from tests.heads.test_heads_train import configured
from tests.support.block_heads import random_block, sizes_of
from tests.support.tiny_targets import hf_model, native_of
from training.data.packing import Sample
from training.heads import checkpoint
from training.heads.build import describe_mask_token


def folder_of(name: str, target: Path, folder: Path, **fields: Any) -> Path:
    """Write a random head of a row for a target's folder, without a card."""
    row = next(row for row in HEAD_ROWS if row.name == name)
    shape = replace(row.shape(AutoConfig.from_pretrained(target)), **fields)
    torch.manual_seed(3)
    checkpoint.save_head(row.kind.layout, shape, row.kind.empty(shape), folder)
    return folder


def small_target(**options: Any) -> NativeTarget:
    return native_of(hf_model(layers=2), **options)


# ---------------------------------------------------------------------------------- layers (taps)


def test_layers_that_the_target_lacks_are_refused(tiny_target: Path, tmp_path: Path):
    """Check folders of a known and of an unknown target, and heads of both kinds in training."""
    folder = folder_of("dflash", tiny_target, tmp_path / "head")
    change(folder, {}, {"target_layer_ids": [0, 4], "taps": [1, 5]})
    with pytest.raises(UserError, match="expected layers up to 3, as the target has 4 layers"):
        load_head(folder)
    change(folder, {"num_target_layers": 0}, {})
    with pytest.raises(UserError, match="taps holds 5, expected layers of .* to 4"):
        generate(load(tiny_target, str(folder)), "def add(a, b):", max_new_tokens=4)
    head = random_eagle(small_target(), taps=(1, 2, 9))
    with pytest.raises(UserError, match="taps holds 9, expected layers of .* to 2"):
        decode(small_target(), EagleDrafter(head=head), [[3, 4]], Settings(4))
    for name in ("eagle3", "parallelspec", "dflash"):
        given = [f"head={name}", f"target.path={tiny_target}", "head.taps=[9]"]
        with pytest.raises(UserError, match="reads layer 9 of the target"):
            heads.train.run(configured("heads.train", *given))


# ---------------------------------------------------------------------------------- the mask token


@pytest.mark.parametrize("name", ["dflash", "p_eagle"])
@pytest.mark.parametrize(("token", "role"), [(1, "bos"), (2, "eos"), (7, "pad")])
def test_a_loaded_head_whose_mask_has_a_role_is_refused(
    name: str, token: int, role: str, tiny_target: Path, tmp_path: Path
):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    (target / "generation_config.json").write_text(json.dumps({"pad_token_id": 7}))
    folder = folder_of(name, target, tmp_path / "head", mask_token_id=token)
    key = "dflash_config.mask_token_id" if name == "dflash" else "pard_token"
    words = rf"{key} is {token}, expected an id from 0 to 2047 that is no padding, .*\(1, 2, 7\)"
    with pytest.raises(UserError, match=words):
        load(target, str(folder))
    load(target, str(folder_of(name, target, tmp_path / "control", mask_token_id=8)))


@pytest.mark.parametrize("verify", ["greedy", "token", "coupled"])
@pytest.mark.parametrize(
    "form", ["fill_in", "anchor_first", "markov", "several passes", "p_eagle", "parallelspec"]
)
def test_texts_with_the_mask_token_are_drafted_exactly(form: str, verify: str):
    """Check the mask as a prompt's tip, inside it, and as a prompt of its own.

    Under `token` the text depends on the drafts, so only its length is checked; law 3 covers it.
    """
    target, sizes = small_target(), sizes_of(small_target())
    blocks: dict[str, dict[str, Any]] = {
        "fill_in": {},
        "anchor_first": {"layout": "anchor_first"},
        "markov": {"layout": "anchor_first", "correction": "markov", "rank": 4},
        "several passes": {"denoising_steps": 3},
    }
    drafter: Any
    if form in blocks:
        drafter = BlockDrafter(head=random_block(sizes, mask_token_id=9, **blocks[form]))
    else:
        head = random_parallel_eagle(target, 3.0, by_depth=form == "parallelspec")
        drafter = ParallelEagleDrafter(head=head)
    mask = drafter.config.mask_token_id
    prompts = [[5, 3, mask], [5, mask, 3], [mask], [mask, mask, 8, mask]]
    fields = {} if verify == "greedy" else {"temperature": 1.0, "verify": verify, "seed": 3}
    settings = Settings(24, num_draft_tokens=4, **fields)
    plain = decode(target, None, prompts, settings)
    drafted = decode(target, drafter, prompts, settings)
    assert all(one.tested > 0 for one in drafted)
    if verify == "token":
        assert [len(one.tokens) for one in drafted] == [len(one.tokens) for one in plain]
    else:
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_training_texts_with_the_mask_token_are_counted():
    texts = [[3, 9, 4, 9], [9], [5]]
    samples = [Sample(np.asarray(ids, np.int32), np.ones(len(ids), bool)) for ids in texts]
    assert "have the mask token 9 3 times" in describe_mask_token(9, samples)
    assert describe_mask_token(8, samples) == describe_mask_token(None, samples) == ""


# ---------------------------------------------------------------------------- another tokenizer


def test_a_published_head_with_another_tokenizer_is_refused(tiny_target: Path, tmp_path: Path):
    """Check a head without a card: its draft vocabulary counts tokens of another tokenizer."""
    folder = folder_of("dflash with a draft vocabulary", tiny_target, tmp_path / "head")
    load(tiny_target, str(folder))  # without a tokenizer
    for file in tiny_target.glob("*token*"):
        shutil.copy(file, folder)
    load(tiny_target, str(folder))
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    first, second = names[400], names[401]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(values))
    with pytest.raises(UserError, match="their tokenizers differ.*Use a head for this tokenizer"):
        load(tiny_target, str(folder))


# ------------------------------------------------------------------------- longer than trained


def test_a_head_does_not_draft_more_than_it_was_trained_for(tiny_target: Path, tmp_path: Path):
    """Check a larger size in config.json, which no tensor contradicts, and a larger request."""
    for name, key, size in (("dflash", "block_size", 5), ("p_eagle", "num_parallel_tokens", 4)):
        folder = folder_of(name, tiny_target, tmp_path / name)
        file, read = folder / "config.json", load_head if name == "dflash" else load_eagle
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: size + 8}))
        read(folder)  # control: without a card it is unknown
        field = "block_size" if name == "dflash" else "parallel"
        (folder / CARD).write_text(json.dumps({"shape": {field: size}}))
        with pytest.raises(UserError, match=f"{field} is {size + 8}, but .* trained with {size} "):
            read(folder)
    drafter = BlockDrafter(head=random_block(sizes_of(small_target())))
    (done,) = decode(small_target(), drafter, [[3, 4]], Settings(40, num_draft_tokens=50))
    assert drafter.width(50) == drafter.config.num_drafts == 6 >= len(done.tested_by_depth)
    given = ["head=dflash", f"target.path={tiny_target}", f"head.path={tmp_path / 'dflash'}"]
    (tmp_path / "dflash" / CARD).unlink()
    with pytest.raises(UserError, match="whose block drafts 7 tokens .*, not 12"):
        heads.train.run(configured("heads.train", *given))


UNSEEN: dict[str, list[dict[str, Any]]] = {  # what no tensor shows
    "dflash": [{"taps": (1, 4)}, {"layout": "anchor_first"}, {"mask_token_id": 5}],
    "eagle3": [{"taps": (0, 1, 2)}, {"norm_output": False}],
    "p_eagle": [{"mask_token_id": 5}],
    "early exit": [{"exit_layer": 1}],
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_config_that_contradicts_the_heads_card_is_refused(
    name: str, tiny_target: Path, tmp_path: Path
):
    """Check config.json of another shape than the card's; the controls have no card, or agree."""
    row = next(row for row in HEAD_ROWS if row.name == name)
    shape, kind = row.shape(AutoConfig.from_pretrained(tiny_target)), row.kind
    folder = folder_of(name, tiny_target, tmp_path)
    card = json.dumps({"shape": asdict(shape)})
    (folder / CARD).write_text(card)
    kind.load(folder)
    for change_of in UNSEEN[name]:
        ((field, value),) = change_of.items()
        assert getattr(shape, field) != value
        text = checkpoint.config_text(kind.layout, replace(shape, **change_of), torch.float32)
        (folder / "config.json").write_text(text)
        (folder / CARD).unlink()
        kind.load(folder)
        (folder / CARD).write_text(card)
        with pytest.raises(UserError, match=f"{field} is .* but the head was trained with .*Use"):
            kind.load(folder)


# ----------------------------------------------------------------------------------- positions


def test_texts_longer_than_the_heads_positions_are_refused():
    """Check a head of 64 positions for a target of 256; the controls stay within them."""
    drafter = EagleDrafter(head=random_eagle(small_target(), max_positions=64))
    decode(small_target(), drafter, [[3, 4]], Settings(40, num_draft_tokens=4))
    words = "its head has 64 positions, but the texts .* may have [0-9]+. Load the target with max_"
    with pytest.raises(UserError, match=words):
        decode(small_target(), drafter, [[3, 4]], Settings(80, num_draft_tokens=4))
    decode(small_target(max_length=64), drafter, [[3, 4]], Settings(62, num_draft_tokens=4))
    for kind, head in ((KIND, random_eagle(small_target())), (PARALLEL, drafter.cache.head)):
        options: Any = kind.config()
        options.head.path, options.data.max_length = "HEAD", 256
        fits, expected = kind.rules(options, head.config)["data.max_length"]
        assert fits == (kind is KIND)
        assert expected == f"at most {head.config.max_positions}, the positions of the head in " + (
            "head.path"
        )
