"""Drafters receive the taps of committed tokens. The taps themselves: test_taps.py.

Shapes: B rows, N nodes, X taps, C hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.costs.timing import time_parts
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.with_lookup import LookupFirst
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Drafter, Observation
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.sessions.conversations import ConversationBatches, Session
from tests.support.tap_readers import TAPS, TapChain, TapTree
from tests.support.tiers import tiered
from tests.support.tiny_targets import random_prompts

from . import test_conversations, test_laws, test_session
from .rows import DrafterRow, Kit, with_lookup_before
from .test_session import drained, kit_of, settings_of


def tap_chain(kit: Kit, **named: Any) -> TapChain:
    return TapChain(kit.draft_model, kit.twin, **named)


ROWS = [
    DrafterRow("tap_chain", tap_chain, ("greedy", "token", "block", "coupled")),
    DrafterRow(
        "tap_tree", lambda kit: TapTree(kit.draft_model, kit.twin), ("greedy", "token", "coupled")
    ),
]
ROWS.append(with_lookup_before(ROWS[0]))
PAIRS = [(row, rule) for row in ROWS for rule in row.rules]
by_pair = pytest.mark.parametrize(
    ("row", "rule"), tiered(PAIRS, test_laws.is_quick), ids=test_laws.name
)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=test_laws.name)
def test_law_1_on_a_drafter_that_reads_taps(row: DrafterRow) -> None:
    test_laws.test_law_1_greedy_output_is_the_targets_own(row)


@pytest.mark.parametrize("warper", tiered(["temperature", "all"], ["all"]))
@pytest.mark.parametrize("row", tiered(ROWS, ROWS[:2]), ids=test_laws.name)
def test_law_2_on_a_drafter_that_reads_taps(row: DrafterRow, warper: str) -> None:
    test_laws.test_law_2_coupled_output_is_the_targets_own_sample(row, warper)


@by_pair
def test_law_5_on_a_drafter_that_reads_taps(row: DrafterRow, rule: str) -> None:
    test_laws.test_law_5_ragged_batches_equal_single_rows(row, rule)


@by_pair
def test_a_conversation_with_a_drafter_that_reads_taps(row: DrafterRow, rule: str) -> None:
    test_session.test_every_turn_equals_a_fresh_decode_of_the_text(row, rule)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_conversations_with_a_drafter_that_reads_the_last_taps(rule: str) -> None:
    row = DrafterRow("tap_chain", lambda kit: tap_chain(kit, last_hidden=True), ())
    test_conversations.test_conversations_in_batches_equal_fresh_decodes(row, rule)


def test_conversations_with_a_drafter_that_reads_all_taps() -> None:
    kit, other, settings = kit_of(), kit_of(), settings_of("greedy")
    drafter = tap_chain(kit)
    for one in test_conversations.conversations(
        kit.target, settings, ConversationBatches(kit.target, drafter)
    ):
        (fresh,) = decode(other.target, None, [one.prompt], settings, request_ids=[one.request])
        assert one.answer.tokens == fresh.tokens
        assert one.answer.prefilled == len(one.prompt) - 1
    assert drafter.checked > 1000


def test_the_draft_length_depends_on_the_taps() -> None:
    """Check that proposals depend on the taps, so that the laws above cover them."""
    kit, settings = kit_of(), settings_of("greedy")
    read, plain = tap_chain(kit), ChainDrafter(model=kit.draft_model)
    drafted = [
        [g.drafted for g in decode(kit.target, drafter, random_prompts(8), settings)]
        for drafter in (read, plain)
    ]
    assert drafted[0] != drafted[1]
    assert read.checked > 500


@pytest.mark.parametrize("expected", [(1, 2), (0, 2), (1, 0)])
def test_controls_a_drafter_detects_another_layer(expected: tuple[int, ...]) -> None:
    kit = kit_of()
    with pytest.raises(AssertionError, match="not close"):
        decode(
            kit.target,
            tap_chain(kit, taps=(0, 1), expected=expected),
            [[5, 6, 7]],
            settings_of("greedy"),
        )


def test_control_a_drafter_detects_states_of_other_tokens() -> None:
    class Late(NativeTarget):
        def forward(
            self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
        ) -> tuple[Tensor, Tensor]:
            logits_BNV, hidden_BNC = super().forward(tokens_BN, parents_BN, taps)
            return logits_BNV, hidden_BNC.roll(1, 1)

    kit = kit_of()
    assert isinstance(kit.target, NativeTarget)
    late = Late(kit.target.weights, "late", execution="eager")
    with pytest.raises(AssertionError, match="not close"):
        decode(late, tap_chain(kit), [[5, 6, 7]], settings_of("greedy"))


def test_turns_without_the_drafter_leave_no_gap_in_its_states() -> None:
    """Check that a drafter receives the states of tokens from turns without it."""
    settings, kit, other = settings_of("greedy"), kit_of(), kit_of()
    drafter = tap_chain(kit)
    session = Session(kit.target, drafter, settings)
    text = [5, 6, 7, 8]
    for turn, drafted in enumerate((True, False, False, True, False, True)):
        text = [*text, 9 + turn, 20]
        found = drained(session.start(text, drafted=drafted))
        assert found.tokens == decode(other.target, None, [text], settings)[0].tokens
        text += found.tokens
    assert len(drafter.known_B[0][1]) >= len(text) - 4, "all states but the last round's"


def test_control_a_gap_in_the_states_is_detected() -> None:
    class Careless(Session):
        def _reuse_cache(self, prompt: Sequence[int], drafter: Drafter | None) -> int:
            return min(super()._reuse_cache(prompt, None), len(prompt) - 2)

    kit = kit_of()
    session = Careless(kit.target, tap_chain(kit), settings_of("greedy"))
    text = [5, 6, 7, 8]
    for drafted in (True, False):
        text += drained(session.start(text, drafted=drafted)).tokens
    with pytest.raises(AssertionError, match="states of new tokens are missing"):
        session.start(text)


@pytest.mark.parametrize("taps", [(0, 4), (1, 1)])
def test_taps_that_the_target_lacks_are_refused_before_decoding(
    taps: tuple[int, ...],
) -> None:
    kit = kit_of()
    with pytest.raises(UserError, match="taps holds"):
        decode(kit.target, tap_chain(kit, taps=taps), [[5, 6, 7]], settings_of("greedy"))
    assert kit.target.lengths_B == [], "nothing was opened"


def test_a_drafter_with_taps_needs_hidden_states() -> None:
    with pytest.raises(ValueError, match="needs_hidden=True"):
        Capabilities(taps=(1,))
    kit = kit_of()
    assert LookupFirst(tap_chain(kit)).capabilities.taps == TAPS


def test_overlapped_schedules_pass_taps_to_the_drafter() -> None:
    """Check that a drafter receives the tip's state first in every round."""
    kit, other = kit_of(), kit_of()
    prompt = [5, 6, 7]
    text, lengths, firsts = list(prompt), [len(prompt)], []

    class Watching(ChainDrafter):
        capabilities = replace(ChainDrafter.capabilities, needs_hidden=True, taps=TAPS)

        def observe(self, observation: Observation) -> None:
            firsts.append(observation.hidden_BNC[0, 0])
            lengths.append(len(text))

    settings = replace(settings_of("greedy"), schedule="pearl_virtual")
    drafter = Watching(model=kit.draft_model)
    decode(kit.target, drafter, [prompt], settings, on_tokens=lambda _, new: text.extend(new))
    assert text[3:] == decode(other.target, None, [prompt], settings_of("greedy"))[0].tokens
    other.twin.open(1, len(text))
    states_NX = other.twin.features(torch.tensor([text]), None, TAPS)[0]
    assert len(firsts) > 3
    for first_X, length in zip(firsts, lengths):
        torch.testing.assert_close(first_X, states_NX[length - 1], rtol=1e-9, atol=1e-9)


def test_timing_reads_the_drafters_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    kit, read = kit_of(), []
    plain = NativeTarget._states

    def states(self: NativeTarget, *given: Any) -> tuple[Tensor, Tensor]:
        if self is kit.target:
            read.append(given[2])
        return plain(self, *given)

    monkeypatch.setattr(NativeTarget, "_states", states)
    time_parts(kit.target, tap_chain(kit), [5, 6, 7], widths=(1, 3), repeats=1, warmup=0)
    assert set(read) == {TAPS}
