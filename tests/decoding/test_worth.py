"""What a draft is worth, decided while it grows: trees that do not pay are drafted now and then at most, whatever the rule."""

from dataclasses import replace

import pytest

from decoding.graph import GraphDrafter
from decoding.loop import Settings, decode
from decoding.stopping import RoundCosts
from decoding.trees import RankedTree
from decoding.worth import Worth

from .law_3 import target_table
from .rows import draft_table

CHEAP = RoundCosts(0.01, tuple(1 + 0.001 * n for n in range(20)))
DEAR = replace(
    CHEAP, overhead_ms=0.95, plain_overhead_ms=0.0
)  # a draft of one token costs what it gains if it always passes
ALIKE = replace(DEAR, plain_overhead_ms=None)  # as dear without a draft


def drafted(kind: type[RankedTree], temperature: float, costs: RoundCosts) -> tuple[float, float]:
    """The share of rounds that drafted, and what the rounds cost over the same tokens without drafts."""
    settings = Settings(max_new_tokens=150, num_draft_tokens=1, temperature=temperature, costs=costs, ignore_eos=True)
    drafter = kind(model=draft_table(), by_cost=True, frontier=2)
    results = decode(target_table(), drafter, [[1, 2], [3, 4], [0, 3], [2, 2]], settings)
    rounds, drafts = sum(g.rounds for g in results), sum(sum(g.tested_by_depth[:1]) for g in results)
    spent = rounds * costs.plain_ms + drafts * (costs.round_ms(1, 1) - costs.plain_ms)
    return drafts / rounds, spent / (sum(len(g.tokens) for g in results) * costs.plain_ms)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [RankedTree, GraphDrafter])
def test_a_tree_that_does_not_pay_is_rarely_drafted(kind: type[RankedTree], temperature: float) -> None:
    share, spent = drafted(kind, temperature, DEAR)
    assert 0 < share < 0.15 and spent < 1.3
    assert drafted(kind, temperature, CHEAP)[0] > 0.9, "control: at no cost it is"
    assert drafted(kind, temperature, ALIKE)[0] > 0.9, "control: where all rounds have that rest it is"


def test_the_likeliest_nodes_are_verified_within_their_number() -> None:
    worth = Worth(CHEAP, most=3)
    worth.saw([0.9, 0.5, 0.1, 0.0], mass=1.4)
    assert worth.best()[0] == [0, 1, 2]
    assert worth.settle([0.1, 0.9, 0.8, 0.7, 0.0]) == 3
    assert worth.best()[0] == [1, 2, 3]
    steep = Worth(replace(CHEAP, t_target_ms=(1.0, 1.1, 9.0)))
    steep.saw([0.9, 0.5])
    assert steep.settle([0.9, 0.5]) == 1
