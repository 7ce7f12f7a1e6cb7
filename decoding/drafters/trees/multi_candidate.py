"""Multi-candidate drafting: trees with a fixed number of sampled children at each depth.

Source: Yang et al. 2024, "Multi-Candidate Speculative Decoding" (arXiv 2401.06706): the k-config,
sampled without replacement, and recursive rejection (decoding/verification/token_tree.py). The
drafter runs over the complete tree again at each depth, since a shallow model's forward over a few
more tokens costs almost nothing, and no cache row moves before verification.

Shapes: B rows, N nodes so far, P nodes of the deepest level, K children of a node, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Proposal, Stopping


class MultiCandidate(ChainDrafter):
    """A causal LM that proposes k-config trees.

    Hydra: `_target_: decoding.drafters.trees.multi_candidate.MultiCandidate`. branching: children
    of a node by depth; deeper nodes have one. The draft length is the tree's depth, which stopping
    policies only limit before a round. The other arguments are those of ChainDrafter.
    """

    capabilities = Capabilities(shape="tree", has_q=True, steps="round")

    def __init__(self, *arguments: Any, branching: Sequence[int] = (3, 2), **named: Any) -> None:
        super().__init__(*arguments, **named)
        if not branching or min(branching) < 1:
            raise UserError(
                f"branching is {list(branching)}, expected one or more numbers, each at least 1."
            )
        self.branching = tuple(branching)
        self._depth = 1

    def width(self, gamma: int) -> int:
        """Return the number of nodes of a tree of depth gamma."""
        return self._nodes_by_depth(gamma)[-1]

    def _children_at(self, depth: int) -> int:
        return self.branching[depth] if depth < len(self.branching) else 1

    def _nodes_by_depth(self, gamma: int) -> list[int]:
        """Return the number of nodes of the trees of depth 0 .. gamma."""
        nodes, level = [0], 1
        for depth in range(gamma):
            level *= self._children_at(depth)
            nodes.append(nodes[-1] + level)
        return nodes

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """Draft each row's tree as deep as its budget; rows past this model's context get none."""
        depths_B = self._within_context(sequences_B, budgets_B)
        self._depth = depth = max(depths_B)
        if depth == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), depths_B)
        B = len(depths_B)
        logits_BPV = self._fit(self._catch_up(sequences_B, depths_B), chooser)[:, None]
        tokens: list[Tensor] = []
        parents: list[int] = []
        rows_q: list[Tensor] = []
        level = [-1]
        for d in range(depth):
            K, first = self._children_at(d), len(parents)
            tokens_BPK, q_BPV = chooser.children(logits_BPV, K, d)
            tokens.append(tokens_BPK.flatten(1))
            parents += [parent for parent in level for _ in range(K)]
            level = list(range(first, len(parents)))
            if q_BPV is not None:
                rows_q.append(q_BPV.repeat_interleave(K, dim=1))
            if d + 1 < depth:
                logits_BNV, _ = self.model.forward(
                    self._fit_ids(torch.cat(tokens, 1), chooser), self._parents(parents, B)
                )
                logits_BPV = self._fit(logits_BNV[:, first:], chooser)
        nodes = self._nodes_by_depth(depth)
        counts_B = [nodes[row_depth] for row_depth in depths_B]
        q_BNV = torch.cat(rows_q, 1) if rows_q else None
        siblings = max(self._children_at(d) for d in range(depth))
        return Proposal(
            torch.cat(tokens, 1),
            counts_B,
            self._parents(parents, B),
            q_BNV,
            depth,
            siblings=siblings,
        )

    def _parents(self, parents: list[int], rows: int) -> Tensor:
        return devices.tensor(parents, self.model.device).expand(rows, -1)

    def time_step(self, frontier: int = 1) -> None:
        """Run the forwards of a proposal of the last depth without committing."""
        B = len(self.model.lengths_B)
        super().time_step()
        for nodes in self._nodes_by_depth(self._depth)[1:-1]:
            parents = torch.arange(-1, nodes - 1, device=self.model.device).expand(B, -1)
            self.model.forward(
                torch.zeros(B, nodes, dtype=torch.long, device=self.model.device), parents
            )
