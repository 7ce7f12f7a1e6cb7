"""Tree sizes from past rounds: deep for certain nodes, wide for even ones, none if none pays."""

import pytest

from decoding.interfaces import RoundCosts
from decoding.stopping.ahead_planner import AheadPlanner
from decoding.stopping.planner import PRIOR, WEIGHT

CHEAP = RoundCosts(0.05, (1.0, 1.01, 1.02, 1.03))
EXPENSIVE = RoundCosts(0.3, (1.0, 1.2, 1.4))
WIDTH, DEPTH, MOST = 4, 3, 8


def plan_rounds(
    costs: RoundCosts, chances_LW: list[list[float]], accepted: list[int], rounds: int = 60
) -> tuple[AheadPlanner, list[list[int]]]:
    """Return a planner after rounds with the same chances, and its sizes in each round.

    chances_LW: chances of the nodes of each level. accepted: accepted tokens of a round, indexed
    by its number of drafted levels.
    """
    planner, sizes = AheadPlanner(costs, WIDTH, MOST), []
    for _ in range(rounds):
        planner.begin(DEPTH)
        sizes.append(planner.levels)
        planner.learn(chances_LW[: len(sizes[-1])], accepted[len(sizes[-1])])
    return planner, sizes


def test_a_certain_path_is_drafted_alone() -> None:
    planner, sizes = plan_rounds(EXPENSIVE, [[0.98, 0.0, 0.0, 0.0]] * 3, [0, 1, 2, 3])
    assert sizes[-1] == [1, 1, 1]
    assert planner.trust.value == pytest.approx(1, abs=0.05)


def test_even_children_make_a_wide_tree() -> None:
    """Check that four equally likely children are all drafted, mostly without a second level."""
    _, sizes = plan_rounds(CHEAP, [[0.24] * 4, [0.01] * 4, [0.0] * 4], [0, 1, 1, 1])
    assert sizes.count([4]) > 40
    assert all(chosen[0] == 4 for chosen in sizes[10:])


def test_rejected_drafts_pause_drafting_until_a_retry() -> None:
    """Check that a confident drafter that is always wrong drafts rarely, but is still retried."""
    _, sizes = plan_rounds(EXPENSIVE, [[0.9, 0.05, 0.0, 0.0]] * 3, [0, 0, 0, 0], rounds=400)
    drafted = [n for n, chosen in enumerate(sizes) if chosen]
    assert drafted[0] == 0 and drafted[-1] > 100, "drafting was never retried"
    assert len(drafted) < 100


def test_sizes_keep_their_limits() -> None:
    planner = AheadPlanner(CHEAP, WIDTH, 3)
    assert planner.begin(0) == 0
    planner.learn([], 0)
    assert planner.begin(5) and planner.nodes == 3
    planner.learn([[0.5]] * 5, 1)  # of a vocabulary of one token
    assert planner.begin(5)
    narrow = AheadPlanner(CHEAP, WIDTH, MOST, branching=1)
    narrow.begin(5)
    assert set(narrow.levels) == {1}


@pytest.mark.parametrize(("most_ms", "expected"), [(0.051, 4), (2.0, 1)])
def test_steps_start_from_the_frontier_that_pays(most_ms: float, expected: int) -> None:
    """Check that steps start from all nodes of a level if that is cheap, and from one if not.

    The four nodes are equally likely, and each has one certain child.
    """
    costs = RoundCosts(most_ms, (1.0, 1.0, 1.0), t_draft_by_frontier_ms=((1, 0.05), (4, most_ms)))
    planner, beams = AheadPlanner(costs, WIDTH, 12, frontiers=(1, 2, 4)), []
    for _ in range(60):
        planner.begin(DEPTH)
        beams.append(planner.frontier)
        chosen = planner.levels
        assert sum(chosen) <= 12
        level = [0.24] * planner.frontier
        planner.learn([[0.24] * 4, *[level] * 2][: len(chosen)], min(1, len(chosen)))
    assert beams[-30:].count(expected) > 20


def test_levels_without_rounds_branch_like_the_first() -> None:
    """Check the chances of levels without past rounds: those of the likeliest paths.

    A path's chance is a product of the first level's chances; no node is likelier than its parent.
    """
    planner, a = AheadPlanner(CHEAP, 6), PRIOR
    first, second, third = planner.expected_chances(3, 6)
    assert first == pytest.approx([a * (1 - a) ** rank for rank in range(6)])
    pairs = sorted((x * y for x in first for y in first), reverse=True)
    assert second == pytest.approx(pairs[:6])
    assert third == pytest.approx(sorted((x * y for x in second for y in first), reverse=True)[:6])
    planner.levels = [1]
    planner.learn([[0.1] + [0.0] * 5], 0)
    first, second = planner.expected_chances(2, 1)
    assert first[0] == pytest.approx((WEIGHT * a + 0.1) / (WEIGHT + 1))
    assert second == pytest.approx([first[0] * x for x in first]), "one node is expanded"
    for _ in range(30):
        planner.levels = [1, 1]
        planner.learn([[0.2] * 6, [1.0] * 6], 0)
    first, second = planner.expected_chances(2, 6)
    assert max(second) == first[0]
