"""Trees of a block's likeliest tokens, as in JetSpec (arXiv 2606.18394).

A block gives one distribution for every depth, so the nodes of a depth have the same children. A
node is a path of ranks, and its chance is the product of its tokens' probabilities. Adding the
likeliest node again and again gives the best tree of every size (heads/rank_trees.py). The tree
depends only on the text, and its children are point masses, so verification is exact.

Shapes: B rows, K depths, R ranks, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import NO_NODE, Chooser, Proposal, RoundCosts
from decoding.stopping.planner import RoundPlanner
from heads.rank_trees import RANKS, Path, choose_tree

LEAST_CHANCE = 1e-6  # of a token that is worth a node


@dataclass
class _Row:
    """The plans of a row with costs, and its tree of this round."""

    plans: RoundPlanner
    is_asked: bool = False  # for a tree
    depth: int = 0
    nodes: int = 0


class TreePlanner:
    """Chooser of each round's trees.

    With costs, a row pauses while its trees do not pay (`RoundPlanner`): how much a tree gains is
    known only after the pass.
    """

    def __init__(self, max_nodes: int) -> None:
        """Choose trees of at most `max_nodes` nodes."""
        self.max_nodes = max_nodes
        self._costs: RoundCosts | None = None
        self._rows: list[_Row] = []  # with costs

    def open(self, rows: int, costs: RoundCosts | None) -> None:
        """Start rows. costs: of a round; None: trees are as large as they may be."""
        self._costs, self._rows = costs, []
        self.add_rows(rows)

    def add_rows(self, count: int) -> None:
        """Start further rows."""
        if self._costs is not None:
            costs = self._costs.of_one_pass()
            self._rows += [_Row(RoundPlanner(costs)) for _ in range(count)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        if self._costs is not None:
            self._rows = [self._rows[row] for row in rows]

    def depths(self, depths_B: Sequence[int]) -> list[int]:
        """Return the depth of each row's tree, at most, and 0 where none is expected to pay."""
        if self._costs is None:
            return [*depths_B]
        for row, depth in zip(self._rows, depths_B, strict=True):
            row.is_asked = row.plans.chain_length(depth) > 0
        return [depth * row.is_asked for row, depth in zip(self._rows, depths_B, strict=True)]

    def learn(self, accepted_B: Sequence[int]) -> None:
        """End the round; accepted tokens of rows without a tree belong to another drafter."""
        for row, accepted in zip(self._rows, accepted_B):
            if row.is_asked and not row.nodes:
                row.plans.learn_dropped()
            else:
                ms = row.plans.costs.round_ms(row.depth, row.nodes)
                row.plans.learn_round(row.depth, accepted, ms)
            row.is_asked, row.depth, row.nodes = False, 0, 0

    def width(self, depth: int) -> int:
        """Return the largest number of nodes of a tree of this depth."""
        return self.max_nodes if depth else 0

    def proposal(
        self,
        logits_BKV: Tensor,
        depths_B: Sequence[int],
        chooser: Chooser,
    ) -> Proposal:
        """Return each row's tree, empty where no node pays. depths_B: as `depths` returned them."""
        ranks = min(RANKS, logits_BKV.shape[2])
        scored = [
            chooser.log_scores(logits_BKV[:, depth : depth + 1], depth).topk(ranks, dim=-1)
            for depth in range(logits_BKV.shape[1])
        ]
        chances_BKR = torch.cat([each.values for each in scored], 1).exp()
        chances_BKR = chances_BKR * (chances_BKR >= LEAST_CHANCE)
        ids_BKR = torch.cat([each.indices for each in scored], 1)
        chances, ids = devices.read(chances_BKR, ids_BKR)
        tokens, parents, depths = [], [], []
        for row_chances, row_ids, depth in zip(chances, ids, depths_B, strict=True):
            paths: list[Path] = []
            if depth:
                chances_KR = row_chances[:depth]
                paths = choose_tree(chances_KR, self._costs, self.max_nodes, has_passed=True)
            index = {path: node for node, path in enumerate(paths)}
            depths.append(max(map(len, paths), default=0))
            tokens.append([int(row_ids[len(path) - 1][path[-1]]) for path in paths])
            parents.append([index.get(path[:-1], -1) for path in paths])
        counts_B = [len(row) for row in tokens]
        for row, reached, nodes in zip(self._rows, depths, counts_B):
            row.depth, row.nodes = reached, nodes
        N, device = max(counts_B), logits_BKV.device
        tokens_BN = devices.tensor([[*row, *[0] * (N - len(row))] for row in tokens], device)
        parents_BN = devices.tensor(
            [[*row, *[NO_NODE] * (N - len(row))] for row in parents], device
        )
        return Proposal(tokens_BN.long(), counts_B, parents_BN.long(), steps=1)
