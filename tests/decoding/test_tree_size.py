"""Sizes chosen from past rounds: rows whose nodes pass draft deep, rows whose nodes fail stop and
try again, wide trees where that is what pays.
"""

import pytest

from decoding.interfaces import RoundCosts
from decoding.stopping.planner import PRIOR, WEIGHT, AheadPlanner

CHEAP = RoundCosts(0.05, (1.0, 1.01, 1.02, 1.03))
DEAR = RoundCosts(0.3, (1.0, 1.2, 1.4))
WIDTH, DEPTH, MOST = 4, 3, 8


def after(
    costs: RoundCosts, chances_LW: list[list[float]], accepted: list[int], rounds: int = 60
) -> tuple[AheadPlanner, list[list[int]]]:
    """A row whose every tree looks the same; accepted: tokens by levels drafted. Its sizes round by
    round.
    """
    size, sizes = AheadPlanner(costs, WIDTH, MOST), []
    for _ in range(rounds):
        size.begin(DEPTH)
        sizes.append(size.levels)
        size.learn(chances_LW[: len(sizes[-1])], accepted[len(sizes[-1])])
    return size, sizes


def test_a_sure_path_is_drafted_whole_and_alone() -> None:
    size, sizes = after(DEAR, [[0.98, 0.0, 0.0, 0.0]] * 3, [0, 1, 2, 3])
    assert sizes[-1] == [1, 1, 1]
    assert size.trust.value == pytest.approx(1, abs=0.05)


def test_many_even_children_make_a_wide_tree() -> None:
    """A second level is tried now and then."""
    _, sizes = after(CHEAP, [[0.24] * 4, [0.01] * 4, [0.0] * 4], [0, 1, 1, 1])
    assert sizes.count([4]) > 40
    assert all(chosen[0] == 4 for chosen in sizes[10:])


def test_promises_that_never_come_true_end_drafting_until_it_is_tried_again() -> None:
    """The model is sure and always wrong."""
    _, sizes = after(DEAR, [[0.9, 0.05, 0.0, 0.0]] * 3, [0, 0, 0, 0], rounds=400)
    drafted = [n for n, chosen in enumerate(sizes) if chosen]
    assert drafted[0] == 0 and drafted[-1] > 100, "it never tried again"
    assert len(drafted) < 100


def test_a_size_keeps_to_its_limits() -> None:
    size = AheadPlanner(CHEAP, WIDTH, 3)
    assert size.begin(0) == 0
    size.learn([], 0)
    assert size.begin(5) and size.nodes == 3
    size.learn([[0.5]] * 5, 1)  # of a vocabulary of one token
    assert size.begin(5)
    narrow = AheadPlanner(CHEAP, WIDTH, MOST, branching=1)
    narrow.begin(5)
    assert set(narrow.levels) == {1}


@pytest.mark.parametrize(("most_ms", "expected"), [(0.051, 4), (2.0, 1)])
def test_steps_start_from_as_many_beams_as_paid(most_ms: float, expected: int) -> None:
    """Four even nodes a level, each with one sure child: every beam that goes on is a node more on
    all levels below.
    """
    costs = RoundCosts(most_ms, (1.0, 1.0, 1.0), t_draft_by_frontier_ms=((1, 0.05), (4, most_ms)))
    size, beams = AheadPlanner(costs, WIDTH, 12, frontiers=(1, 2, 4)), []
    for _ in range(60):
        size.begin(DEPTH)
        beams.append(size.frontier)
        chosen = size.levels
        assert sum(chosen) <= 12
        level = [0.24] * size.frontier
        size.learn([[0.24] * 4, *[level] * 2][: len(chosen)], min(1, len(chosen)))
    assert beams[-30:].count(expected) > 20


def test_unseen_levels_follow_the_seen_ones() -> None:
    """At first and later on: the likeliest paths, if every token's chances are those of the first
    level; and no node is likelier than its parent.
    """
    size, a = AheadPlanner(CHEAP, 6), PRIOR
    first, second, third = size.expected_chances(3, 6)
    assert first == pytest.approx([a * (1 - a) ** rank for rank in range(6)])
    pairs = sorted((x * y for x in first for y in first), reverse=True)
    assert second == pytest.approx(pairs[:6])
    assert third == pytest.approx(sorted((x * y for x in second for y in first), reverse=True)[:6])
    size.levels = [1]
    size.learn([[0.1] + [0.0] * 5], 0)
    first, second = size.expected_chances(2, 1)
    assert first[0] == pytest.approx((WEIGHT * a + 0.1) / (WEIGHT + 1))
    assert second == pytest.approx([first[0] * x for x in first]), "one node is expanded"
    for _ in range(30):
        size.levels = [1, 1]
        size.learn([[0.2] * 6, [1.0] * 6], 0)
    first, second = size.expected_chances(2, 6)
    assert max(second) == first[0]
