"""Chains of the fused step in one call: bits equal to those of one forward for each token."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.with_lookup import LookupFirst
from decoding.errors import UserError
from decoding.interfaces import ChainCall, ChainChoice, RoundCosts, TokenConfidence
from decoding.loop import decode
from decoding.models.draft_vocabulary import D2T
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.stopping.base import Fixed
from tests.support.tiny_targets import VOCABULARY, hf_model, native_of, random_prompts

SIZES = {"hidden_size": 96, "intermediate_size": 200, "head_dim": 64}
KEPT_IDS_D = torch.tensor([0, 2, 3, 9, 10, 30, 31, 47])
BUDGETS = ([4, 0, 1, 3], [1, 1, 1, 1], [2, 5, 0, 5], [6, 2, 3, 4])


class Counting(NativeTarget):
    """A target that counts its calls for chains, and refuses them if it is to draft by steps."""

    steps, calls = False, 0

    def chain_call(self, num_tokens: int) -> ChainCall | None:
        call = None if self.steps else super().chain_call(num_tokens)
        self.calls += call is not None
        return call


def drafter(
    dtype: torch.dtype = torch.float32,
    *,
    steps: bool = False,
    restricted: bool = False,
    twins: bool = False,
    noise: float = 0.0,
    scale: float = 1.0,
) -> ChainDrafter:
    """Return a drafter.

    steps: whether to draft by steps. restricted: to a draft vocabulary. twins: whether logits of
    tokens 2n and 2n + 1 are equal. scale: factor of the logits.
    """
    made = hf_model("llama", layers=1, **SIZES)
    config, state = made.config.to_dict(), made.state_dict()
    state["lm_head.weight"] = scale * made.lm_head.weight + noise
    if twins:
        state["lm_head.weight"][1::2] = state["lm_head.weight"][::2]
    if restricted:
        config |= {"draft_vocab_size": len(KEPT_IDS_D), "tie_word_embeddings": False}
        state["lm_head.weight"] = state["lm_head.weight"][KEPT_IDS_D]
        state[D2T] = KEPT_IDS_D - torch.arange(len(KEPT_IDS_D))
    model = Counting.from_state(config, state, dtype=dtype, execution="fused")
    model.steps = steps
    return ChainDrafter(model=model)


@torch.inference_mode()
def trace(drafter: ChainDrafter, vocab_size: int = VOCABULARY) -> list[Tensor]:
    """Return the drafts, lengths and next logits of some rounds with ragged rows.

    After each round a row keeps up to two drafted tokens, and the last budgets repeat every one.
    """
    chooser = TokenChooser(Warper(0.0), "greedy", 0, vocab_size, torch.device("cpu"))
    sequences = random_prompts(4, seed=2)
    drafter.open(sequences, None, 100)
    found = []
    for number, budgets in enumerate(BUDGETS):
        proposal = drafter.propose(sequences, budgets, [Fixed()] * 4, chooser)
        assert proposal.counts_B == budgets and proposal.steps == max(budgets)
        found += [proposal.tokens_BN, torch.tensor(drafter.model.lengths_B)]
        kept = [min(count, (row + number) % 3) for row, count in enumerate(budgets)]
        sequences = [
            [*sequence, *tokens[:keep], 7]
            for sequence, tokens, keep in zip(sequences, proposal.tokens_BN.tolist(), kept)
        ]
        # logits have the bits of the cache behind them
        found.append(drafter.model.forward(torch.full((4, 1), 5))[0])
        drafter.rollback([len(sequence) - 1 for sequence in sequences])
    return found


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("restricted", [False, True], ids=["full", "restricted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_call_drafts_what_steps_do(dtype: torch.dtype, restricted: bool) -> None:
    one, by_steps = (drafter(dtype, steps=steps, restricted=restricted) for steps in (False, True))
    assert equal(trace(one), trace(by_steps))
    assert (one.model.calls, by_steps.model.calls) == (len(BUDGETS), 0)


def test_another_models_chains_differ() -> None:  # the control: else the test above proves nothing
    assert not equal(trace(drafter()), trace(drafter(noise=1e-3, steps=True)))


def test_the_lowest_of_equal_tokens_is_drafted() -> None:
    one, by_steps = (trace(drafter(twins=True, steps=steps)) for steps in (False, True))
    assert equal(one, by_steps)
    assert all((tokens % 2 == 0).all() for tokens in one[::3])
    assert any((tokens % 2 == 1).any() for tokens in trace(drafter())[::3])  # the control


@pytest.mark.parametrize("restricted", [False, True], ids=["full", "restricted"])
def test_tokens_that_the_target_lacks_are_not_drafted(restricted: bool) -> None:
    smaller = 31
    one, by_steps = (
        trace(drafter(restricted=restricted, steps=steps), smaller) for steps in (False, True)
    )
    assert equal(one, by_steps)
    assert all((tokens < smaller).all() for tokens in one[::3])
    everything = trace(drafter(restricted=restricted))[::3]
    assert any((tokens >= smaller).any() for tokens in everything)  # the control


@torch.inference_mode()
def sampled(drafter: ChainDrafter, vocab_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tokens and the distributions of some sampled rounds with ragged rows."""
    chooser = TokenChooser(Warper(0.7), "token", 5, vocab_size, torch.device("cpu"))
    sequences = random_prompts(4, seed=2)
    drafter.open(sequences, None, 100)
    tokens, distributions = [], []
    for number, budgets in enumerate(BUDGETS):
        chooser.begin([1, 2, 3, 4], [number] * 4, [9, 8, 7, 6], max(budgets))
        proposal = drafter.propose(sequences, budgets, [Fixed()] * 4, chooser)
        assert proposal.q_BNV is not None and proposal.q_BNV.shape[2] == vocab_size
        for row, count in enumerate(budgets):
            tokens.append(proposal.tokens_BN[row, :count])
            distributions.append(proposal.q_BNV[row, :count])
        drafter.rollback([len(sequence) - 1 for sequence in sequences])
    return tokens, distributions


