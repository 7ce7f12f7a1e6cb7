"""Trees with sampled children: choices that break law 3, acceptance, and budgets.

The rows of rows.py are tested in the files of the laws.

Shapes: B rows, N nodes, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.trees import sampled
from decoding.drafters.trees.budgets import GrowingBudget, PlannedBudget
from decoding.drafters.trees.candidates import NONE, CandidateTree
from decoding.drafters.trees.graph import GraphDrafter
from decoding.drafters.trees.multi_candidate import MultiCandidate
from decoding.drafters.trees.ranked import RankedTree
from decoding.drafters.trees.sampled import SampledGraph, SampledTree
from decoding.drafters.trees.sampled_children import ChildSampler, child_chances
from decoding.drafters.trees.static import StaticTree
from decoding.errors import UserError
from decoding.interfaces import Drafter, Proposal, RoundCosts
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sampling import token_chooser
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.stopping.base import Fixed
from decoding.stopping.planner import chance_of
from jobs.malloc import without_collector
from tests.support.host_waits import models
from tests.support.tiers import tiered
from tests.support.tiny_targets import random_prompts

from .law_3 import P_LIMIT, PROMPT, law_holds, target_table
from .rows import COSTS, draft_table
from .test_running_ahead import paths_of


def narrow_tree() -> Drafter:
    """Return a drafter whose tree has room for only some of its possible children."""
    return RankedTree(model=draft_table(), frontier=3, max_nodes=4)


def choose_by_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose children by their probabilities after they were sampled."""

    def looking(q_BPV: Tensor, drawn_BPK: Tensor) -> tuple[Tensor, Tensor]:
        return drawn_BPK.log(), child_chances(q_BPV, drawn_BPK)[1]

    monkeypatch.setattr(sampled, "child_chances", looking)


def keep_the_best_of_a_finished_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Propose the likeliest two nodes of a larger sampled tree."""
    level, proposal, reached = SampledTree._add_level, SampledTree.proposal, list[Tensor]()

    def noting(self: SampledTree, *given: Tensor) -> tuple[int, Tensor]:
        first, reached_BM = level(self, *given)
        if first == 0:
            reached.clear()
        reached.append(reached_BM)
        return first, reached_BM

    def cut(self: SampledTree, ahead: bool) -> Proposal:
        order_BM = torch.cat(reached, 1).sort(descending=True, stable=True).indices
        self.tree.scores_BM = self.tree.scores_BM.scatter(1, order_BM[:, 2:], NONE)
        return proposal(self, ahead)

    def likely(q_BPV: Tensor, drawn_BPK: Tensor) -> tuple[Tensor, Tensor]:
        return child_chances(q_BPV, drawn_BPK)[0], drawn_BPK.log()

    monkeypatch.setattr(sampled, "child_chances", likely)
    monkeypatch.setattr(
        RankedTree,
        "_budget_for",
        lambda self, sampled, rows: PlannedBudget(rows, 12, 3, None, sampled),
    )
    monkeypatch.setattr(SampledTree, "_add_level", noting)
    monkeypatch.setattr(SampledTree, "proposal", cut)


@pytest.mark.parametrize(
    "broken",
    tiered(
        [choose_by_sampled_tokens, keep_the_best_of_a_finished_tree], [choose_by_sampled_tokens]
    ),
)
def test_law_3_rejects_a_choice_among_sampled_children(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert law_holds(narrow_tree(), "token", "plain") < P_LIMIT


def test_law_3_holds_for_children_chosen_before_sampling() -> None:
    assert law_holds(narrow_tree(), "token", "plain") > P_LIMIT


def sampling_chooser(rows: int, vocab_size: int) -> TokenChooser:
    """Return a chooser of token verification at temperature 1 in its first round."""
    chooser = TokenChooser(Warper(1.0), "token", 0, vocab_size, torch.device("cpu"))
    chooser.begin(list(range(rows)), [0] * rows, [3] * rows, 5)
    return chooser


def test_children_are_sampled_without_replacement_in_order() -> None:
    """Check that first children have the distribution q, and second ones q without the first.

    Missing children repeat a sibling and have probability 0.
    """
    rows, q_V = 20_000, torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    draws = ChildSampler(sampling_chooser(rows, 5), q_V.log().expand(rows, 5), 2)
    tokens_BPK, probs_BPK = draws.sample(draws.q(draws.tips()), 5, 1, 2)
    first_B, second_B = tokens_BPK[:, 0, 0], tokens_BPK[:, 0, 1]
    drawn_BPK = probs_BPK > 0
    assert torch.allclose(probs_BPK[drawn_BPK], q_V[tokens_BPK[drawn_BPK]])
    assert probs_BPK[..., 4].max() == 0, "nothing was left"
    assert drawn_BPK[..., :3].all() and drawn_BPK[..., 3].double().mean() > 0.95
    different_B = tokens_BPK[:, 0].sort(-1).values.diff(dim=-1).gt(0).sum(-1) + 1
    assert torch.equal(different_B, drawn_BPK[:, 0].sum(-1))
    assert torch.allclose(first_B.bincount(minlength=5).double() / rows, q_V, atol=0.02)
    among_B = first_B == 0
    assert torch.allclose(
        second_B[among_B].bincount(minlength=5).double() / among_B.sum(),
        q_V.clone().index_fill_(0, torch.tensor([0]), 0) / 0.5,
        atol=0.02,
    )
    elsewhere_BPK, _ = draws.sample(draws.q(draws.tips()), 5, 1, 1)
    assert not torch.equal(elsewhere_BPK, tokens_BPK), "two nodes share their noise"


FEW: dict[str, Callable[[], Drafter]] = {
    "multi-candidate": lambda: MultiCandidate(model=draft_table(), branching=(4, 3)),
    "static": lambda: StaticTree(model=draft_table()),
    "ranked": lambda: RankedTree(model=draft_table(), frontier=4, max_nodes=12),
}


@pytest.mark.parametrize("ahead", tiered([False, True], [True]))
@pytest.mark.parametrize(
    "name",
    ["ranked", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in FEW if n != "ranked")],
)
def test_missing_children_are_not_tested(
    name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that law 3 holds with missing children, and fails if these are tested as tokens."""
    monkeypatch.setattr(devices, "runs_ahead", lambda device: ahead)
    monkeypatch.setattr(token_chooser, "SAMPLES_PER_CHILD", 1)
    assert law_holds(FEW[name](), "token", "plain") > P_LIMIT
    different = token_chooser.draw_different

    def filled(*given: Any) -> tuple[Tensor, Tensor]:
        tokens_BPK, probs_BPK = different(*given)
        empty_BPK = probs_BPK == 0
        return (tokens_BPK + empty_BPK) % 5, probs_BPK.masked_fill(empty_BPK, 0.2)

    monkeypatch.setattr(token_chooser, "draw_different", filled)
    assert law_holds(FEW[name](), "token", "plain") < P_LIMIT


