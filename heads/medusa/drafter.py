"""Medusa's heads as a drafter of a static tree or a chain, all depths in one pass.

The heads read the target's hidden state before the tip (training/heads/drafter.py). All nodes of a
depth share one distribution, since a head does not read the tokens before the one that it predicts.
At temperatures above 0, the children of a node are sampled without replacement and tested by p / q,
or they are the top-k tokens as point masses (decoding/drafters/trees/sampled_children.py).

Shapes: B rows, H hidden size, K heads, N nodes, P parents of a depth, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from decoding import devices
from decoding.costs.roofline import ForwardBudget
from decoding.drafters.trees.sampled_children import are_sampled, check_kind
from decoding.errors import UserError
from decoding.interfaces import (
    Capabilities,
    Chooser,
    Proposal,
    RoundCosts,
    Stopping,
    Target,
)
from decoding.models.draft_vocabulary import spread
from heads import rank_trees
from heads.medusa.checkpoint import load_heads
from heads.medusa.model import MedusaHeads
from training.heads import budget
from training.heads.drafter import HeadDrafter, check_draft, choose_name, load_to_draft


class MedusaDrafter(HeadDrafter):
    """Drafter of a static tree, or a chain, from Medusa heads in a folder or in memory.

    choices: the tree's nodes as paths of ranks. None chooses the tree from the heads' measured
    accuracies (heads/rank_trees.py); without accuracies it is a default tree. shape: `tree`, or
    `chain` for one token at each depth. max_nodes: maximum size of a chosen or default tree.
    by_cost: choose the tree's size from the measured costs of a round, if the tree is chosen from
    accuracies. children: `sampled` or `top_k`, for temperatures above 0. execution: `fused` runs
    the products of loaded heads like those of a fused target. Raises UserError for an invalid
    folder or argument.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        heads: MedusaHeads | None = None,
        choices: Sequence[Sequence[int]] | None = None,
        shape: str = "tree",
        max_nodes: int = rank_trees.MOST_NODES,
        by_cost: bool = False,
        children: str = "sampled",
        dtype: str = "float32",
        device: str = "cpu",
        name: str | None = None,
        execution: str = "eager",
    ) -> None:
        heads = load_to_draft(folder, heads, load_heads, dtype, device, execution)
        super().__init__(choose_name(name, folder, "medusa"), heads.config, heads.projection(0))
        self.heads, self.config = heads, heads.config
        self.children = check_kind(children, self.name)
        check_draft(self.name, shape, max_nodes)
        self._max_nodes = max_nodes
        self._chain = shape == "chain"
        self._fixed = self._complete(choices)
        self._by_cost = by_cost and self._fixed is None and bool(self.config.accuracy)
        self.num_layers, self.num_parameters = heads.config.num_layers, heads.num_parameters
        self.capabilities = Capabilities(
            "chain" if self._chain else "tree",
            has_q=children == "sampled",
            needs_hidden=True,
            last_hidden=True,
            needs_costs=self._by_cost,
            steps="round",
            stops_by_token=False,
        )
        self._choose_tree(None)

    def _complete(self, choices: Sequence[Sequence[int]] | None) -> list[rank_trees.Path] | None:
        """Return a chain, or the given nodes and the prefixes of their paths; None for no nodes."""
        if self._chain:
            return [(0,) * depth for depth in range(1, self.config.num_heads + 1)]
        if choices is None:
            return None
        paths = {tuple(path[:end]) for path in choices for end in range(1, len(path) + 1)}
        deepest, most = self.config.num_heads, self.config.num_drafted
        if not paths or not all(
            0 <= rank < most and len(path) <= deepest for path in paths for rank in path
        ):
            raise UserError(
                f"drafter '{self.name}': choices is {list(choices)}, expected paths of at most "
                f"{deepest} ranks (one per head) from 0 to {most - 1}, such as [[0, 0], [1]]."
            )
        return list(paths)

    def _choose_tree(self, costs: RoundCosts | None) -> None:
        """Set the tree: the given one, or the best for these costs; None: the largest."""
        paths = self._fixed
        if paths is None and self.config.accuracy:
            paths = rank_trees.choose_tree(self.config.accuracy, costs, self._max_nodes)
        elif paths is None:
            paths = rank_trees.default_tree(self.config.num_heads)[: self._max_nodes]
        self._paths = sorted(paths, key=lambda path: (len(path), path))
        self._index = {path: node for node, path in enumerate(self._paths)}
        parents = [path[:-1] for path in self._paths]
        # index among its siblings: sampled children are ordered by their samples, not by rank
        self._place = {path: parents[:n].count(path[:-1]) for n, path in enumerate(self._paths)}

    def as_chain(self, children: str) -> "MedusaDrafter":
        """Return a drafter of chains with the same heads."""
        return MedusaDrafter(heads=self.heads, shape="chain", children=children, name=self.name)

    @property
    def depth(self) -> int:
        """Depth of the tree."""
        return len(self._paths[-1]) if self._paths else 0

    def width(self, gamma: int) -> int:
        """Return the number of nodes of depth at most gamma."""
        return sum(len(path) <= gamma for path in self._paths)

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Choose the tree from the costs, with `by_cost`.

        Raises UserError if the target's sizes or its device differ from the heads'.
        """
        super().prepare(target, costs)
        if self._by_cost:
            self._choose_tree(costs)

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """Draft each row's tree or chain, cut at the depth of its budget."""
        depths_B = [min(budget, self.depth) for budget in budgets_B]
        depth = max(depths_B)
        if depth == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), [0] * len(depths_B))
        logits_BKV = spread(
            self.heads(self._hidden_BH, depth),
            self.heads.token_ids_V,
            self.config.vocab_size,
            float("-inf"),
        )
        if self._chain:
            return self._propose_chain(logits_BKV, depths_B, chooser)
        sampled = are_sampled(self.children, chooser)
        tokens = [self._tokens(logits_BKV[:, d : d + 1], d, chooser, sampled) for d in range(depth)]
        nodes = [path for path in self._paths if len(path) <= depth]
        parents = [self._index.get(path[:-1], -1) for path in nodes]
        parents_BN = devices.tensor(parents, self.device).expand(len(depths_B), -1)
        q_BNV = None
        if sampled:
            depths_N = devices.tensor([len(path) - 1 for path in nodes], self.device)
            q_BNV = chooser.warper.probs(logits_BKV)[:, depths_N]
        siblings = max(self._place[path] for path in nodes) + 1
        counts_B = [self.width(row_depth) for row_depth in depths_B]
        tokens_BN = torch.cat(tokens, 1)
        return Proposal(tokens_BN, counts_B, parents_BN, q_BNV, 1, siblings=siblings)

    def _propose_chain(self, logits_BKV: Tensor, depths_B: list[int], chooser: Chooser) -> Proposal:
        depths = range(logits_BKV.shape[1])
        if self.children == "top_k" and chooser.tests_q:
            return Proposal(logits_BKV.argmax(-1), depths_B, steps=1)
        drafted = [chooser.draft(logits_BKV[:, d], d) for d in depths]
        tokens_BN = torch.stack([tokens_B for tokens_B, _ in drafted], 1)
        q = [q_BV for _, q_BV in drafted if q_BV is not None]
        return Proposal(tokens_BN, depths_B, None, torch.stack(q, 1) if q else None, 1)

    def _tokens(self, logits_B1V: Tensor, d: int, chooser: Chooser, sampled: bool) -> Tensor:
        """Return the tokens (B, n) of the tree's n nodes at depth d (from 0), in their order."""
        nodes = [path for path in self._paths if len(path) == d + 1]
        ranks = [self._place[path] if sampled else path[-1] for path in nodes]
        K = min(max(ranks) + 1, logits_B1V.shape[-1])
        if not sampled:
            best_BK = chooser.log_scores(logits_B1V, d).topk(K, dim=-1).indices[:, 0]
            return best_BK[:, devices.tensor([min(r, K - 1) for r in ranks], self.device)]
        # Each parent's children are sampled with separate random numbers.
        above = [path for path in self._paths if len(path) == d] if d else [()]
        first = self.width(d - 1) + 1 if d else 0
        q_BPV = chooser.warper.probs(logits_B1V).expand(-1, len(above), -1)
        drawn_BPK, _ = chooser.draw_children(q_BPV, K, d, first)
        places = {path: p for p, path in enumerate(above)}
        K = drawn_BPK.shape[2]
        flat = [places[path[:-1]] * K + min(r, K - 1) for path, r in zip(nodes, ranks, strict=True)]
        return drawn_BPK.flatten(1)[:, devices.tensor(flat, self.device)]

    def draft_budget(
        self, target: Target, steps: float, gamma: int, context: int, rows: float
    ) -> ForwardBudget:
        """Return the budget of a mean round's draft (see `BudgetedDrafter`).

        Only the heads of the drafted depths run. A shared projection is read once.
        """
        heads, depth = self.heads, min(gamma, self.depth)
        found = budget.products(heads.blocks[:depth].parameters(), rows)
        for projection in heads.projections[:depth]:
            found += budget.products(projection.parameters(), rows)
        if self.config.shared:  # the further products read nothing
            operations = budget.products(heads.projections.parameters(), (depth - 1) * rows)
            found += replace(operations, weight_bytes=0)
        return found.times(steps)

    def time_step(self, frontier: int = 1) -> None:
        """Run the heads that the tree needs, once."""
        self.heads(self._hidden_BH, max(1, self.depth))