@pytest.mark.parametrize("vocab_size", [VOCABULARY, 31], ids=["full", "smaller"])
@pytest.mark.parametrize("restricted", [False, True], ids=["full", "restricted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_call_samples_what_steps_do(
    dtype: torch.dtype, restricted: bool, vocab_size: int
) -> None:
    made = [drafter(dtype, steps=steps, restricted=restricted) for steps in (False, True)]
    (one, one_q), (other, other_q) = (sampled(each, vocab_size) for each in made)
    assert equal(one, other) and made[0].model.calls == len(BUDGETS)
    for mine, reference in zip(one_q, other_q, strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-6, atol=1e-9)
    another, _ = sampled(drafter(dtype, restricted=restricted, twins=True), vocab_size)
    assert not equal(one, another)  # the control


def test_a_token_far_below_the_likeliest_has_probability_zero() -> None:
    """Check that it is 0 where it is in the steps, as a sampling rule divides by it."""
    (_, one_q), (_, other_q) = (
        sampled(drafter(steps=steps, scale=300.0), VOCABULARY) for steps in (False, True)
    )
    zeros = [reference == 0 for reference in other_q]
    assert any(each.any() for each in zeros) and not all(each.all() for each in zeros)
    assert all((mine[each] == 0).all() for mine, each in zip(one_q, zeros, strict=True))


def test_a_call_samples_nothing_from_a_model_with_nan() -> None:
    one = drafter(noise=float("nan"))
    with pytest.raises(UserError, match="drafter.*non-finite probabilities"):
        decode(
            native_of(hf_model("llama", **SIZES), dtype=torch.float32, execution="fused"),
            one,
            random_prompts(2),
            Settings(max_new_tokens=8, temperature=1.0),
        )
    assert one.model.calls > 0


COSTS = RoundCosts(0.1, (1.0, 1.1, 1.2, 1.3, 1.4), 0.1, rows=3)


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({}, True),
        ({"stopping": "thompson"}, True),
        ({"stopping": "cost_ratio", "costs": COSTS}, True),
        ({"temperature": 1.0, "verify": "typical"}, True),
        ({"stopping": "confidence"}, True),
        ({"stopping": "cost_ratio", "costs": replace(COSTS, rows=1)}, True),
        ({"temperature": 0.8, "verify": "token"}, True),
        ({"temperature": 1.0, "verify": "block", "stopping": "confidence"}, True),
        ({"stopping": "entropy"}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"temperature": 1.0, "verify": "coupled"}, True),
        ({"temperature": 0.7, "verify": "coupled", "stopping": "confidence"}, True),
        ({"temperature": 1.0, "verify": "token", "top_k": 5}, False),
    ],
)
def test_a_batch_decodes_alike_in_one_call_and_by_steps(changes: dict, calls: bool) -> None:
    target = native_of(hf_model("llama", **SIZES), dtype=torch.float32, execution="fused")
    settings = Settings(**{"max_new_tokens": 16, "num_draft_tokens": 4, "seed": 3, **changes})
    drafters = [drafter(steps=steps) for steps in (False, True)]
    one, by_steps = (
        [(made.tokens, made.drafted, made.accepted, made.draft_steps) for made in generations]
        for generations in (decode(target, each, random_prompts(3), settings) for each in drafters)
    )
    assert one == by_steps
    assert (drafters[0].model.calls > 0) == calls


