"""Merging of equal nodes in tensors, compared with a plain implementation in dictionaries."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.budgets import PlannedBudget
from decoding.drafters.trees.candidates import NONE, CandidateTree
from decoding.drafters.trees.graph import GraphDrafter
from decoding.drafters.trees.ranked import RankedTree
from decoding.interfaces import Chooser, Policies, Proposal, Tokens
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.stopping.base import Fixed
from tests.support.host_waits import models
from tests.support.tiny_targets import random_prompts

from .test_running_ahead import paths_of


class GraphByDictionaries(GraphDrafter):
    """Reference that finds equal nodes in dictionaries and copies descendants from a queue."""

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        self.endings = [tuple(s[len(s) - self.match :]) if self.match else () for s in sequences_B]
        self.known: list[dict[tuple[int, ...], int]] = [{} for _ in sequences_B]
        self.merged: list[dict[int, int]] = [{} for _ in sequences_B]
        return super().propose(sequences_B, budgets_B, stopping_B, chooser)

    def _expandable(self, tree: CandidateTree, first: int, scores_BPK: Tensor) -> Tensor:
        closed_BP = (scores_BPK.flatten(1) < self._least_leaf).tolist()
        lists = (tree.tokens_BM.tolist(), tree.parents_BM.tolist(), tree.scores_BM.tolist())
        for b, (tokens, parents, scores) in enumerate(zip(*lists)):
            for node in sorted(range(first, len(tokens)), key=lambda n: (-scores[n], n)):
                if scores[node] == NONE:
                    continue
                path = path_to(parents, node)
                words = (*self.endings[b], *(tokens[n] for n in path))
                twin = self.known[b].setdefault(words[max(0, len(words) - self.match - 1) :], node)
                if twin != node and twin not in path:
                    self.merged[b][node] = twin
                    closed_BP[b][node - first] = True
        closed = devices.tensor(closed_BP, tree.scores_BM.device)
        return tree.scores_BM[:, first:].masked_fill(closed, NONE)

    def _likeliest(self, tree: CandidateTree, budget: PlannedBudget) -> Proposal:
        copies_B = [self.copies(tree, b, depth) for b, depth in enumerate(budget.depths_B)]
        width = max(len(copies) for copies in copies_B)
        if width:
            padded = [copies + [(0, -1, NONE, 0)] * (width - len(copies)) for copies in copies_B]
            columns = [[[node[i] for node in row] for row in padded] for i in range(4)]
            tokens, parents, scores, depths = (
                devices.tensor(column, tree.scores_BM.device, like.dtype)
                for column, like in zip(
                    columns, (tree.tokens_BM, tree.parents_BM, tree.scores_BM, tree.depths_BM)
                )
            )
            tree.add(tokens, parents, scores, depths)
        return RankedTree._likeliest(self, tree, budget)

    def copies(
        self, tree: CandidateTree, row: int, depth: int
    ) -> list[tuple[int, int, float, int]]:
        """Return (token, parent, score, depth) of the copies below merged nodes, parents first."""
        merged = self.merged[row]
        columns = (tree.tokens_BM, tree.parents_BM, tree.scores_BM, tree.depths_BM)
        tokens, parents, scores, depths = (column[row].tolist() for column in columns)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            if scores[node] > NONE:
                children.setdefault(parent, []).append(node)
        copies: list[tuple[int, int, float, int]] = []
        # (node that gets children, its score and depth, node whose children it gets)
        waiting = [(node, scores[node], depths[node], twin) for node, twin in merged.items()]
        while waiting and len(copies) < 4 * self.max_nodes:
            node, score, level, twin = waiting.pop(0)
            for child in children.get(merged.get(twin, twin), ()) if level < depth else ():
                new_score = score + scores[child] - scores[parents[child]]
                waiting.append((len(tokens) + len(copies), new_score, level + 1, child))
                copies.append((tokens[child], node, new_score, level + 1))
        return copies


def path_to(parents: list[int], node: int) -> list[int]:
    """Return the nodes from the tip's child down to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("match", [0, 1, 2, 1000])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_graph_proposes_the_paths_of_its_reference(
    monkeypatch: pytest.MonkeyPatch, match: int, ahead: bool
) -> None:
    """Check that tensors and dictionaries propose the same paths, those of copies included."""
    target, draft_model = models()
    prompts, found = random_prompts(12), []
    for kind in (GraphByDictionaries, GraphDrafter):
        runs_ahead = ahead and kind is GraphDrafter
        monkeypatch.setattr(devices, "runs_ahead", lambda device, ahead=runs_ahead: ahead)
        drafter = kind(model=draft_model, frontier=3, max_nodes=40, match=match, leaf_threshold=0.0)
        drafter.prepare(target, None)
        drafter.open(prompts, None, 64)
        chooser = TokenChooser(Warper(0.0), "greedy", 0, target.vocab_size, target.device)
        chooser.begin([], [], [], 5)
        proposal = drafter.propose(prompts, [4] * 9 + [3, 1, 0], [Fixed()] * 12, chooser)
        found.append([paths_of(proposal, row) for row in range(len(prompts))])
        if isinstance(drafter, GraphByDictionaries):
            merged = sum(len(pairs) for pairs in drafter.merged)
    assert found[0] == found[1]
    assert len(found[0][0]) > 10 and not found[0][-1]
    assert bool(merged) == (match < 2), "otherwise the test sees no merged node"
