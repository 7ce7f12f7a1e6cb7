"""Sizes of trees with top-k children, and the lifetime of a budget.

Sampled trees are in test_sampled_trees.py, planners in test_ahead_planner.py and test_planner.py.
"""

import pytest
import torch
from torch import Tensor

from decoding.drafters.trees.budgets import GrowingBudget, PlannedBudget
from decoding.drafters.trees.candidates import NONE, CandidateTree
from decoding.drafters.trees.ranked import RankedTree
from decoding.interfaces import RoundCosts
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.stopping.base import Fixed

from .rows import draft_table

COSTS = RoundCosts(0.3, (1.0, 1.1, 1.2, 1.3, 1.4, 1.5))


def scores(*chances_BM: list[float]) -> tuple[Tensor, Tensor]:
    """Return the path scores (log chances), and the number of nodes with a chance in each row."""
    scores_BM = torch.tensor(chances_BM, dtype=torch.float64).log()
    return scores_BM, (scores_BM > NONE).sum(1)


def test_a_host_that_runs_ahead_does_not_count_nodes() -> None:
    """Check that such a host proposes the maximum number of nodes for every row that drafts."""
    grown = scores([0.5, 0.4, 0.3, 0.2], [0.5, 0.0, 0.0, 0.0], [0.0] * 4)
    for ahead, expected in ((False, [3, 1, 0]), (True, [3, 3, 0])):
        budget = PlannedBudget(3, 3, 2, None, sampled=False, ahead=ahead)
        assert budget.begin([2, 2, 0]) == [2, 2, 0]
        budget.grow(grown[0], grown[0])
        assert budget.depths_B == [2, 2, 0]
        assert budget.settle(*grown) == expected


def test_planned_sizes_follow_past_rounds() -> None:
    """Check that certain paths make a deep and narrow tree, and that rejections end drafting."""
    for chance, accepted, expected in ((1.0, 5, [1] * 5), (0.0, 0, [])):
        budget = PlannedBudget(1, 6, 4, COSTS, sampled=False)
        for _ in range(40):
            (depth,) = budget.begin([5])
            chances_BLW = torch.tensor([[[chance, 0.0, 0.0]] * depth], dtype=torch.float64)
            budget.learn([chances_BLW.tolist()] if depth else [], [min(accepted, depth)])
        (depth,) = budget.begin([5])
        assert [1] * depth == expected and budget.settle(*scores([0.9] * 9)) == [len(expected)]


def test_planned_sizes_read_back_the_chances_of_each_level() -> None:
    seen = CandidateTree.none(1, torch.device("cpu"), torch.float64)
    for level, chances in ((1, [0.5, 0.3]), (2, [0.1, 0.4])):
        seen.levels = level
        nowhere = torch.zeros(1, 2, dtype=torch.long)
        seen.add(nowhere, nowhere - 1, scores(chances)[0], nowhere + level)
    readback = PlannedBudget(1, 2, 2, COSTS, sampled=False).readback(seen)
    assert readback is not None
    (chances_BLW,) = readback(torch.empty(0))
    assert chances_BLW.tolist()[0] == [pytest.approx([0.5, 0.3]), pytest.approx([0.4, 0.1])]


def test_a_top_k_tree_ends_when_another_level_does_not_pay() -> None:
    """Check that growth stops at such a level, and that the best number of nodes is proposed."""
    budget = GrowingBudget(2, 4, COSTS, sampled=False)
    assert budget.begin([6, 0]) == [6, 0]
    sure, _ = scores([0.9, 0.02], [0.9, 0.02])
    budget.grow(sure, sure[:, :1])
    assert budget.depths_B == [6, 0]
    unsure, _ = scores([0.05, 0.01], [0.9, 0.9])
    budget.grow(unsure, unsure[:, :1])
    assert budget.depths_B == [2, 0]
    assert budget.settle(*scores([0.9, 0.02, 0.05, 0.01], [0.0] * 4)) == [1, 0]
    budget.select([0])
    budget.learn([], [1])
    assert budget.begin([3]) == [3], "the next round begins without estimates"


def test_a_budget_lasts_for_its_batch() -> None:
    """Check that rounds share a budget, and that a resumed conversation gets a new one.

    Trees with sampled and with top-k children have separate budgets.
    """
    drafter, prompt, made = RankedTree(model=draft_table()), [1, 2], []
    drafter.open([prompt], None, 32)
    for rule in ("token", "token", "greedy"):
        chooser = TokenChooser(
            Warper(0.0 if rule == "greedy" else 1.0), rule, 0, 5, torch.device("cpu")
        )
        chooser.begin([0], [0], [2], 3)
        drafter.propose([prompt], [2], [Fixed()], chooser)
        drafter.rollback([1])
        made.append(drafter._budget)
        assert made[-1] is not None and made[-1].sampled == (rule == "token")
    assert made[0] is made[1]
    drafter.resume(prompt, 0, None)
    drafter.propose([prompt], [2], [Fixed()], chooser)
    assert drafter._budget is not None and drafter._budget is not made[-1]
