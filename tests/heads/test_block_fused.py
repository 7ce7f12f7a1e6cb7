"""A block's pass in the compiled step drafts as `BlockHead.forward` does."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoding.loop import decode
from decoding.rounds.settings import Settings
from heads.block.drafter import BlockDrafter
from heads.block.kind import KIND
from heads.block.model import BlockHead
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS, HeadRow
from training.heads.checkpoint import save_head

ROWS = [row for row in HEAD_ROWS if row.kind is KIND]


def saved(row: HeadRow, folder: Path) -> BlockHead:
    """Save a random head and return it."""
    head: BlockHead = law_6.head_of(row, law_6.target())
    save_head(row.kind.layout, head.config, head, folder)
    return head


def joined(drafter: BlockDrafter) -> bool:
    """Return whether the drafter's passes run in the step: its weights are parts of one."""
    query, key = (getattr(drafter.head.layers[0].self_attn, f"{part}_proj") for part in "qk")
    parts = (each.weight.untyped_storage().data_ptr() for each in (query, key))
    return len(set(parts)) == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_passes_in_the_step_draft_the_same(row: HeadRow, tmp_path: Path) -> None:
    """Compare the distributions of drafts of four rows of different lengths, over many rounds."""
    head, model = saved(row, tmp_path / "head"), law_6.target()
    fused = BlockDrafter(tmp_path / "head", execution="fused")
    eager = law_6.drafts(BlockDrafter(tmp_path / "head"), model)
    found = law_6.drafts(fused, model)
    assert joined(fused) == (not head.config.conv_taps)
    assert [one.text for one in found] == [one.text for one in eager]
    for one, other in zip(found, eager, strict=True):
        torch.testing.assert_close(one.q_KV, other.q_KV, **law_6.CLOSE)


@pytest.mark.parametrize("mask", ["bidirectional", "causal"])
def test_the_step_knows_the_mask_in_a_block(mask: str, tmp_path: Path) -> None:
    """Compare with a head whose mask is the other one, as a control."""
    row = next(row for row in ROWS if row.name == "dflash")
    model, head = law_6.target(), saved(row, tmp_path / "own")
    other = copy.deepcopy(head)
    other.config = replace(other.config, in_block_mask=mask)
    save_head(row.kind.layout, other.config, other, tmp_path / "other")
    fused = law_6.drafts(BlockDrafter(tmp_path / "other", execution="fused"), model)[0]
    eager = law_6.drafts(BlockDrafter(tmp_path / "own"), model)[0]
    close = torch.allclose(fused.q_KV, eager.q_KV, **law_6.CLOSE)
    assert close == (mask == head.config.in_block_mask)


def test_wide_batches_and_heads_in_memory_run_eagerly(tmp_path: Path) -> None:
    """Check a batch too wide for the step, and that a head in memory stays as it is."""
    row = next(row for row in ROWS if row.name == "dflash")
    head, model = saved(row, tmp_path / "head"), law_6.target()
    prompts = law_6.PROMPTS * 7
    settings = Settings(8, num_draft_tokens=law_6.GAMMA)
    drafter = BlockDrafter(tmp_path / "head", execution="fused")
    found, plain = (
        decode(law_6.native(model), each, prompts, settings) for each in (drafter, None)
    )
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert any(one.drafted for one in found) and joined(drafter)
    in_memory = BlockDrafter(head=head, execution="fused")
    law_6.drafts(in_memory, model)
    assert not joined(in_memory) and "forward" not in vars(head.layers[0].self_attn.q_proj)