def test_chances_of_children() -> None:
    """Check the chances of children, each of which is tested if its earlier siblings are rejected.

    Before sampling the first child has the mean chance, and afterwards that of its probability.
    """
    q_BPV = torch.tensor([[[0.5, 0.3, 0.2, 0.0]]], dtype=torch.float64)
    worth_BPK, reached_BPK = child_chances(q_BPV, q_BPV)
    mean = chance_of(0.38)
    later = [(1 - mean) * 0.15, (1 - mean) * 0.85 * 0.1]
    assert worth_BPK[0, 0].exp().tolist() == pytest.approx([mean, *later, 0.0])
    assert reached_BPK[0, 0].exp().tolist() == pytest.approx([chance_of(0.5), *later, 0.0])
    worth_BPK, reached_BPK = child_chances(q_BPV, q_BPV[:, :, [1, 0]])
    assert worth_BPK[0, 0].exp().tolist() == pytest.approx([mean, later[0]])
    assert reached_BPK[0, 0].exp().tolist() == pytest.approx([chance_of(0.3), later[0]])


TREES: dict[str, Callable[[str], Drafter]] = {
    "static": lambda children: StaticTree(model=draft_table(), children=children),
    "ranked": lambda children: RankedTree(model=draft_table(), children=children),
    "graph": lambda children: GraphDrafter(model=draft_table(), match=0, children=children),
}


