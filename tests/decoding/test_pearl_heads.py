"""Trained heads under PEARL's schedules: what they draft from, and laws 4 and 5.

Laws 1 and 2 are in test_pearl.py, law 3 in test_law_of_overlap.py, and the batches of law 5 in
test_pearl_edges.py.

Shapes: B rows, W tokens, C channels.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import Drafter, Observation, Proposal
from decoding.loop import decode, prefill_batch
from decoding.models.prefill import prefill
from decoding.rounds.settings import Settings
from decoding.schedules.by_name import VIRTUAL, WALL
from decoding.schedules.pearl import Pearl
from heads.block.drafter import BlockDrafter
from heads.eagle.cache import HeadCache
from recurrent_drafting import drafter as recurrent
from tests.support.tiers import tiered
from tests.support.tiny_targets import five_words, hf_model, native_of, random_prompts
from training.heads.drafter import HeadDrafter

from .row_kinds.recurrent import recurrent_of
from .rows import BY_NAME, COSTS, ROWS, Kit
from .test_law_of_gain import kit_of, sure_texts
from .test_laws import models, with_rule
from .test_pearl import AHEAD, BATCHED

HEADS, TEXT_READERS = AHEAD[1:4], AHEAD[5:]
by_row = pytest.mark.parametrize("row", HEADS)
by_any_row = pytest.mark.parametrize("row", tiered([*HEADS, *TEXT_READERS], HEADS))
by_reader = pytest.mark.parametrize("row", TEXT_READERS)
by_schedule = pytest.mark.parametrize("schedule", VIRTUAL)
PROMPTS = [[3, 1, 4], [2], [0, 1, 2, 3, 4, 0]]  # of the five-symbol target


def make(row: str, kit: Kit) -> Drafter:
    """Return a row's drafter, whose tokens are sampled if the target's are."""
    if row == "recurrent_chain":
        return recurrent_of(kit, 1, children="sampled")
    return BY_NAME[row].make(kit)


def opened(row: str, settings: Settings) -> tuple[Pearl, Kit]:
    """Return a batch of a head on the five-symbol target, and the kit that it was made from."""
    target = five_words()
    kit = Kit(target, five_words(), target, ())
    batch = prefill_batch(target, make(row, kit), PROMPTS, settings)
    assert isinstance(batch, Pearl)
    return batch, kit


def fresh_draft(kit: Kit, row: str, texts_B: Sequence[Sequence[int]], *given: Any) -> Proposal:
    """Return the proposal of a new drafter, to which the target's states of the texts are known."""
    drafter = make(row, kit)
    drafter.prepare(kit.twin, None)
    kit.twin.open(len(texts_B), 64)
    states_BWC = prefill(kit.twin, [text[:-1] for text in texts_B], True, drafter.capabilities.taps)
    drafter.open(texts_B, states_BWC, 64)
    return drafter.propose(texts_B, *given)


def watch(drafter: Drafter, look: Any) -> None:
    """Call look(proposal, texts, *the other arguments) after every proposal of a drafter."""
    propose = drafter.propose

    def watched(texts_B: Sequence[Sequence[int]], *given: Any) -> Proposal:
        proposal = propose(texts_B, *given)
        look(proposal, texts_B, *given)
        return proposal

    drafter.propose = watched  # type: ignore[method-assign]


@by_row
@pytest.mark.parametrize("schedule", BATCHED)
def test_states_of_the_target_replace_those_of_a_draft(schedule: str, row: str) -> None:
    """Check that after verified text a head drafts like one that read the text with its states.

    After assumed tokens it drafts differently, as it has no states of them.
    """
    settings = Settings(
        40, temperature=1.0, verify="token", num_draft_tokens=3, seed=5, schedule=schedule
    )
    batch, kit = opened(row, settings)
    verified = assumed = 0

    def look(proposal: Proposal, texts_B: Sequence[Sequence[int]], *given: Any) -> None:
        nonlocal verified, assumed
        other = fresh_draft(kit, row, texts_B, *given)
        assert proposal.q_BNV is not None and other.q_BNV is not None
        for b, (lane, count) in enumerate(zip(batch.lanes, proposal.counts_B, strict=True)):
            ours_NV, theirs_NV = proposal.q_BNV[b, :count], other.q_BNV[b, :count]
            if count and lane.tokens:
                assumed += not torch.allclose(ours_NV, theirs_NV)
            elif count:
                torch.testing.assert_close(ours_NV, theirs_NV)
                verified += 1

    assert batch.drafter is not None
    watch(batch.drafter, look)
    while batch.rows:
        batch.round()
    assert verified > 20
    assert (assumed > 5) == (schedule == "pearl_virtual"), "without post-verify nothing is assumed"