def test_text_with_lookups_before_some_rows_is_the_targets() -> None:
    target = native_of(hf_model("llama", **SIZES), dtype=torch.float32, execution="fused")
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12] * 3, *random_prompts(3)]
    settings = Settings(max_new_tokens=24, num_draft_tokens=3)
    inner = drafter()
    made = decode(target, LookupFirst(inner, 2), prompts, settings)
    plain = decode(target, None, prompts, settings)
    assert [one.tokens for one in made] == [one.tokens for one in plain]
    assert inner.model.calls > 0


class AfterTwo(Fixed):
    """A policy whose decision depends on when it is called: it stops at two committed tokens."""

    reads = "time"

    def __init__(self, model: NativeTarget) -> None:
        self.model, self.before = model, model.lengths_B[0]

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        return self.model.lengths_B[0] < self.before + 2


def proposed(one: ChainDrafter, sequence: Sequence[int], policy: Fixed) -> int:
    chooser = TokenChooser(Warper(0.0), "greedy", 0, VOCABULARY, torch.device("cpu"))
    with torch.inference_mode():
        return one.propose([sequence], [9], [policy], chooser).counts_B[0]


def test_a_policy_that_reads_the_time_is_asked_after_every_token() -> None:
    one = drafter()
    one.open([[3, 4]], None, 40)
    assert proposed(one, [3, 4], AfterTwo(one.model)) == 2
    assert one.model.calls == 0
    one.rollback([1])
    assert proposed(one, [3, 4], Fixed()) == 9 and one.model.calls == 1  # the control


def test_a_first_step_too_wide_for_the_fused_one_drafts_by_steps() -> None:
    one = drafter()
    one.open([[3]], None, 200)
    assert proposed(one, [3] * 140, Fixed()) == 9 and one.model.calls == 0
    assert proposed(one, [3] * 152, Fixed()) == 9 and one.model.calls == 1  # the control


def test_a_chain_past_the_cache_and_an_unknown_token_are_refused() -> None:
    model = drafter().model
    model.open(1, 10)
    call, choice = model.chain_call(1), ChainChoice(VOCABULARY)
    assert call is not None and call([[5]], [5], [9], choice)[0].shape == (1, 10)
    for token, count in ((VOCABULARY, 2), (5, 9)):
        with pytest.raises(IndexError, match=f"tokens from 0 to {VOCABULARY - 1}, lengths of"):
            call([[token]], [token], [count], choice)
