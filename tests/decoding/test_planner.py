"""Decisions from costs: trees that do not pay are rarely drafted, batches decide before rounds."""

from dataclasses import replace

import pytest

from decoding.drafters.trees.graph import GraphDrafter
from decoding.drafters.trees.ranked import RankedTree
from decoding.interfaces import RoundCosts
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.stopping.planner import Backoff, StepPlanner
from decoding.stopping.policies import make_stopping
from tests.support.tiers import tiered

from .law_3 import target_table
from .rows import draft_table

CHEAP = RoundCosts(0.01, tuple(1 + 0.001 * n for n in range(20)))
# A draft of one token costs as much as it gains if it is always accepted.
EXPENSIVE = replace(CHEAP, overhead_ms=0.95, plain_overhead_ms=0.0)
EQUAL = replace(EXPENSIVE, plain_overhead_ms=None)  # all rounds have this overhead


def drafted(kind: type[RankedTree], temperature: float, costs: RoundCosts) -> tuple[float, float]:
    """Return the share of rounds with a draft, and the cost relative to decoding without drafts."""
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


@pytest.mark.parametrize("temperature", tiered([0.0, 1.0], [1.0]))
@pytest.mark.parametrize("kind", [RankedTree, GraphDrafter])
def test_a_tree_that_does_not_pay_is_rarely_drafted(
    kind: type[RankedTree], temperature: float
) -> None:
    share, spent = drafted(kind, temperature, EXPENSIVE)
    assert 0 < share < 0.15 and spent < 1.3
    assert drafted(kind, temperature, CHEAP)[0] > 0.9, "control: free drafts"
    assert drafted(kind, temperature, EQUAL)[0] > 0.9, "control: the same overhead in all rounds"


def test_rows_of_a_batch_retry_together() -> None:
    """Check that paused rows of a batch resume together, and a single row once drafting pays."""
    for rows, expected in ((4, {32}), (1, {21, 30})):
        again = set()
        for paused, pays_again in ((3, 21), (9, 30)):
            backoff = Backoff(rows)
            drafted = [n for n in range(50) if backoff.drafts(n < paused or n >= pays_again)]
            assert drafted[:paused] == list(range(paused)) and drafted[-1] == 49
            again.add(drafted[paused])
        assert again == expected


@pytest.mark.parametrize("name", ["cost_ratio", "thompson_calibrated"])
def test_policies_of_a_batch_decide_from_costs_before_the_round(name: str) -> None:
    (alone,) = make_stopping(name, [0], None, CHEAP)
    assert alone.reads == "confidence"
    policy = make_stopping(name, [0] * 4, None, replace(CHEAP, rows=4))[0]
    assert policy.reads == "nothing" and policy.limit(4) > 0 and policy.more(1, None)


@pytest.mark.parametrize("kind", [RankedTree, GraphDrafter])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_of_a_batch_are_sized_by_past_rounds(
    kind: type[RankedTree], temperature: float
) -> None:
    """Check that cost-based trees of a batch keep the target's text and have accepted tokens."""
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


def test_a_step_starts_from_the_nodes_that_pay() -> None:
    """Check that a node is expanded if its expected tokens are worth its share of the step."""
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


def test_the_likeliest_nodes_are_verified_up_to_the_maximum() -> None:
    planner = StepPlanner(CHEAP, most=3)
    planner.begin(4)
    planner.add([0.9, 0.5, 0.1, 0.0])
    assert planner.nodes == 3
    assert planner.settle([0.1, 0.9, 0.8, 0.7, 0.0]) == 3
    steep = StepPlanner(replace(CHEAP, t_target_ms=(1.0, 1.1, 9.0)))
    steep.begin(4)
    assert steep.settle([0.9, 0.5]) == 1


def test_a_row_pauses_after_rejections_and_retries() -> None:
    """Check that drafting pauses after three rejections or more, and that no pause is endless."""
    costs = RoundCosts(0.1, (1.0, 1.2), overhead_ms=0.2, plain_overhead_ms=0.0)
    planner, drafted = StepPlanner(costs), []
    for number in range(400):
        if planner.begin(1):
            drafted.append(number)
            planner.add([0.5])
        planner.learn(None, 0)
    assert drafted[:3] == [0, 1, 2]
    assert 3 < len(drafted) < 40 and drafted[-1] > 200