def keep_own_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the target's states of the prompts, and keep those of drafts for later tokens."""
    add_states = HeadCache.add_states

    def once(self: HeadCache, taps_BWC: Tensor, counts_B: Sequence[int]) -> None:
        if any(self._known_B):
            self._known_B = [known + new for known, new in zip(self._known_B, counts_B)]
        else:
            add_states(self, taps_BWC, counts_B)

    def ignore(self: HeadDrafter, observation: Observation) -> None:
        pass

    monkeypatch.setattr(HeadCache, "add_states", once)
    monkeypatch.setattr(HeadDrafter, "observe", ignore)


@by_row
def test_states_that_are_not_replaced_are_found(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_own_states(monkeypatch)
    with pytest.raises(AssertionError):
        test_states_of_the_target_replace_those_of_a_draft("pearl_virtual", row)


@by_row
def test_a_chunk_continues_the_draft_before_it(row: str) -> None:
    """Check that two chunks without a forward between them are one draft of twice the length."""
    gamma = 3
    target, twin, draft_model = models()
    kit, compared = Kit(target, twin, draft_model, ()), 0
    settings = Settings(40, num_draft_tokens=gamma, schedule="pearl_virtual_wo_pre")
    for prompt in ([7], [4, 9, 12]):
        batch = prefill_batch(target, make(row, kit), [prompt], settings)
        assert isinstance(batch, Pearl)

        def look(
            proposal: Proposal,
            texts_B: Sequence[Sequence[int]],
            budgets_B: Sequence[int],
            *given: Any,
            batch: Pearl = batch,
        ) -> None:
            nonlocal compared
            assumed, count = batch.lanes[0].tokens, proposal.counts_B[0]
            if len(assumed) == count == gamma:  # those of a chunk that was assumed whole
                text = list(texts_B[0][:-gamma])
                whole = fresh_draft(kit, row, [text], [2 * gamma], *given)
                assert whole.tokens_BN[0].tolist() == [*assumed, *proposal.tokens_BN[0].tolist()]
                compared += 1

        assert batch.drafter is not None
        watch(batch.drafter, look)
        while batch.rows:
            batch.round()
    assert compared > 20


@by_reader
def test_a_head_of_the_text_alone_reads_assumed_tokens_as_text(row: str) -> None:
    """Check that it drafts like one that read the text with the target, ragged rows included."""
    settings = Settings(
        40, temperature=1.0, verify="token", num_draft_tokens=3, seed=5, schedule="pearl_virtual"
    )
    batch, kit = opened(row, settings)
    assumed = 0

    def look(proposal: Proposal, texts_B: Sequence[Sequence[int]], *given: Any) -> None:
        nonlocal assumed
        other = fresh_draft(kit, row, texts_B, *given)
        assert proposal.q_BNV is not None and other.q_BNV is not None
        for b, (lane, count) in enumerate(zip(batch.lanes, proposal.counts_B, strict=True)):
            torch.testing.assert_close(proposal.q_BNV[b, :count], other.q_BNV[b, :count])
            assumed += bool(lane.tokens) and count > 0

    assert batch.drafter is not None
    watch(batch.drafter, look)
    while batch.rows:
        batch.round()
    assert assumed > 5


@by_reader
def test_assumed_tokens_that_are_not_read_are_found(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore(self: BlockDrafter, sequences_B: Sequence[Sequence[int]]) -> list[int]:
        return list(self._stored.lengths_B)

    monkeypatch.setattr(BlockDrafter, "_read_assumed", ignore)
    with pytest.raises(AssertionError):
        test_a_head_of_the_text_alone_reads_assumed_tokens_as_text(row)


def forget_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every chunk without the states that the chunk before it has computed."""
    start = HeadCache.start

    def forgetful(self: HeadCache, texts_B: Sequence[Sequence[int]]) -> Tensor:
        for b, known in enumerate(self._known_B):
            self._states_BTH[b, known + 1 :] = 0
        return start(self, texts_B)

    monkeypatch.setattr(HeadCache, "start", forgetful)
    monkeypatch.setattr(recurrent, "read_tokens", lambda *given: None)


@by_row
def test_a_chunk_that_begins_anew_is_found(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_draft(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_chunk_continues_the_draft_before_it(row)


@by_any_row
@pytest.mark.parametrize("rule", tiered(["greedy", "token", "coupled"], ["token"]))
def test_law_4_a_head_that_knows_the_text_has_the_closed_form(rule: str, row: str) -> None:
    gamma, rounds = 4, 6
    tokens = 1 + gamma * rounds
    prompts, plain = sure_texts(False, rule, tokens)
    kit = kit_of(True, True)
    settings = with_rule(
        rule, num_draft_tokens=gamma, max_new_tokens=tokens, schedule="pearl_virtual"
    )
    drafted = decode(kit.target, make(row, kit), prompts, settings)
    assert [done.tokens for done in drafted] == [done.tokens for done in plain]
    assert all(done.rounds == 1 + rounds and done.accepted == done.tested for done in drafted)


@by_any_row
@by_schedule
def test_law_4_an_adversarial_head_changes_nothing(schedule: str, row: str) -> None:
    prompts, plain = sure_texts(True, "greedy", 24)
    kit = kit_of(True, False)
    settings = with_rule("greedy", max_new_tokens=24, costs=COSTS, schedule=schedule)
    for prompt, expected in zip(prompts, plain):
        (done,) = decode(kit.target, make(row, kit), [prompt], settings)
        assert (done.tokens, done.accepted, done.block_efficiency) == (expected.tokens, 0, 1)
        assert done.tested > 0


@by_any_row
@by_schedule
def test_law_5_a_stop_token_inside_the_assumed_span_ends_the_row(schedule: str, row: str) -> None:
    prompts, plain = sure_texts(False, "greedy", 25)
    kit = kit_of(True, True)
    settings = with_rule(
        "greedy", max_new_tokens=25, num_draft_tokens=4, costs=COSTS, schedule=schedule
    )
    for prompt, expected in zip(prompts, plain):
        for stop in (6, 7, 8, 9):
            stopped = replace(settings, stop_token_ids=(expected.tokens[stop],))
            (done,) = decode(kit.target, make(row, kit), [prompt], stopped)
            assert (done.tokens, done.finish) == (expected.tokens[: stop + 1], "stop")
            assert 0 < done.accepted <= stop + 1, "tokens after the stop were counted"


@pytest.mark.parametrize("row", [*HEADS, *TEXT_READERS])
@by_schedule
def test_law_5_contexts_near_the_end(schedule: str, row: str) -> None:
    """Check texts that fill the target's context, alone and beside rows of other lengths."""
    model = hf_model("llama", layers=2)
    target = native_of(model, max_length=20)
    kit = Kit(target, native_of(model, max_length=20), target, ())
    prompts = [[4] * 15, *random_prompts(2, longest=3), [4] * 18]
    settings = Settings(100, num_draft_tokens=4, schedule=schedule, costs=COSTS)
    batches = [prompts] if schedule in BATCHED else [[prompt] for prompt in prompts]
    for batch in batches:
        plain = decode(target, None, batch, settings)
        drafted = decode(target, make(row, kit), batch, settings)
        assert [done.tokens for done in drafted] == [done.tokens for done in plain]
        assert [len(p) + len(done.tokens) for p, done in zip(batch, drafted)] == [20] * len(batch)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.slow], ids=lambda row: row.name)
def test_other_drafters_are_refused(row: Any) -> None:
    drafter = row.make(Kit(*models(), []))
    overlaps = row.name in (*AHEAD, "specdiff")
    assert drafter.capabilities.can_overlap == overlaps
    if not overlaps:
        with pytest.raises(UserError, match=f"found '{drafter.name}'. Use schedule=serial."):
            decode(models()[0], drafter, [[4]], Settings(schedule="pearl_virtual", costs=COSTS))


@pytest.mark.parametrize("row", [*HEADS, *TEXT_READERS])
@pytest.mark.parametrize("schedule", WALL)
def test_heads_cannot_run_in_another_process(schedule: str, row: str) -> None:
    drafter = make(row, Kit(*models(), ()))
    with pytest.raises(UserError, match="reads the target's hidden states in this one. Use sched"):
        decode(models()[0], drafter, [[4]], Settings(schedule=schedule, costs=COSTS))
