"""Prompts shorter than what heads read: the first tokens of a text have few states before them."""

from typing import Any

import pytest
import torch

from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS, HeadRow

ONE, TWO = [7], [40, 2]


@pytest.mark.parametrize("row", HEAD_ROWS, ids=lambda row: row.name)
def test_prompts_of_one_and_two_tokens_draft_exactly(row: HeadRow) -> None:
    """Check output in float64, greedy for a row alone and coupled for a ragged batch."""
    model = law_6.target().double()
    native = NativeTarget.from_state(
        model.config.to_dict(), model.state_dict(), dtype=torch.float64, execution="eager"
    )
    drafter = row.drafter(law_6.head_of(row, model).double())
    sampled: dict[str, Any] = {"temperature": 1.0, "verify": "coupled", "seed": 3}
    cases: list[tuple[list[list[int]], dict[str, Any]]] = [([ONE], {}), ([TWO, ONE], sampled)]
    for prompts, chosen in cases:
        settings = Settings(8, num_draft_tokens=3, **chosen)
        plain = decode(native, None, prompts, settings)
        drafted = decode(native, drafter, prompts, settings)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert all(one.drafted and len(one.tokens) == 8 for one in drafted)
        other = decode(native, None, [[*prompt, 9] for prompt in prompts], settings)
        assert [one.tokens for one in other] != [one.tokens for one in plain], "control"
