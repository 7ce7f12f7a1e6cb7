"""Drafting with block drafters: options, lengths, confidences, trees and passes that pay."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding.drafters.with_lookup import LookupFirst
from decoding.errors import UserError
from decoding.interfaces import Drafter, RoundCosts
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from heads.block.confidence import count_kept
from heads.block.context import StoredContext
from heads.block.drafter import BlockDrafter
from heads.block.tree import TreePlanner
from tests.heads.test_block import SIZES
from tests.support.block_heads import random_block, sizes_of
from tests.support.tiny_targets import hf_model, native_of


def small_target(**changes: Any) -> NativeTarget:
    return native_of(hf_model("llama", layers=2, **changes))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "bush"}, "shape is 'bush', expected tree or chain"),
        ({"children": "drawn"}, "children is 'drawn'"),
        ({"max_nodes": 0}, "max_nodes is 0, expected 1 or more"),
        ({"stop_below": 0.5}, "stop_below is 0.5, expected 0, or a chance below 1 if its head"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        BlockDrafter(head=random_block(SIZES), **options)


def test_a_tree_of_a_corrected_head_is_refused():
    head = random_block(SIZES, correction="markov", rank=3)
    with pytest.raises(UserError, match="has a markov correction, whose distributions differ"):
        BlockDrafter(head=head, shape="tree")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48}, "hidden size of 32, but"),
        ({"vocab_size": 50}, "vocabulary of 48, but"),
        ({"layers": 3}, "reads a target of 2 layers, but 'in-memory' has 3"),
    ],
    ids=str,
)
def test_a_head_of_another_target_is_refused(changes: dict[str, Any], words: str):
    drafter = BlockDrafter(head=random_block(sizes_of(small_target())))
    other = native_of(hf_model("llama", **{"layers": 2, **changes}))
    with pytest.raises(UserError, match=words):
        decode(other, drafter, [[3, 4]], Settings(4))


def test_a_tap_beyond_the_target_is_refused():
    head = random_block(sizes_of(small_target()))
    head.config = replace(head.config, taps=(3,))
    with pytest.raises(UserError, match="taps holds 3, expected layers of"):
        decode(small_target(), BlockDrafter(head=head), [[3, 4]], Settings(4))


def test_a_draft_longer_than_the_block_ends_with_it():
    head = random_block(sizes_of(small_target()))
    drafter = BlockDrafter(head=head)
    done = decode(small_target(), drafter, [[3, 4]], Settings(40, num_draft_tokens=9))[0]
    assert drafter.width(9) == 6 and len(done.tested_by_depth) <= 6
    assert done.drafted >= 6 * (done.rounds - 7)


def test_a_confident_draft_ends_where_it_stops_to_pay():
    assert count_kept([0.9, 0.9, 0.1, 0.9], 0.0, None) == 4
    assert count_kept([0.9, 0.9, 0.1, 0.9], 0.5, None) == 2
    assert count_kept([0.4, 0.9], 0.5, None) == 0
    steep = RoundCosts(0.5, tuple(1 + 0.4 * n for n in range(6)))
    assert count_kept([0.9, 0.9, 0.1, 1.0], 0.0, steep) == 2
    flat = RoundCosts(0.5, (1.0,) * 6)
    assert count_kept([0.9, 0.9, 0.1, 1.0], 0.0, flat) == 4


@pytest.mark.parametrize("later", [0.0, 0.3, 0.6, 1.0])
def test_a_token_is_kept_whatever_the_later_confidences(later: float):
    """Check that no decision depends on a confidence that has seen the token.

    These costs have a step, over which a search of the best length would look.
    """
    stepped = RoundCosts(0.1, (1.0, 1.9, 2.0, 2.0, 2.0))
    assert count_kept([0.6, later, later, later], 0.0, stepped) == 0


def test_a_block_is_written_after_the_stored_context_and_nothing_is_copied():
    head = random_block(SIZES)
    context = StoredContext(head, 2, 20)
    context.append(torch.randn(2, 9, 16, dtype=torch.float64), [9, 4])
    first, second = (torch.full((2, 2, 7, 4), value, dtype=torch.float64) for value in (1.0, 2.0))
    keys, values = context.join(0, (first, first))
    text = keys[:, :, :9].clone()
    again, _ = context.join(0, (second, second))
    assert again.data_ptr() == keys.data_ptr() and keys.shape == values.shape == (2, 2, 16, 4)
    assert torch.equal(keys[:, :, 9:], second) and torch.equal(keys[:, :, :9], text)


def passes_of(
    drafter: BlockDrafter, rounds: int, costs: RoundCosts, **more: Any
) -> tuple[int, int]:
    """Return the passes and the drafted tokens of a text of so many rounds."""
    passes: list[int] = []
    count = drafter.head.register_forward_hook(lambda *_: passes.append(1))
    settings = Settings(rounds, num_draft_tokens=3, costs=costs, temperature=1.0, **more)
    (done,) = decode(small_target(), drafter, [[3, 4]], settings)
    count.remove()
    return len(passes), done.drafted


def test_no_tree_is_drafted_if_none_pays():
    """Check that trees that do not pay cost no passes, and that a useless head soon pauses."""
    head = random_block(sizes_of(small_target()), in_block_mask="causal")
    by_cost = BlockDrafter(head=head, shape="tree", by_cost=True)
    flat = RoundCosts(0.3, (1.0,) * 40)
    assert passes_of(by_cost, 60, RoundCosts(9.0, (1.0, 2.0))) == (0, 0)
    passes, drafted = passes_of(by_cost, 60, flat)
    assert 0 < passes < 30 and drafted > 0, "it pauses, as hardly a token is accepted"
    fixed = BlockDrafter(head=head, shape="tree")
    assert passes_of(fixed, 60, flat)[0] > 50, "the control"


def test_a_pass_whose_tokens_are_dropped_counts():
    """Check a confidence that keeps no token: the stopping rule learns what its passes cost."""
    head = random_block(sizes_of(small_target()), correction="markov", rank=4, confidence=True)
    assert head.confidence is not None
    head.confidence.proj.weight.zero_()
    head.confidence.proj.bias.fill_(-20.0)
    drafter, costs = BlockDrafter(head=head, stop_below=0.5), RoundCosts(0.3, (1.0,) * 9)
    passes, drafted = passes_of(drafter, 100, costs)
    assert drafted == 0 < passes < 50
    fixed = BlockDrafter(head=head, stop_below=0.5)
    assert passes_of(fixed, 100, costs, stopping="fixed")[0] > 90, "the control"


@pytest.mark.parametrize("before", [False, True])
def test_trees_by_cost_work_where_a_round_asks_for_none(before: bool):
    """Check texts of one token, rows that end and rows that a lookup drafts for."""
    head = random_block(sizes_of(small_target()), in_block_mask="causal")
    drafter: Drafter = BlockDrafter(head=head, shape="tree", by_cost=True)
    if before:
        drafter = LookupFirst(drafter, min_match=1)
    costs = RoundCosts(0.3, (1.0,) * 40)
    for tokens in (1, 2, 30):
        prompts = [[3, 4, 3, 4, 3, 4], [5], [8, 9, 10]]
        settings = Settings(tokens, num_draft_tokens=3, costs=costs, stop_token_ids=(7, 11))
        drafted, plain = (decode(small_target(), one, prompts, settings) for one in (drafter, None))
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_a_small_tree_that_is_always_accepted_keeps_paying():
    """Check that only the levels of a tree count as tested."""
    planner = TreePlanner(1)
    costs = RoundCosts(0.7, tuple(1 + 0.1 * n for n in range(9)))
    planner.open(1, costs)
    sure = torch.full((1, 3, 61), -20.0)
    sure[:, :, 5] = 20.0
    chooser = TokenChooser(Warper(0.0, 0, 1.0, 0.0), "greedy", 0, 61, torch.device("cpu"))
    for _ in range(40):
        (depth,) = planner.depths([3])
        assert depth == 3
        assert planner.proposal(sure, [depth], chooser).counts_B == [1]
        planner.learn([1])
