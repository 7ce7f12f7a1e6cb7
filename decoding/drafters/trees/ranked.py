"""Draft trees of a model's likeliest continuations that grow where the model is unsure.

`RankedTree` expands the likeliest nodes of each level and has the likeliest of all that it saw
tested (EAGLE-2, Li et al. 2024, arXiv 2406.16858). With measured costs the number of nodes and
levels is the one that promises the most tokens a millisecond: a node's path probability estimates
its chance to be accepted, so their sum estimates the accepted tokens (OPT-Tree, Wang et al. 2024,
arXiv 2406.17276), and V(n) says what testing them costs. Where the host runs ahead of the device
nothing is asked while a tree grows: as many nodes are proposed as there may be, and with costs a
round's size comes from the rounds before (decoding/drafters/trees/budgets.py has all ways to size
trees).

Where tokens are sampled, children are drawn (`children=sampled`:
decoding/drafters/trees/sampled_children.py says what is exact, decoding/drafters/trees/sampled.py
grows such trees), so that p / q tests accept far more of them; or they are the model's best tokens
there too (`children=top_k`), point masses to verification, siblings one after another. Greedy
decoding and the coupled rule always pick. The model runs over its whole tree again at each level,
as a shallow model does so at next to no cost, and no cache row moves before the target has spoken.

Shapes: B rows, P nodes of the deepest level, K children of a node, M nodes seen, N nodes proposed,
V vocabulary.
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
    Proposal,
    RoundCosts,
    Stopping,
    Target,
)


class RankedTree(ChainDrafter):
    """A tree that grows where it is worth it. Hydra:
    `_target_: decoding.drafters.trees.ranked.RankedTree`.

    frontier: nodes of a level that are expanded, and children that each gets. max_nodes: nodes
    proposed at most. by_cost: take the number of nodes and levels from measured costs, within
    max_nodes and the draft length. children: `sampled` or `top_k`. The other arguments are
    ChainDrafter's.
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
                f"frontier is {frontier} and max_nodes {max_nodes}, expected numbers from 1 up."
            )
        self.frontier, self.max_nodes = frontier, max_nodes
        self.children = check_kind(children, self.name)
        self.capabilities = Capabilities(
            shape="tree", has_q=children == "sampled", needs_costs=by_cost
        )
        self.costs: RoundCosts | None = None
        self._ahead = False
        # of the opened batch, from its first round on
        self._budget: PlannedBudget | None = None

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """What nodes and levels are weighed by, where `by_cost` is set."""
        self.costs = costs if self.capabilities.needs_costs else None
        self._ahead = devices.runs_ahead(target.device)

    def width(self, gamma: int) -> int:
        """Nodes proposed at most: those asked for, or all that a tree of depth gamma sees."""
        return min(self.max_nodes, self.frontier + (gamma - 1) * self.frontier**2)

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        """As a chain drafter, with room for the nodes that are expanded and not proposed."""
        super().open(prompts_B, prefill_hidden_BNC, capacity + self.max_nodes * self.frontier)
        self._budget = None

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """As a chain drafter; sizes are chosen afresh."""
        super().resume(prompt, kept, hidden_NC)
        self._budget = None

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """The tree of each row, at most as deep as its budget; rows beyond this model's own context
        get none.
        """
        sampled = are_sampled(self.children, chooser)
        budget = self._budget_for(sampled, len(sequences_B))
        depths_B = budget.begin(self._within_context(sequences_B, budgets_B))
        if max(depths_B) == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), depths_B)
        logits_BV = self._fit(self._catch_up(sequences_B, depths_B), chooser)
        if not sampled:
            return self._pick(self._grow(logits_BV, budget, chooser), budget)
        draws = ChildSampler(chooser, logits_BV, max(depths_B))
        tree = self._new_tree(draws, partial(self._run, chooser), budget, sequences_B)
        tree.grow()
        return tree.proposal(self._ahead)

    def _budget_for(self, sampled: bool, rows: int) -> PlannedBudget:
        """Return what sizes the batch's trees.

        It is made in the first round, as the verification rule of a round decides whether children
        are sampled. Costs size a tree before it grows where reading it is a wait, and in a batch,
        which is as wide as its widest tree.
        """
        if self._budget is None or self._budget.sampled != sampled:
            if self.costs is None or self._ahead or self.costs.rows > 1:
                self._budget = PlannedBudget(
                    rows, self.max_nodes, self.frontier, self.costs, sampled, self._ahead
                )
            else:
                self._budget = GrowingBudget(rows, self.max_nodes, self.costs, sampled)
        return self._budget

    def _new_tree(
        self,
        draws: ChildSampler,
        run: Run,
        budget: PlannedBudget,
        sequences_B: Sequence[Sequence[int]],
    ) -> SampledTree:
        return SampledTree(draws, run, self.frontier, budget)

    def _run(self, chooser: Chooser, tokens_BN: Tensor, parents_BN: Tensor, last: int) -> Tensor:
        """The model's logits after the last ones of these nodes."""
        logits_BNV, _ = self.model.forward(
            self._fit_ids(tokens_BN, chooser), parents_BN.to(self.model.device)
        )
        return self._fit(logits_BNV[:, -last:], chooser)

    def observe(self, observation: Observation) -> None:
        """Learn what the sizes were worth."""
        if self._budget is not None:
            self._budget.learn(observation.readback, observation.outcome.accepted_B)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().select(rows)
        if self._budget is not None:
            self._budget.select(rows)

    def _grow(self, logits_BV: Tensor, budget: PlannedBudget, chooser: Chooser) -> CandidateTree:
        """All nodes seen, as deep as the budget lets the trees grow."""
        B, K, device = len(logits_BV), self.frontier, logits_BV.device
        logits_BPV = logits_BV[:, None]
        seen = CandidateTree.none(B, device, logits_BV.dtype)
        above_BP = torch.zeros(B, 1, dtype=logits_BV.dtype, device=device)
        in_seen_BP = in_model_BP = torch.full((B, 1), -1, device=device)
        fed_BN, fed_parents_BN = in_seen_BP[:, :0], in_model_BP[:, :0]
        for d in range(max(budget.depths_B)):
            best = chooser.log_scores(logits_BPV, d).topk(min(K, logits_BPV.shape[-1]), dim=-1)
            k = best.indices.shape[2]
            tokens_BP, scores_BP = (
                best.indices.flatten(1),
                self._kept(best.values, above_BP).flatten(1),
            )
            first, seen.levels, seen.siblings = seen.tokens_BM.shape[1], d + 1, k
            seen.add(
                tokens_BP,
                in_seen_BP.repeat_interleave(k, 1),
                scores_BP,
                torch.full_like(tokens_BP, d + 1),
            )
            top = self._expandable(seen, first, best.values).topk(
                min(K, scores_BP.shape[1]), dim=-1
            )
            budget.grow(seen.scores_BM[:, first:], top.values)
            if d + 1 >= max(budget.depths_B):
                break
            above_BP, in_seen_BP = top.values, first + top.indices
            fed_parents_BN = torch.cat(
                (fed_parents_BN, in_model_BP.repeat_interleave(k, 1).gather(1, top.indices)), 1
            )
            in_model_BP = (
                torch.arange(top.indices.shape[1], device=device).expand(B, -1) + fed_BN.shape[1]
            )
            fed_BN = torch.cat((fed_BN, tokens_BP.gather(1, top.indices)), 1)
            logits_BPV = self._run(chooser, fed_BN, fed_parents_BN, top.indices.shape[1])
        return seen

    def _kept(self, scores_BPK: Tensor, above_BP: Tensor) -> Tensor:
        """Path scores of the children; -inf for those that are not to be tested."""
        return scores_BPK + above_BP[:, :, None]

    def _expandable(self, seen: CandidateTree, first: int, scores_BPK: Tensor) -> Tensor:
        """Path scores of the nodes from `first` on; -inf for those that are not to be expanded."""
        return seen.scores_BM[:, first:]

    def _pick(self, seen: CandidateTree, budget: PlannedBudget) -> Proposal:
        """The likeliest nodes of each row; a parent is never less likely than its child."""
        scores_BM = seen.down_to(budget.depths_B)
        order = scores_BM.sort(descending=True, stable=True)
        real_B = (order.values > NONE).sum(1)
        places_B = budget.settle(scores_BM, real_B)
        counts_B = torch.minimum(real_B, devices.tensor(places_B, real_B.device))
        tokens_BN, parents_BN, _ = seen.kept(order.indices, counts_B, max(places_B))
        return Proposal(
            tokens_BN, places_B, parents_BN, None, seen.levels, readback=budget.readback(seen)
        )

    def time_step(self, frontier: int = 1) -> None:
        """One forward over two levels of expanded nodes, the mean of a tree three deep; nothing is
        committed.
        """
        self.model.forward(
            torch.zeros(
                len(self.model.lengths_B),
                2 * self.frontier,
                dtype=torch.long,
                device=self.model.device,
            )
        )
