"""Sizes chosen from past rounds: rows whose nodes pass draft deep, rows whose nodes fail stop and
try again, wide trees where that is what pays.
"""

import pytest

from decoding.drafters.trees.sizing import TreeSize
from decoding.interfaces import RoundCosts

CHEAP = RoundCosts(0.05, (1.0, 1.01, 1.02, 1.03))
DEAR = RoundCosts(0.3, (1.0, 1.2, 1.4))
WIDTH, DEPTH, MOST = 4, 3, 8


def after(
    costs: RoundCosts, chances_LW: list[list[float]], accepted: list[int], rounds: int = 60
) -> tuple[TreeSize, list[list[int]]]:
    """A row whose every tree looks the same; accepted: tokens by levels drafted. Its sizes round by
    round.
    """
    size, sizes = TreeSize(costs, WIDTH), []
    for _ in range(rounds):
        sizes.append(size.choose(DEPTH, MOST))
        size.learn(chances_LW[: len(sizes[-1])], accepted[len(sizes[-1])])
    return size, sizes


def test_a_sure_path_is_drafted_whole_and_alone() -> None:
    size, sizes = after(DEAR, [[0.98, 0.0, 0.0, 0.0]] * 3, [0, 1, 2, 3])
    assert sizes[-1] == [1, 1, 1]
    assert size.trust == pytest.approx(1, abs=0.05)


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
    size = TreeSize(CHEAP, WIDTH)
    assert size.choose(0, MOST) == []
    size.learn([], 0)
    assert sum(size.choose(5, 3)) == 3
    size.learn([[0.5]] * 5, 1)  # of a vocabulary of one token
    assert size.choose(5, 3)


@pytest.mark.parametrize(("most_ms", "expected"), [(0.051, 4), (2.0, 1)])
def test_steps_start_from_as_many_beams_as_paid(most_ms: float, expected: int) -> None:
    """Four even nodes a level, each with one sure child: every beam that goes on is a node more on
    all levels below.
    """
    costs = RoundCosts(most_ms, (1.0, 1.0, 1.0), t_draft_by_frontier_ms=((1, 0.05), (4, most_ms)))
    size, beams = TreeSize(costs, WIDTH, frontiers=(1, 2, 4)), []
    for _ in range(60):
        chosen = size.choose(DEPTH, 12)
        beams.append(size.frontier)
        assert sum(chosen) <= 12
        size.learn([[0.24] * 4, *[[0.24] * size.frontier] * 2][: len(chosen)], min(1, len(chosen)))
    assert beams[-30:].count(expected) > 20


def test_a_number_of_beams_is_judged_by_the_rounds_that_had_it() -> None:
    """The first level is the same whatever goes on from it; what was not tried is thought of as of
    the best paths through so many.
    """
    size = TreeSize(CHEAP, WIDTH, frontiers=(1, 4))
    first, one = size._chances(2, 1)
    assert size._chances(2, 4)[0] == first
    assert one == pytest.approx([first[0] * x for x in first])
    size.choose(2, 8)
    size.chosen, size.frontier = [1, 1], 1
    size.learn([[0.5, 0.4, 0.0, 0.0], [0.3, 0.1, 0.0, 0.0]], 1)
    after = {beams: size._chances(2, beams) for beams in (1, 4)}
    assert after[1][0] == after[4][0] != first
    assert after[1][1][0] == pytest.approx((4 * after[1][0][0] ** 2 + 0.3) / 5)
    assert after[4][1][0] == pytest.approx(after[4][0][0] ** 2), "never tried"


def test_unseen_levels_follow_the_seen_ones() -> None:
    """At first and later on: the likeliest paths, if every token's chances are those of the first
    level; and no node is likelier than its parent.
    """
    size, a = TreeSize(CHEAP, 6), TreeSize.FIRST
    first, second, third = size._chances(3)
    assert first == pytest.approx([a * (1 - a) ** rank for rank in range(6)])
    pairs = sorted((x * y for x in first for y in first), reverse=True)
    assert second == pytest.approx(pairs[:6])
    assert third == pytest.approx(sorted((x * y for x in second for y in first), reverse=True)[:6])
    size.choose(1, 6)
    size.learn([[0.1] + [0.0] * 5], 0)
    first, second, third = size._chances(3)
    assert first[0] == pytest.approx((4 * a + 0.1) / 5)
    assert second[0] == pytest.approx(first[0] ** 2)
    for _ in range(30):
        size.chosen = [1, 1]
        size.learn([[0.2] * 6, [1.0] * 6], 0)
    assert max(size._chances(2)[1]) == size._chances(2)[0][0]
