"""Draft trees that grow along a model's likeliest continuations.

`RankedTree` expands the likeliest nodes of each level and proposes the likeliest of all nodes
(EAGLE-2, Li et al. 2024, arXiv 2406.16858). With measured costs the numbers of nodes and levels
maximize the expected tokens per millisecond: path probabilities estimate the chances of acceptance,
so their sum estimates the accepted tokens (OPT-Tree, Wang et al. 2024, arXiv 2406.17276), and V(n)
is the cost of testing them (decoding/drafters/trees/budgets.py).

When tokens are sampled, so are children by default (`children=sampled`,
decoding/drafters/trees/sampled.py), since tests by p / q accept far more of them. With
`children=top_k` they are the model's likeliest tokens, which verification treats as point masses.
Greedy decoding and the coupled rule always use the top k. At each level the model runs over all
expanded nodes again: for a shallow model this costs almost nothing, and no cache row moves before
verification.

Shapes: B rows, P nodes of the deepest level, K children of a node, M nodes of the tree, N nodes
proposed, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.budgets import GrowingBudget, PlannedBudget
from decoding.drafters.trees.candidates import NONE, CandidateTree
from decoding.drafters.trees.sampled import Run, SampledTree
from decoding.drafters.trees.sampled_children import ChildSampler, are_sampled, check_kind
from decoding.errors import UserError
from decoding.interfaces import (
    Capabilities,
    Chooser,
    Observation,
    Policies,
    Proposal,
    RoundCosts,
    Target,
    Tokens,
)


class RankedTree(ChainDrafter):
    """A causal LM that proposes a tree of its likeliest continuations.

    Hydra: `_target_: decoding.drafters.trees.ranked.RankedTree`. frontier: number of nodes of a
    level that are expanded, and of children of each. max_nodes: maximum number of proposed nodes.
    by_cost: choose the numbers of nodes and levels from measured costs, within max_nodes and the
    draft length. children: `sampled` or `top_k`. The other arguments are those of ChainDrafter.
    """

    capabilities = Capabilities(shape="tree")

    def __init__(
        self,
        *arguments: Any,
        frontier: int = 4,
        max_nodes: int = 16,
        by_cost: bool = False,
        children: str = "sampled",
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        if frontier < 1 or max_nodes < 1:
            raise UserError(
                f"frontier is {frontier} and max_nodes is {max_nodes}, expected 1 or more each."
            )
        self.frontier, self.max_nodes = frontier, max_nodes
        self.children = check_kind(children, self.name)
        self.capabilities = Capabilities(
            shape="tree", has_q=children == "sampled", needs_costs=by_cost
        )
        self.costs: RoundCosts | None = None
        self._ahead = False
        # of the open batch, from its first round on
        self._budget: PlannedBudget | None = None

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Store the costs, which are used only with `by_cost`."""
        self.costs = costs if self.capabilities.needs_costs else None
        self._ahead = devices.runs_ahead(target.device)

    def width(self, gamma: int) -> int:
        """Return max_nodes, or the number of nodes that grow in gamma levels if it is smaller."""
        return min(self.max_nodes, self.frontier + (gamma - 1) * self.frontier**2)

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Read the prompts, with room for nodes that are expanded and not proposed."""
        super().open(prompts_B, prefill_hidden_BNC, capacity + self.max_nodes * self.frontier)
        self._budget = None

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Read the new prompts, whose trees start with estimates of their own."""
        super().join(prompts_B, prefill_hidden_BNC)
        if self._budget is not None:
            self._budget.add_rows(len(prompts_B))

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Read the new tokens, and reset the estimates that size the trees."""
        super().resume(prompt, kept, hidden_NC)
        self._budget = None

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft each row's tree as deep as its budget; rows past this model's context get none."""
        sampled = are_sampled(self.children, chooser)
        budget = self._budget_for(sampled, len(sequences_B))
        depths_B = budget.begin(self._within_context(sequences_B, budgets_B))
        if max(depths_B) == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), depths_B)
        logits_BV = self._fit(self._catch_up(sequences_B, depths_B), chooser)
        if not sampled:
            return self._likeliest(self._grow(logits_BV, budget, chooser), budget)
        children = ChildSampler(chooser, logits_BV, max(depths_B))
        tree = self._new_tree(children, partial(self._run, chooser), budget)
        tree.grow()
        return tree.proposal(self._ahead)

    def _budget_for(self, sampled: bool, rows: int) -> PlannedBudget:
        """Return the batch's budget, which its first round creates.

        sampled: whether the round samples children, which depends on its verification rule. With
        costs, a tree is sized before it grows if the host runs ahead of the device, and in batches,
        whose rounds are as wide as the widest tree; otherwise while it grows.
        """
        if self._budget is None or self._budget.sampled != sampled:
            if self.costs is None or self._ahead or self.costs.rows > 1:
                self._budget = PlannedBudget(
                    rows, self.max_nodes, self.frontier, self.costs, sampled, self._ahead
                )
            else:
                self._budget = GrowingBudget(rows, self.max_nodes, self.costs, sampled)
        return self._budget

    def _new_tree(self, children: ChildSampler, run: Run, budget: PlannedBudget) -> SampledTree:
        return SampledTree(children, run, self.frontier, budget)

    def _run(self, chooser: Chooser, tokens_BN: Tensor, parents_BN: Tensor, last: int) -> Tensor:
        """Return the model's logits (B, `last`, V) after the last nodes."""
        logits_BNV, _ = self.model.forward(
            self._fit_ids(tokens_BN, chooser), parents_BN.to(self.model.device)
        )
        return self._fit(logits_BNV[:, -last:], chooser)

    def observe(self, observation: Observation) -> None:
        """Update the estimates that size the trees."""
        if self._budget is not None:
            self._budget.learn(observation.readback, observation.outcome.accepted_B)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().select(rows)
        if self._budget is not None:
            self._budget.select(rows)

    def _grow(self, logits_BV: Tensor, budget: PlannedBudget, chooser: Chooser) -> CandidateTree:
        """Return a tree of top-k children, grown as deep as the budget allows."""
        B, device = len(logits_BV), logits_BV.device
        K = min(self.frontier, logits_BV.shape[-1])
        logits_BPV = logits_BV[:, None]
        tree = CandidateTree.none(B, device, logits_BV.dtype)
        tree.siblings = K
        # of the expanded nodes: path scores, places in the tree and among the model's inputs
        above_BP = torch.zeros(B, 1, dtype=logits_BV.dtype, device=device)
        places_BP = inputs_BP = torch.full((B, 1), -1, device=device)
        read_BN, read_parents_BN = places_BP[:, :0], inputs_BP[:, :0]
        while True:
            best = chooser.log_scores(logits_BPV, tree.levels).topk(K, dim=-1)
            first, tree.levels = tree.tokens_BM.shape[1], tree.levels + 1
            tokens_BP = best.indices.flatten(1)
            tree.add(
                tokens_BP,
                places_BP.repeat_interleave(K, 1),
                self._tested(best.values, above_BP).flatten(1),
                torch.full_like(tokens_BP, tree.levels),
            )
            expandable_BP = self._expandable(tree, first, best.values)
            top = expandable_BP.topk(min(self.frontier, expandable_BP.shape[1]), dim=-1)
            budget.grow(tree.scores_BM[:, first:], top.values)
            if tree.levels >= max(budget.depths_B):
                return tree
            above_BP, places_BP = top.values, first + top.indices
            parents_BP = inputs_BP.repeat_interleave(K, 1).gather(1, top.indices)
            start, P = read_BN.shape[1], top.indices.shape[1]
            inputs_BP = torch.arange(start, start + P, device=device).expand(B, -1)
            read_BN = torch.cat((read_BN, tokens_BP.gather(1, top.indices)), 1)
            read_parents_BN = torch.cat((read_parents_BN, parents_BP), 1)
            logits_BPV = self._run(chooser, read_BN, read_parents_BN, P)

    def _tested(self, scores_BPK: Tensor, above_BP: Tensor) -> Tensor:
        """Return the path scores of children, -inf for those that are never proposed."""
        return scores_BPK + above_BP[:, :, None]

    def _expandable(self, tree: CandidateTree, first: int, scores_BPK: Tensor) -> Tensor:
        """Return the path scores of the nodes from `first` on, -inf for those that stay leaves."""
        return tree.scores_BM[:, first:]

    def _likeliest(self, tree: CandidateTree, budget: PlannedBudget) -> Proposal:
        """Propose the likeliest nodes of each row; a parent is at least as likely as its child."""
        scores_BM = tree.down_to(budget.depths_B)
        order = scores_BM.sort(descending=True, stable=True)
        real_B = (order.values > NONE).sum(1)
        places_B = budget.settle(scores_BM, real_B)
        counts_B = torch.minimum(real_B, devices.tensor(places_B, real_B.device))
        tokens_BN, parents_BN, _ = tree.kept(order.indices, counts_B, max(places_B))
        return Proposal(
            tokens_BN, places_B, parents_BN, None, tree.levels, readback=budget.readback(tree)
        )

    def time_step(self, frontier: int = 1) -> None:
        """Run one forward over two levels of expanded nodes, the mean of a tree of depth three."""
        self._time_forward(2 * self.frontier)
