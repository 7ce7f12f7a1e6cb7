"""Law 6 for all trained heads, and the controls that it must reject."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.heads import law_6
from tests.heads.rows import FIRST, HEAD_ROWS, HeadRow
from tests.support.tiers import tiered
from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.heads.positions import Positions

of_all = pytest.mark.parametrize("row", HEAD_ROWS, ids=lambda row: row.name)
of_kinds = pytest.mark.parametrize("row", tiered(HEAD_ROWS, FIRST), ids=lambda row: row.name)
UNEQUAL = "Tensor-likes are not close"


@of_all
def test_training_equals_drafting(row: HeadRow) -> None:
    law_6.check_training_equals_drafting(row)


@of_all
def test_predictions_read_no_later_tokens_or_states(row: HeadRow) -> None:
    law_6.check_nothing_unseen_is_read(row)


@of_all
def test_a_folder_drafts_the_same(row: HeadRow, tmp_path: Path) -> None:
    law_6.check_a_folder_drafts_the_same(row, tmp_path)


@pytest.mark.parametrize(
    "row", tiered([row for row in HEAD_ROWS if not row.ahead], FIRST), ids=lambda row: row.name
)
def test_the_chain_that_selects_checkpoints_is_real_decoding(row: HeadRow) -> None:
    law_6.check_the_chain_is_real_decoding(row)


class LateDrafts(law_6.Wrapped):
    """A kind of head whose greedy drafts lack their first token."""

    def draft(self, *given: Any) -> Tensor:
        return super().draft(*given).roll(-1, dims=1)


@of_kinds
def test_a_chain_whose_drafts_begin_a_token_late_is_rejected(row: HeadRow) -> None:
    """Check the counts that depend on drafts; the emitted tokens are the answer's in any case."""
    with pytest.raises(AssertionError, match="the chain differs in rounds, accepted"):
        law_6.check_the_chain_is_real_decoding(row, LateDrafts(row.kind))


@of_kinds
def test_labels_one_position_off_are_rejected(row: HeadRow) -> None:
    with pytest.raises(AssertionError, match=UNEQUAL):
        law_6.check_training_equals_drafting(row, label_shift=1)


@of_kinds
def test_taps_one_layer_off_are_rejected(row: HeadRow) -> None:
    model = law_6.target()
    taps = law_6.other_taps(row.kind.taps(row.shape(model.config)))
    states = TargetStates(model, taps=taps, final=False)
    with pytest.raises(AssertionError, match=UNEQUAL):
        law_6.check_training_equals_drafting(row, states)


@of_kinds
def test_states_one_position_off_are_rejected(row: HeadRow) -> None:
    """Control: training on the state of the tip itself, which no drafter has yet, is rejected."""

    class Later(TargetStates):
        def _forward(self, batch: PackedBatch) -> Tensor:
            return super()._forward(batch).roll(-1, dims=1)

    model = law_6.target()
    states = Later(model, taps=row.kind.taps(row.shape(model.config)), final=False)
    with pytest.raises(AssertionError, match=UNEQUAL):
        law_6.check_training_equals_drafting(row, states)


class Leaking(law_6.Wrapped):
    """A kind of head whose predictions read the token that they predict."""

    def features(
        self,
        head: Any,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        features_NE = super().features(head, states, batch, where, states_PC)
        return features_NE + states.embed(where.labels_N).mean(dim=-1, keepdim=True)


class LeakingStates(law_6.Wrapped):
    """A kind of head whose predictions read each state one position too late."""

    def features(
        self,
        head: Any,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        return super().features(head, states, batch, where, states_PC.roll(-1, dims=0))


@of_kinds
def test_a_leak_of_the_predicted_token_is_rejected(row: HeadRow) -> None:
    with pytest.raises(AssertionError, match=UNEQUAL):
        law_6.check_nothing_unseen_is_read(row, Leaking(row.kind))


@of_kinds
def test_a_leak_of_the_next_state_is_rejected(row: HeadRow) -> None:
    with pytest.raises(AssertionError, match=UNEQUAL):
        law_6.check_nothing_unseen_is_read(row, LeakingStates(row.kind))


@pytest.mark.parametrize("row", [row for row in HEAD_ROWS if row.kind.computes_states])
def test_states_of_drafted_tokens_are_rejected_unless_computed(row: HeadRow) -> None:
    kind = law_6.Wrapped(row.kind)
    law_6.check_nothing_unseen_is_read(row, kind)
    kind.computes_states = False
    with pytest.raises(AssertionError, match=UNEQUAL):
        law_6.check_nothing_unseen_is_read(row, kind)


@of_kinds
def test_a_changed_weight_in_the_folder_is_rejected(row: HeadRow, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        law_6.check_a_folder_drafts_the_same(row, tmp_path, scale=1.01)