@pytest.mark.parametrize("name", tiered(TREES, ["ranked"]))
def test_sampled_children_are_accepted_more_often_than_the_top_k(name: str) -> None:
    settings, tau = Settings(max_new_tokens=24, num_draft_tokens=4, temperature=1.0), {}
    for children in ("top_k", "sampled"):
        with without_collector():
            done = decode(target_table(), TREES[name](children), [PROMPT] * 100, settings)
        tau[children] = sum(len(g.tokens) for g in done) / sum(g.rounds for g in done)
    assert tau["sampled"] > tau["top_k"] * 1.05


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """Return a list to which every proposed sampled tree is added."""
    made: list[Proposal] = []
    original = SampledTree.proposal

    def noted(self: SampledTree, ahead: bool) -> Proposal:
        made.append(original(self, ahead))
        return made[-1]

    monkeypatch.setattr(SampledTree, "proposal", noted)
    return made


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("by_cost", [False, True])
def test_a_tree_has_at_most_max_nodes(
    ahead: bool, by_cost: bool, proposals: list[Proposal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "runs_ahead", lambda device: ahead)
    target, draft_model = models()
    drafter = RankedTree(model=draft_model, frontier=3, max_nodes=7, by_cost=by_cost)
    settings = Settings(max_new_tokens=24, num_draft_tokens=3, temperature=1.0, costs=COSTS)
    decode(target, drafter, random_prompts(3), settings)
    counts = [count for proposal in proposals for count in proposal.counts_B]
    assert len(proposals) > 5 and max(counts) <= 7
    assert by_cost or max(counts) == 7


def test_a_host_that_runs_ahead_samples_the_same_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft_model = models()
    prompts, found = random_prompts(6), []
    for ahead in (False, True):
        monkeypatch.setattr(devices, "runs_ahead", lambda device, ahead=ahead: ahead)
        drafter = GraphDrafter(model=draft_model, frontier=3, match=0)
        drafter.prepare(target, None)
        drafter.open(prompts, None, 64)
        proposal = drafter.propose(
            prompts, [4, 4, 4, 3, 1, 0], [Fixed()] * 6, sampling_chooser(6, target.vocab_size)
        )
        found.append([paths_of(proposal, row) for row in range(6)])
    assert found[0] == found[1]
    assert [len(paths) for paths in found[0]] == [16, 16, 16, 16, 3, 0]


def test_merged_nodes_sample_separately_from_one_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that merged nodes share one computed distribution, but not their noise."""
    trees: list[SampledGraph] = []
    original = SampledGraph.grow

    def grow(self: SampledGraph) -> None:
        trees.append(self)
        original(self)

    monkeypatch.setattr(SampledGraph, "grow", grow)
    drafter = GraphDrafter(model=draft_table(), frontier=4, max_nodes=40, match=0)
    settings = Settings(max_new_tokens=8, num_draft_tokens=4, temperature=1.0)
    decode(target_table(), drafter, [PROMPT] * 20, settings)
    shared = different = 0
    for tree in trees:
        for parents, tokens, rows in zip(
            tree.tree.parents_BM.tolist(), tree.tree.tokens_BM.tolist(), tree._rows_BM.tolist()
        ):
            children: dict[int, list[int]] = {}
            for token, parent in zip(tokens, parents):
                children.setdefault(parent, []).append(token)
            nodes = [node for node in children if node >= 0]
            twins = [(a, b) for a in nodes for b in nodes if a < b and rows[a] == rows[b]]
            shared += len(twins)
            different += sum(children[a][0] != children[b][0] for a, b in twins)
            assert len({row for row in rows if row}) <= tree._read_BN.shape[1]
    assert shared > 50 and different > 0.2 * shared


def test_planned_budgets_learn_where_nodes_are_accepted() -> None:
    """Check that certain levels make a deep and narrow tree, and even ones a wide tree."""
    budgets = {}
    for name, chances in (("sure", [0.95, 0.0, 0.0]), ("even", [0.4, 0.3, 0.2])):
        budget = PlannedBudget(1, 6, 3, None, sampled=True)
        for _ in range(40):
            (depth,) = budget.begin([5])
            levels = list[int]()
            while not levels or budget.more():
                reached = chances[0] ** len(levels)
                levels.append(budget.admit(reached * torch.tensor([chances]))[0])
            assert len(levels) == depth and sum(levels) <= 6 and levels[0] <= 3
            readback = budget.readback(CandidateTree.none(1, torch.device("cpu"), torch.float32))
            assert readback is not None
            (chances_BLW,) = readback(torch.empty(0))
            budget.learn([chances_BLW.tolist()], [1])
        budgets[name] = levels
    assert len(budgets["sure"]) == 5 and budgets["even"][:2] == [3, 3]


def test_a_growing_budget_stops_when_another_level_does_not_pay() -> None:
    costs = RoundCosts(0.3, (1.0, 1.1, 1.2, 1.3, 1.4, 1.5))
    budget = GrowingBudget(2, 4, costs, sampled=True)
    assert budget.begin([6, 0]) == [6, 0]
    assert budget.admit(torch.tensor([[0.9, 0.02, 0.0], [0.9, 0.02, 0.0]])) == [1, 0]
    assert budget.more()
    assert budget.admit(torch.tensor([[0.1, 0.05, 0.0], [0.9, 0.9, 0.9]])) == [0, 0]
    assert not budget.more()
    budget.learn([], [1, 0])
    assert budget.begin([6, 6]) == [6, 6]
    assert budget.admit(torch.full((2, 9), 0.9)) == [4, 4], "at most the maximum number of nodes"
    assert not budget.more()


def test_an_unknown_kind_of_children_is_refused() -> None:
    for make in TREES.values():
        with pytest.raises(UserError, match="children is 'guessed', expected top_k or sampled"):
            make("guessed")
