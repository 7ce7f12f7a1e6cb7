"""Chains and passes of EAGLE-3 heads in the compiled step draft as `HeadCache.run` does."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoding.loop import decode
from decoding.rounds.settings import Settings
from heads.eagle.drafter import EagleDrafter
from heads.eagle.fused import FusedHeadCache
from heads.eagle.kind import FIRST, KIND, PARALLEL
from heads.eagle.model import EagleHead
from heads.eagle.parallel import ParallelEagleDrafter
from tests.decoding.row_kinds.kit import COSTS
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS, HeadRow
from training.heads.checkpoint import save_head

ROWS = [row for row in HEAD_ROWS if row.kind in (KIND, PARALLEL, FIRST)]
PROMPTS = [*law_6.PROMPTS, [9]]  # the last one has no token before its tip


def saved(row: HeadRow, folder: Path) -> EagleHead:
    """Save a random head and return it."""
    head: EagleHead = law_6.head_of(row, law_6.target())
    save_head(row.kind.layout, head.config, head, folder)
    return head


def drafter(row: HeadRow, folder: Path, execution: str) -> EagleDrafter:
    """Return a drafter of chains."""
    if row.kind is PARALLEL:
        return ParallelEagleDrafter(folder, execution=execution)
    return EagleDrafter(folder, shape="chain", execution=execution)


def runs_fused(one: EagleDrafter) -> bool:
    return isinstance(one.cache, FusedHeadCache)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_chains_in_the_step_are_the_same(row: HeadRow, tmp_path: Path) -> None:
    """Compare the distributions of drafts of four rows of different lengths, over many rounds."""
    config, model = saved(row, tmp_path / "head").config, law_6.target()
    fused = drafter(row, tmp_path / "head", "fused")
    eager = law_6.drafts(drafter(row, tmp_path / "head", "eager"), model)
    found = law_6.drafts(fused, model)
    assert runs_fused(fused) == (not (config.predicts_states or config.norm_before_residual))
    assert [one.text for one in found] == [one.text for one in eager]
    for one, other in zip(found, eager, strict=True):
        torch.testing.assert_close(one.q_KV, other.q_KV, **law_6.CLOSE)


@pytest.mark.parametrize("norms", [True, False])
def test_the_step_feeds_back_the_right_state(norms: bool, tmp_path: Path) -> None:
    """Compare with a head that feeds back its output after the norm, or before it."""
    row = next(row for row in ROWS if row.kind is KIND)
    model, head = law_6.target(), saved(row, tmp_path / "own")
    other = copy.deepcopy(head)
    other.config = replace(other.config, norm_output=norms)
    save_head(row.kind.layout, other.config, other, tmp_path / "other")
    fused = law_6.drafts(drafter(row, tmp_path / "other", "fused"), model)[0]
    eager = law_6.drafts(drafter(row, tmp_path / "own", "eager"), model)[0]
    close = torch.allclose(fused.q_KV, eager.q_KV, **law_6.CLOSE)
    assert close == (norms == head.config.norm_output), "the control: the other state"


@pytest.mark.parametrize("schedule", ["pearl_virtual", "pearl_plus_virtual"])
def test_a_draft_goes_on_before_its_tokens_are_verified(schedule: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.kind is KIND)
    saved(row, tmp_path / "head")
    model, one = law_6.target(), drafter(row, tmp_path / "head", "fused")
    settings = Settings(law_6.TOKENS, num_draft_tokens=law_6.GAMMA, costs=COSTS)
    for prompt in PROMPTS:
        drafts = []
        for each in (one, drafter(row, tmp_path / "head", "eager")):
            given = replace(settings, schedule=schedule)
            drafts += decode(law_6.native(model), each, [prompt], given)
        (plain,) = decode(law_6.native(model), None, [prompt], settings)
        assert [done.tokens for done in drafts] == [plain.tokens] * 2
        assert drafts[0].accepted == drafts[1].accepted and drafts[0].tested > 0
    assert runs_fused(one)


def test_trees_and_heads_in_memory_run_eagerly(tmp_path: Path) -> None:
    """Check trees, whose first nodes alone run in the step, and that a head in memory stays."""
    row = next(row for row in ROWS if row.kind is KIND)
    head, model = saved(row, tmp_path / "head"), law_6.target()
    settings = Settings(law_6.TOKENS, num_draft_tokens=law_6.GAMMA)
    found = [
        decode(law_6.native(model), each, PROMPTS, settings)
        for each in (
            None,
            EagleDrafter(tmp_path / "head", execution="fused"),
            EagleDrafter(tmp_path / "head"),
        )
    ]
    texts = [[one.tokens for one in done] for done in found]
    assert texts[0] == texts[1] == texts[2]
    assert [one.accepted for one in found[1]] == [one.accepted for one in found[2]]
    in_memory = EagleDrafter(head=head, shape="chain", execution="fused")
    law_6.drafts(in_memory, model)
    assert not runs_fused(in_memory) and "forward" not in vars(head.midlayer.self_attn.q_proj)
