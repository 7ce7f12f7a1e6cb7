"""Typical acceptance: as published, on chains and trees, and lossy."""

import math

import pytest
import torch

from decoding import UserError
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.static import StaticTree
from decoding.interfaces import Proposal
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.verification.typical import DELTA, EPSILON, typical
from jobs.drafter_use import DrafterUse
from tests.support.tiny_targets import random_prompts

from .law_3 import P_LIMIT, law_holds
from .rows import draft_table
from .test_laws import models

V = 7


def least(p_V: torch.Tensor) -> float:
    """Return the probability above which a token is accepted, computed in plain Python."""
    entropy = -sum(p * math.log(p) for p in p_V.tolist() if p > 0)
    return min(EPSILON, DELTA * math.exp(-entropy))


def chooser_of(rows: int) -> TokenChooser:
    made = TokenChooser(Warper(1.0), "typical", 3, V, torch.device("cpu"))
    made.begin(list(range(rows)), [0] * rows, [5] * rows, 4)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_is_accepted_up_to_the_first_untypical_token(seed: int) -> None:
    torch.manual_seed(seed)
    logits_BNV = 2.5 * torch.randn(9, 4, V, dtype=torch.float64)
    tokens_BN = logits_BNV[:, :-1].topk(2).indices[:, :, seed % 2]
    found = typical(logits_BNV, Proposal(tokens_BN, [3] * 9), chooser_of(9))
    for b in range(9):
        p_NV = logits_BNV[b].softmax(-1)
        fine = [p_NV[n, t].item() > least(p_NV[n]) for n, t in enumerate(tokens_BN[b].tolist())]
        accepted = next((n for n, kept in enumerate(fine) if not kept), 3)
        assert found.accepted_B[b] == accepted and found.tested_B[b] == min(accepted + 1, 3)
        assert found.tokens_B[b][:-1] == tokens_BN[b, :accepted].tolist()


def test_the_longest_typical_path_of_a_tree_is_accepted() -> None:
    """Check a tree whose first branch is typical but short, and whose second is longer."""
    sure = torch.full((1, 4, V), -9.0, dtype=torch.float64)
    sure[0, 0, [1, 2]] = 0.0  # after the tip
    sure[0, 1, 3] = 9.0  # after node 0, whose likely token is not node 2
    sure[0, 2, 5] = 9.0  # after node 1, whose likely token is node 2
    proposal = Proposal(torch.tensor([[1, 2, 5]]), [3], torch.tensor([[-1, -1, 1]]))
    found = typical(sure, proposal, chooser_of(1))
    assert (found.paths_B, found.accepted_B, found.tested_B) == ([[1, 2]], [2], [2])
    assert found.tokens_B[0][:2] == [2, 5]
    below_the_first = Proposal(torch.tensor([[1, 2, 5]]), [3], torch.tensor([[-1, -1, 0]]))
    assert typical(sure, below_the_first, chooser_of(1)).paths_B == [[0]]


def test_law_3_rejects_it() -> None:
    """Check that law 3 detects the changed distribution."""
    assert law_holds(ChainDrafter(model=draft_table()), "typical", "plain") < P_LIMIT


@pytest.mark.parametrize("kind", [ChainDrafter, StaticTree])
def test_a_batched_row_equals_a_single_one(kind: type) -> None:
    target, _, draft_model = models()
    settings = Settings(max_new_tokens=12, temperature=1.0, verify="typical", seed=2)
    prompts = random_prompts(5)
    together = decode(target, kind(model=draft_model), prompts, settings)
    for number, prompt in enumerate(prompts):
        (alone,) = decode(target, kind(model=draft_model), [prompt], settings, request_ids=[number])
        assert alone.tokens == together[number].tokens
    assert any(g.accepted for g in together)


def test_greedy_decoding_is_never_lossy() -> None:
    target, _, draft_model = models()
    prompts = random_prompts(3)
    greedy = Settings(max_new_tokens=12, verify="typical")
    plain = decode(target, None, prompts, greedy)
    drafted = decode(target, ChainDrafter(model=draft_model), prompts, greedy)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]


def test_overlapped_schedules_refuse_typical_acceptance() -> None:
    with pytest.raises(
        UserError, match="verify=typical does not work with schedule 'pearl_virtual'"
    ):
        DrafterUse(verify="typical", schedule="pearl_virtual")
