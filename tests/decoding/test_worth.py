"""What a draft is worth, decided while it grows: trees that do not pay are drafted now and then at
most, whatever the rule.
"""

from dataclasses import replace

import pytest

from decoding.drafters.trees.graph import GraphDrafter
from decoding.drafters.trees.ranked import RankedTree
from decoding.interfaces import RoundCosts
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.stopping.planner import Backoff, StepPlanner
from decoding.stopping.policies import make_stopping

from .law_3 import target_table
from .rows import draft_table

CHEAP = RoundCosts(0.01, tuple(1 + 0.001 * n for n in range(20)))
# A draft of one token costs what it gains if it always passes.
DEAR = replace(CHEAP, overhead_ms=0.95, plain_overhead_ms=0.0)
ALIKE = replace(DEAR, plain_overhead_ms=None)  # as dear without a draft


def drafted(kind: type[RankedTree], temperature: float, costs: RoundCosts) -> tuple[float, float]:
    """The share of rounds that drafted, and what the rounds cost over the same tokens without
    drafts.
    """
    settings = Settings(
        max_new_tokens=150,
        num_draft_tokens=1,
        temperature=temperature,
        costs=costs,
        ignore_eos=True,
    )
    drafter = kind(model=draft_table(), by_cost=True, frontier=2)
    results = decode(target_table(), drafter, [[1, 2], [3, 4], [0, 3], [2, 2]], settings)
    rounds, drafts = (
        sum(g.rounds for g in results),
        sum(sum(g.tested_by_depth[:1]) for g in results),
    )
    spent = rounds * costs.plain_ms + drafts * (costs.round_ms(1, 1) - costs.plain_ms)
    return drafts / rounds, spent / (sum(len(g.tokens) for g in results) * costs.plain_ms)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [RankedTree, GraphDrafter])
def test_a_tree_that_does_not_pay_is_rarely_drafted(
    kind: type[RankedTree], temperature: float
) -> None:
    share, spent = drafted(kind, temperature, DEAR)
    assert 0 < share < 0.15 and spent < 1.3
    assert drafted(kind, temperature, CHEAP)[0] > 0.9, "control: at no cost it is"
    assert drafted(kind, temperature, ALIKE)[0] > 0.9, (
        "control: where all rounds have that rest it is"
    )


def test_rows_of_a_batch_try_again_together() -> None:
    """Whenever each of them gave up; a row of its own tries when it sees fit."""
    for rows, expected in ((4, {32}), (1, {21, 30})):
        again = set()
        for gave_up, sees_fit in ((3, 21), (9, 30)):
            backoff = Backoff(rows)
            drafted = [n for n in range(50) if backoff.drafts(n < gave_up or n >= sees_fit)]
            assert drafted[:gave_up] == list(range(gave_up)) and drafted[-1] == 49
            again.add(drafted[gave_up])
        assert again == expected


def test_a_policy_of_a_batch_settles_the_length_before_the_round() -> None:
    (alone,) = make_stopping("cost_ratio", [0], None, CHEAP)
    assert alone.reads == "confidence"
    policy = make_stopping("cost_ratio", [0] * 4, None, replace(CHEAP, rows=4))[0]
    assert policy.reads == "nothing" and policy.limit(4) > 0 and policy.more(1, None)


@pytest.mark.parametrize("kind", [RankedTree, GraphDrafter])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_of_a_batch_are_sized_by_the_rounds_before(
    kind: type[RankedTree], temperature: float
) -> None:
    """Its rows have the target's text, their own lengths, and drafts."""
    settings = Settings(
        max_new_tokens=40, num_draft_tokens=3, temperature=temperature, verify="coupled", seed=4
    )
    prompts = [[1, 2], [3, 4], [0, 3], [2, 2]]
    plain = decode(target_table(), None, prompts, settings)
    costs = replace(CHEAP, rows=4)
    done = decode(
        target_table(),
        kind(model=draft_table(), by_cost=True),
        prompts,
        replace(settings, costs=costs),
    )
    assert [g.tokens for g in done] == [g.tokens for g in plain]
    assert sum(g.accepted for g in done) > 40


def test_a_step_goes_on_from_the_nodes_that_are_worth_it() -> None:
    """As many as gain more tokens than their share of a step costs."""
    flat, steep = (
        replace(CHEAP, t_draft_by_frontier_ms=((1, 0.01), (4, most)), plain_overhead_ms=0.0)
        for most in (0.011, 3.0)
    )
    for costs, expected in ((flat, 4), (steep, 1)):
        planner = StepPlanner(costs)
        assert planner.begin(4) == 4
        chances = [0.2, 0.5, 0.1, 0.15]
        planner.add(chances)
        assert planner.start_from(chances) == planner.frontier == expected
        assert planner.continues
    sampled = StepPlanner(steep)
    sampled.begin(4)
    assert sampled.admit([0.4, 0.3, 0.3, 0.2]) == 4
    assert sampled.start_from([0.05, 0.9, 0.05, 0.0]) == 1
    assert sampled.start_from([0.0, 0.0, 0.0, 0.0]) == 0 and not sampled.continues


def test_the_likeliest_nodes_are_verified_within_their_number() -> None:
    planner = StepPlanner(CHEAP, most=3)
    planner.begin(4)
    planner.add([0.9, 0.5, 0.1, 0.0])
    assert planner.nodes == 3
    assert planner.settle([0.1, 0.9, 0.8, 0.7, 0.0]) == 3
    steep = StepPlanner(replace(CHEAP, t_target_ms=(1.0, 1.1, 9.0)))
    steep.begin(4)
    assert steep.settle([0.9, 0.5]) == 1


def test_a_row_gives_up_after_failures_and_tries_again() -> None:
    """Hope outlives a few failures, and none gives up for good."""
    costs = RoundCosts(0.1, (1.0, 1.2), overhead_ms=0.2, plain_overhead_ms=0.0)
    planner, drafted = StepPlanner(costs), []
    for number in range(400):
        if planner.begin(1):
            drafted.append(number)
            planner.add([0.5])
        planner.learn(None, 0)
    assert drafted[:3] == [0, 1, 2]
    assert 3 < len(drafted) < 40 and drafted[-1] > 200
