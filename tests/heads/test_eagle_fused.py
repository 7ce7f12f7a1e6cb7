"""Drafts of EAGLE-3 heads in the compiled step are those of `HeadCache`, which runs eagerly."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.interfaces import Proposal
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sessions.conversations import Session
from decoding.sessions.open_batch import OpenBatch, Request
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
def test_a_draft_continues_before_its_tokens_are_verified(schedule: str, tmp_path: Path) -> None:
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


def trees_of(one: EagleDrafter, **given: Any) -> tuple[list[list[int]], list[list[Any]]]:
    """Return the texts of PROMPTS, and the tokens and parents of all trees."""
    found: list[list[Any]] = []
    propose = one.propose

    def watched(*given: Any) -> Proposal:
        proposal = propose(*given)
        assert proposal.parents_BN is not None
        found.append([proposal.tokens_BN.tolist(), proposal.parents_BN.tolist()])
        return proposal

    one.propose = watched  # type: ignore[method-assign]
    settings = Settings(law_6.TOKENS, num_draft_tokens=4, **given)
    done = decode(law_6.native(law_6.target()), one, PROMPTS, settings)
    return [each.tokens for each in done], found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_in_the_step_are_the_same(temperature: float, tmp_path: Path) -> None:
    """Compare trees of several levels with eager ones, for rows of different lengths."""
    row = next(row for row in ROWS if row.kind is KIND)
    saved(row, tmp_path / "head")
    fused, eager = (
        EagleDrafter(tmp_path / "head", execution=each, max_nodes=24) for each in ("fused", "eager")
    )
    texts, trees = trees_of(fused, temperature=temperature)
    assert (texts, trees) == trees_of(eager, temperature=temperature)
    assert runs_fused(fused) and not runs_fused(eager)
    levels = {sum(node > 0 for node in {*parents[0]}) for _, parents in trees}
    assert max(levels) > 1, "nodes below the second level"
    # the control: other trees if the second step of a tree sees no ancestors
    loose = EagleDrafter(tmp_path / "head", execution="fused", max_nodes=24)
    run = FusedHeadCache.run

    def alone(self: FusedHeadCache, tokens_BP: Tensor, parents_BP: Tensor) -> Tensor:
        self._parents_BN = torch.full_like(self._parents_BN, -1)
        return run(self, tokens_BP, parents_BP)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedHeadCache, "run", alone)
        assert trees_of(loose, temperature=temperature)[1] != trees


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-9), ("bfloat16", 0.03)])
def test_chains_are_the_same_in_every_dtype(
    dtype: str, close: float, threads: int, tmp_path: Path
) -> None:
    """Compare the distributions of drafts of the same texts.

    The target of the head in bfloat16 is in float32.
    """
    row = next(row for row in ROWS if row.kind is KIND)
    saved(row, tmp_path / "head")
    found = {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for each in ("fused", "eager"):
            one = EagleDrafter(tmp_path / "head", shape="chain", dtype=dtype, execution=each)
            target_dtype = torch.float64 if dtype == "float64" else torch.float32
            drafts = law_6.drafts(one, law_6.target(), target_dtype)
            found[each] = {tuple(draft.text): draft.q_KV for draft in drafts}
    finally:
        torch.set_num_threads(before)
    shared = found["fused"].keys() & found["eager"].keys()
    assert len(shared) > 8
    for text in shared:
        ours, theirs = found["fused"][text][0], found["eager"][text][0]  # of the first token
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=close)


def test_rows_that_join_and_leave_draft_the_same(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.kind is KIND)
    saved(row, tmp_path / "head")
    settings = Settings(1, num_draft_tokens=law_6.GAMMA, stopping="fixed", costs=COSTS)
    requests = [
        Request(prompt, replace(settings, max_new_tokens=6 + 5 * number))
        for number, prompt in enumerate(PROMPTS)
    ]
    made = []
    for each in ("fused", "eager"):
        one, target = drafter(row, tmp_path / "head", each), law_6.native(law_6.target())
        batch = OpenBatch(target, one, settings, len(requests))
        waiting, rows = [*requests], []
        while waiting or batch.rows:
            rows += batch.join(waiting[:2])
            del waiting[:2]
            with torch.inference_mode():
                batch.round()
        made.append([(done.generation.tokens, done.generation.accepted) for done in rows])
    assert made[0] == made[1] and any(accepted for _, accepted in made[0])


def test_a_conversation_continues_from_the_cache(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.kind is KIND)
    saved(row, tmp_path / "head")
    settings, turns = Settings(12, num_draft_tokens=law_6.GAMMA), []
    for each in ("fused", "eager"):
        one, target = drafter(row, tmp_path / "head", each), law_6.native(law_6.target())
        session, text = Session(target, one, settings), PROMPTS[0]
        for _ in range(3):
            batch = session.start(text)
            done = batch.rows[0].generation
            with torch.inference_mode():
                while batch.rows:
                    batch.round()
            turns.append((done.tokens, done.accepted, done.prefilled))
            text = [*text, *done.tokens, 7, 9]
    assert turns[:3] == turns[3:] and turns[2][2] < len(text) / 2, "it reads new tokens alone"


def test_heads_in_memory_run_eagerly() -> None:
    row = next(row for row in ROWS if row.kind is KIND)
    model = law_6.target()
    head: EagleHead = law_6.head_of(row, model)
    in_memory = EagleDrafter(head=head, shape="chain", execution="fused")
    law_6.drafts(in_memory, model)
    assert not runs_fused(in_memory) and "forward" not in vars(head.midlayer.self_attn.q_proj)
