"""Trees of a block's likeliest tokens, as in JetSpec (arXiv 2606.18394).

A block gives one distribution for every depth, so the nodes of a depth have the same children. A
node is a path of ranks, and its chance is the product of its tokens' probabilities. Adding the
likeliest node again and again gives the best tree of every size (heads/rank_trees.py). The tree
depends only on the text, and its children are point masses, so verification is exact.

Shapes: B rows, K depths, R ranks, N nodes, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import NO_NODE, Chooser, Proposal, RoundCosts
from heads.rank_trees import RANKS, choose_tree

LEAST_CHANCE = 1e-6  # of a token that is worth a node


class TreePlanner:
    """Chooser of each round's trees."""

    def __init__(self, max_nodes: int) -> None:
        """Choose trees of at most `max_nodes` nodes."""
        self.max_nodes = max_nodes

    def width(self, depth: int) -> int:
        """Return the largest number of nodes of a tree of this depth."""
        return self.max_nodes if depth else 0

    def proposal(
        self,
        logits_BKV: Tensor,
        depths_B: Sequence[int],
        chooser: Chooser,
        costs: RoundCosts | None,
    ) -> Proposal:
        """Return each row's tree; it is empty where no draft pays by these costs.

        costs: of a round; None: the largest trees.
        """
        ranks = min(RANKS, logits_BKV.shape[2])
        scored = [
            chooser.log_scores(logits_BKV[:, depth : depth + 1], depth).topk(ranks, dim=-1)
            for depth in range(logits_BKV.shape[1])
        ]
        chances_BKR = torch.cat([each.values for each in scored], 1).exp()
        chances_BKR = chances_BKR * (chances_BKR >= LEAST_CHANCE)
        ids_BKR = torch.cat([each.indices for each in scored], 1)
        chances, ids = devices.read(chances_BKR, ids_BKR)
        tokens, parents = [], []
        for row_chances, row_ids, depth in zip(chances, ids, depths_B, strict=True):
            paths = choose_tree(row_chances[:depth], costs, self.max_nodes) if depth else []
            index = {path: node for node, path in enumerate(paths)}
            tokens.append([int(row_ids[len(path) - 1][path[-1]]) for path in paths])
            parents.append([index.get(path[:-1], -1) for path in paths])
        counts_B = [len(row) for row in tokens]
        N, device = max(counts_B), logits_BKV.device
        tokens_BN = devices.tensor([[*row, *[0] * (N - len(row))] for row in tokens], device)
        parents_BN = devices.tensor(
            [[*row, *[NO_NODE] * (N - len(row))] for row in parents], device
        )
        return Proposal(tokens_BN.long(), counts_B, parents_BN.long(), steps=1)
