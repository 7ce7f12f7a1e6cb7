"""Multi-candidate drafting: trees with a fixed number of sampled children at each depth.

Source: Yang et al. 2024, "Multi-Candidate Speculative Decoding" (arXiv 2401.06706): the k-config,
sampled without replacement, and recursive rejection (decoding/verification/token_tree.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from decoding.drafters.trees.static import Path, StaticTree
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Policies, Proposal, Tokens


def k_config(branching: Sequence[int], depth: int) -> set[Path]:
    """Return the paths of a tree of this depth, with branching[d] children per node at depth d.

    At depths for which `branching` has no number, nodes have one child.
    """
    counts = [*branching[:depth], *[1] * (depth - len(branching))]
    ends = range(1, depth + 1)
    return {path for end in ends for path in product(*(range(count) for count in counts[:end]))}


class MultiCandidate(StaticTree):
    """A causal LM that proposes k-config trees.

    Hydra: `_target_: decoding.drafters.trees.multi_candidate.MultiCandidate`. branching: number of
    children of a node at each depth; deeper nodes have one. The draft length is the tree's depth;
    stopping policies limit it before a round, not within it. The other arguments are those of
    ChainDrafter.
    """

    capabilities = Capabilities(shape="tree", has_q=True, steps="round")

    def __init__(self, *arguments: Any, branching: Sequence[int] = (3, 2), **named: Any) -> None:
        if not branching or min(branching) < 1:
            raise UserError(
                f"branching is {list(branching)}, expected one or more numbers, each at least 1."
            )
        self.branching = tuple(branching)
        super().__init__(*arguments, choices=sorted(k_config(branching, len(branching))), **named)
        self.capabilities = replace(self.capabilities, steps="round")

    def width(self, gamma: int) -> int:
        """Return the number of nodes of a tree of depth gamma; deepen the tree to it if needed."""
        if gamma > len(self.paths[-1]):
            self._set_paths(k_config(self.branching, gamma))
        return super().width(gamma)

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft each row's tree as deep as its budget; rows past this model's context get none."""
        self.width(max(budgets_B))
        return super().propose(sequences_B, budgets_B, stopping_B, chooser)

    def time_step(self, frontier: int = 1) -> None:
        """Run the forwards of a proposal as deep as the last one, without committing."""
        for depth in range(self._depth):
            self._time_forward(max(1, self.width(depth)))
