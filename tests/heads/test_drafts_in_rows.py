"""What the slots of drafts see in a packed row, against a matrix written by hand."""

import numpy as np
import pytest
import torch

from heads.drafts_in_rows import group_by_row, slot_mask, visible_text
from training.data.packing import PackedBatch, Sample, collate

# Two documents of three and four tokens in a row of eight, and drafts of two slots whose tips are
# the places 2 and 5. Left of the bar: the row's tokens; right of it: the slots.
BIDIRECTIONAL = """
11000000|1100
11000000|1100
00011000|0011
00011000|0011
"""
CAUSAL = """
11000000|1000
11000000|1100
00011000|0010
00011000|0011
"""


def packed() -> PackedBatch:
    samples = [Sample(np.arange(size, dtype=np.int32), np.ones(size, bool)) for size in (3, 4)]
    return collate(samples, [[0, 1]], 8)


def matrix(drawn: str) -> torch.Tensor:
    lines = [line.replace("|", "") for line in drawn.split()]
    return torch.tensor([[one == "1" for one in line] for line in lines])


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize(("causal", "drawn"), [(False, BIDIRECTIONAL), (True, CAUSAL)])
def test_slots_see_their_documents_text_before_the_tip_and_their_draft(
    causal: bool, drawn: str, shared: int
) -> None:
    visible_RAT = visible_text(packed(), torch.tensor([[2, 5]]))
    found = slot_mask(visible_RAT, 2, causal, shared)
    assert found.shape == (1, 1, shared * 4, 12)
    assert torch.equal(found[0, 0], matrix(drawn).repeat(shared, 1))
    assert not torch.equal(found, slot_mask(visible_RAT, 2, not causal, shared)), "the control"


def test_drafts_are_grouped_by_row_and_padded() -> None:
    drafts_RA, seats_M = group_by_row(torch.tensor([1, 0, 1]), 3)
    assert drafts_RA.tolist() == [[1, 3], [0, 2], [3, 3]]
    assert drafts_RA.flatten()[seats_M].tolist() == [0, 1, 2]
    assert group_by_row(torch.tensor([], dtype=torch.long), 2)[0].tolist() == [[0], [0]]
