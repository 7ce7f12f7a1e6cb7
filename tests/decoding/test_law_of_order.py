"""Law 3 for slots that are filled out of order, as a diffusion drafter may fill them.

A test of p / q assumes that a token was sampled given the text and the tokens before it. A slot
whose distribution read a later token keeps no such promise, though its recorded q is the one that
it was sampled from: given the tokens before it, the later token has another distribution.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from decoding.drafters.base import StatelessDrafter
from decoding.interfaces import Capabilities, Chooser, Policies, Proposal, Tokens

from .law_3 import P_LIMIT, law_holds

SYMBOLS = 5
LIKE_THE_OTHER = 2.0  # logit of a slot's token that equals the other slot's


class TwoSlots(StatelessDrafter):
    """Drafter of two tokens, of which the one sampled second is likely to equal the first.

    order: the slots as they are filled. The proposal claims that they were filled from left to
    right, each with the q that it was sampled from.
    """

    capabilities = Capabilities(shape="chain", has_q=True, steps="round", stops_by_token=False)
    name = "two slots"

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: object, capacity: int) -> None:
        """Do nothing: the slots do not read the text."""

    def select(self, rows: Sequence[int]) -> None:
        """Do nothing: no row has a state."""

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        logits_BV = torch.zeros(len(sequences_B), SYMBOLS, dtype=torch.float64)
        tokens, q = {}, {}
        for slot in self.order:
            tokens[slot], q[slot] = chooser.draft(logits_BV, slot)
            logits_BV = LIKE_THE_OTHER * F.one_hot(tokens[slot], SYMBOLS).double()
        counts_B = [min(budget, 2) for budget in budgets_B]
        assert q[0] is not None and q[1] is not None
        rows_q = torch.stack((q[0], q[1]), 1)
        return Proposal(torch.stack((tokens[0], tokens[1]), 1), counts_B, None, rows_q, 1)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_slots_filled_in_order_keep_the_law(rule: str) -> None:
    assert law_holds(TwoSlots((0, 1)), rule, "plain") > P_LIMIT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_3_rejects_slots_filled_in_another_order_than_claimed(rule: str) -> None:
    assert law_holds(TwoSlots((1, 0)), rule, "plain") < P_LIMIT
