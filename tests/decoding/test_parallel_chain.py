"""The parallel chain beyond the laws: a forward a round, draft lengths, and the ends of caches."""

from typing import Any

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.parallel import ParallelChain
from decoding.drafters.with_lookup import LookupFirst
from decoding.interfaces import RoundCosts
from decoding.loop import decode
from decoding.rounds.settings import Settings
from tests.support.oracle_drafters import Foresight
from tests.support.tiny_targets import hf_model, native_of, random_prompts


class Counting(Foresight):
    """A draft model that counts its forwards and stores the tokens of each."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.read: list[torch.Tensor] = []

    def forward(self, tokens_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(tokens_BN.clone())
        return super().forward(tokens_BN)


def drafter_of(model: Any, tokens: int) -> ParallelChain:
    return ParallelChain(model=model, tokens=tokens, mask_token=model.mask_token)


def test_a_round_is_one_forward_over_unseen_and_mask_tokens() -> None:
    model = hf_model("llama")
    draft_model: Any = Counting(native_of(model))
    drafter = drafter_of(draft_model, 4)
    (done,) = decode(
        native_of(model), drafter, [[5, 6, 7]], Settings(20, num_draft_tokens=9, stopping="fixed")
    )
    assert done.accepted_by_depth == [4] * 4, "the copy of the target is right, to its 4 tokens"
    mask, widths = draft_model.mask_token, [read.shape[1] for read in draft_model.read]
    assert widths == [1 + 3, 5 + 3, 5 + 3, 5 + 3], "after a round, its 5 tokens are unseen"
    assert [int((read == mask).sum()) for read in draft_model.read] == [3] * 4
    assert drafter.model.lengths_B == [3 + 15], "the cache holds no mask token"


def test_deeper_drafts_equal_those_of_a_chain_of_a_model_with_foresight() -> None:
    """Check rows of different lengths, with drafts longer than what is left of some."""
    model = hf_model("llama")
    target, prompts = native_of(model), random_prompts(7, seed=2)
    settings = Settings(23, num_draft_tokens=6, stopping="fixed")
    chain = ChainDrafter(model=native_of(model, noise=0.03))
    parallel = drafter_of(Foresight(native_of(model, noise=0.03)), 6)
    found = [
        [(one.tokens, one.rounds, one.trace) for one in decode(target, drafter, prompts, settings)]
        for drafter in (chain, parallel)
    ]
    assert found[0] == found[1]
    assert any("0" in trace and "1" in trace for _, _, trace in found[0])


@pytest.mark.parametrize(("t_draft_ms", "pays"), [(1.4, True), (6.0, False)])
def test_policies_charge_a_draft_of_any_length_once(t_draft_ms: float, pays: bool) -> None:
    """Check with drafts of four tokens, all of which are accepted, and a target of 1 ms a token."""
    model = hf_model("llama")
    drafter = drafter_of(Foresight(native_of(model)), 4)
    costs = RoundCosts(t_draft_ms, (1.0, 1.0))
    settings = Settings(60, num_draft_tokens=4, stopping="cost_ratio", costs=costs)
    (done,) = decode(native_of(model), drafter, [[5, 6, 7]], settings)
    assert (done.drafted > 30) == pays


def test_drafts_end_at_the_models_context() -> None:
    model = hf_model("llama")
    target = native_of(model, max_length=40)
    prompts = [[4] * 3, [4] * 22, [7, 5]]
    plain = decode(target, None, prompts, Settings(100))
    drafter = drafter_of(Foresight(native_of(model, max_length=20)), 8)
    drafted = decode(target, drafter, prompts, Settings(100, num_draft_tokens=8))
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert drafted[1].drafted == 0 < drafted[0].drafted


def test_rounds_of_a_lookup_leave_many_unseen_tokens() -> None:
    """Check that they are read, in parts where the cache has no room for the padding of a row."""
    model = hf_model("llama")
    target, prompts = native_of(model), [[5, 6, 7, 8] * 6, [9], [3, 4] * 9]
    plain = decode(target, None, prompts, Settings(60))
    lookup = LookupFirst(drafter_of(Foresight(native_of(model, noise=0.03)), 4), min_match=1)
    drafted = decode(target, lookup, prompts, Settings(60, num_draft_tokens=4, stopping="fixed"))
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
