"""Draft trees of a model's likeliest continuations that grow where the model is unsure.

`RankedTree` expands the likeliest nodes of each level and has the likeliest of all that it saw tested (EAGLE-2, Li et al. 2024,
arXiv 2406.16858). With measured costs the number of nodes and levels is the one that promises the most tokens a millisecond: a node's
path probability estimates its chance to be accepted, so their sum estimates the accepted tokens (OPT-Tree, Wang et al. 2024, arXiv
2406.17276), and V(n) says what testing them costs. Where the host runs ahead of the device nothing is asked while a tree grows: as many nodes
are proposed as there may be, and with costs a round's size comes from the rounds before (decoding/tree_size.py).

Where tokens are sampled, children are drawn (`draws=drawn`: decoding/draws.py says what is exact, decoding/drawn_tree.py grows such trees), so
that p / q tests accept far more of them; or they are the model's best tokens there too (`draws=picked`), point masses to verification, siblings
one after another. Greedy decoding and the coupled rule always pick. The model runs over its whole tree again at each level, as a shallow
model does so at next to no cost, and no cache row moves before the target has spoken.

Shapes: B rows, P nodes of the deepest level, K children of a node, M nodes seen, N nodes proposed, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decoding import cuda
from decoding.chain import ChainDrafter
from decoding.chooser import Chooser
from decoding.drafter import Caps, Observation, Proposal
from decoding.drawn_tree import DrawnTree, Run
from decoding.draws import Draws, are_drawn, check_kind
from decoding.errors import UserError
from decoding.seen import NONE, Seen
from decoding.stopping import RoundCosts, Stopping
from decoding.target import Target
from decoding.tree_budget import BySize, ByWorth, TreeBudget
from decoding.tree_size import TreeSize
from decoding.worth import Worth


class RankedTree(ChainDrafter):
    """A tree that grows where it is worth it. Hydra: `_target_: decoding.trees.RankedTree`.

    frontier: nodes of a level that are expanded, and children that each gets. max_nodes: nodes proposed at most. by_cost: take the
    number of nodes and levels from measured costs, within max_nodes and the draft length. draws: `drawn` or `picked`. The other arguments
    are ChainDrafter's.
    """

    caps = Caps(shape="tree")

    def __init__(
        self,
        *arguments: Any,
        frontier: int = 4,
        max_nodes: int = 16,
        by_cost: bool = False,
        draws: str = "drawn",
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        if frontier < 1 or max_nodes < 1:
            raise UserError(f"frontier is {frontier} and max_nodes {max_nodes}, expected numbers from 1 up.")
        self.frontier, self.max_nodes = frontier, max_nodes
        self.draws = check_kind(draws, self.name)
        self.caps = Caps(shape="tree", has_q=draws == "drawn", needs_costs=by_cost)
        self.costs: RoundCosts | None = None
        self._ahead = False
        # What sizes picked trees with costs: the rounds before (`_by_past`), or the tree itself while it grows.
        self._sizes_B: list[TreeSize] = []
        self._worth_B: list[Worth] = []
        self._budget: TreeBudget | None = None  # of drawn ones, from their first round on

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """What nodes and levels are weighed by, where `by_cost` is set."""
        self.costs = costs if self.caps.needs_costs else None
        self._ahead = cuda.runs_ahead(target.device)

    def width(self, gamma: int) -> int:
        """Nodes proposed at most: those asked for, or all that a tree of depth gamma sees."""
        return min(self.max_nodes, self.frontier + (gamma - 1) * self.frontier**2)

    def open(self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """As a chain drafter, with room for the nodes that are expanded and not proposed."""
        super().open(prompts_B, prefill_hidden_BNC, capacity + self.max_nodes * self.frontier)
        self._weigh(len(prompts_B))

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """As a chain drafter; sizes are chosen afresh."""
        super().resume(prompt, kept, hidden_NC)
        self._weigh(1)

    @property
    def _by_past(self) -> bool:
        """Whether a tree's size is chosen before it grows: where a look at it costs a wait, and in a batch, which is as wide as its widest."""
        return self._ahead or (self.costs is not None and self.costs.rows > 1)

    def _weigh(self, rows: int) -> None:
        self._budget, self._sizes_B, self._worth_B = None, [], []
        if self.costs is not None and self._by_past:
            self._sizes_B = [TreeSize(self.costs, self.max_nodes) for _ in range(rows)]
        elif self.costs is not None:
            self._worth_B = [Worth(self.costs, self.max_nodes) for _ in range(rows)]

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """The tree of each row, at most as deep as its budget; rows beyond this model's own context get none."""
        depths_B = self._within_context(sequences_B, budgets_B)
        if are_drawn(self.draws, chooser):
            return self._drawn(sequences_B, depths_B, chooser)
        if self._sizes_B:
            pairs = zip(self._sizes_B, depths_B, strict=True)
            depths_B = [len(size.choose(depth, self.max_nodes)) for size, depth in pairs]
        if self._worth_B:
            depths_B = [depth * worth.drafts() for worth, depth in zip(self._worth_B, depths_B, strict=True)]
        if max(depths_B) == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), depths_B)
        logits_BV = self._fit(self._catch_up(sequences_B, depths_B), chooser)
        return self._pick(*self._grow(logits_BV, depths_B, chooser))

    def _drawn(self, sequences_B: Sequence[Sequence[int]], depths_B: list[int], chooser: Chooser) -> Proposal:
        """The tree of each row where children are drawn."""
        if self._budget is None:
            self._budget = self._new_budget(len(depths_B))
        depths_B = self._budget.begin(depths_B)
        if max(depths_B) == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), depths_B)
        logits_BV = self._fit(self._catch_up(sequences_B, depths_B), chooser)
        draws = Draws(chooser, logits_BV, max(depths_B))
        tree = self._new_tree(draws, partial(self._run, chooser), self._budget, sequences_B)
        tree.grow()
        return tree.proposal(self._ahead)

    def _new_budget(self, rows: int) -> TreeBudget:
        if self.costs is None:
            return BySize(rows, self.max_nodes, self.frontier)
        if self._by_past:
            return BySize(rows, self.max_nodes, self.frontier, self.costs)
        return ByWorth(rows, self.max_nodes, self.costs)

    def _new_tree(self, draws: Draws, run: Run, budget: TreeBudget, sequences_B: Sequence[Sequence[int]]) -> DrawnTree:
        return DrawnTree(draws, run, self.frontier, budget)

    def _run(self, chooser: Chooser, tokens_BN: Tensor, parents_BN: Tensor, last: int) -> Tensor:
        """The model's logits after the last ones of these nodes."""
        known_BN = tokens_BN.clamp(max=self.model.vocab_size - 1).to(self.model.device)
        logits_BNV, _ = self.model.forward(known_BN, parents_BN.to(self.model.device))
        return self._fit(logits_BNV[:, -last:], chooser)

    def observe(self, observation: Observation) -> None:
        """Learn what the sizes were worth."""
        if self._budget is not None:
            self._budget.learn(observation.answers, observation.outcome.accepted_B)
            return
        chances_BLW = observation.answers[0] if observation.answers else [()] * len(self._sizes_B)
        for size, chances_LW, accepted in zip(self._sizes_B, chances_BLW, observation.outcome.accepted_B):
            size.learn(chances_LW, accepted)
        for worth, accepted in zip(self._worth_B, observation.outcome.accepted_B):
            worth.learn(accepted)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().select(rows)
        if self._budget is not None:
            self._budget.select(rows)
        self._sizes_B = [self._sizes_B[row] for row in rows] if self._sizes_B else []
        self._worth_B = [self._worth_B[row] for row in rows] if self._worth_B else []

    def _grow(self, logits_BV: Tensor, depths_B: list[int], chooser: Chooser) -> tuple[Seen, list[int]]:
        """All nodes seen, and the depth at which each row's growth ended."""
        B, K, device = len(depths_B), self.frontier, logits_BV.device
        depths_B = list(depths_B)
        logits_BPV = logits_BV[:, None]
        seen = Seen.none(B, device, logits_BV.dtype)
        above_BP = torch.zeros(B, 1, dtype=logits_BV.dtype, device=device)
        in_seen_BP = in_model_BP = torch.full((B, 1), -1, device=device)
        fed_BN, fed_parents_BN = in_seen_BP[:, :0], in_model_BP[:, :0]
        for d in range(max(depths_B)):
            best = chooser.log_scores(logits_BPV, d).topk(min(K, logits_BPV.shape[-1]), dim=-1)
            k = best.indices.shape[2]
            tokens_BP, scores_BP = best.indices.flatten(1), self._kept(best.values, above_BP).flatten(1)
            first, seen.levels, seen.siblings = seen.tokens_BM.shape[1], d + 1, k
            seen.add(tokens_BP, in_seen_BP.repeat_interleave(k, 1), scores_BP, torch.full_like(tokens_BP, d + 1))
            top = self._expandable(seen, first, best.values).topk(min(K, scores_BP.shape[1]), dim=-1)
            if self._worth_B:
                self._stop_rows(seen.scores_BM[:, first:], top.values, depths_B, d + 1)
            if d + 1 >= max(depths_B):
                break
            above_BP, in_seen_BP = top.values, first + top.indices
            fed_parents_BN = torch.cat((fed_parents_BN, in_model_BP.repeat_interleave(k, 1).gather(1, top.indices)), 1)
            in_model_BP = torch.arange(top.indices.shape[1], device=device).expand(B, -1) + fed_BN.shape[1]
            fed_BN = torch.cat((fed_BN, tokens_BP.gather(1, top.indices)), 1)
            logits_BPV = self._run(chooser, fed_BN, fed_parents_BN, top.indices.shape[1])
        return seen, depths_B

    def _kept(self, scores_BPK: Tensor, above_BP: Tensor) -> Tensor:
        """Path scores of the children; -inf for those that are not to be tested."""
        return scores_BPK + above_BP[:, :, None]

    def _expandable(self, seen: Seen, first: int, scores_BPK: Tensor) -> Tensor:
        """Path scores of the nodes from `first` on; -inf for those that are not to be expanded."""
        return seen.scores_BM[:, first:]

    def _stop_rows(self, level_BP: Tensor, frontier_BK: Tensor, depths_B: list[int], depth: int) -> None:
        """End rows (in `depths_B`) where another level promises less than it costs. level_BP: path scores of this level's nodes."""
        chances_BP, mass_B = cuda.read(level_BP.exp(), frontier_BK.exp().sum(1))
        for b, (worth, chances_P, mass) in enumerate(zip(self._worth_B, chances_BP, mass_B, strict=True)):
            if depth <= depths_B[b]:
                worth.saw(chances_P, mass)
                depths_B[b] = depth if worth.ended else depths_B[b]

    def _pick(self, seen: Seen, depths_B: list[int]) -> Proposal:
        """The likeliest nodes of each row; a parent is never less likely than its child."""
        scores_BM = seen.down_to(depths_B)
        order = scores_BM.sort(descending=True, stable=True)
        real_B = (order.values > NONE).sum(1)
        if self._ahead or self._sizes_B:
            return self._at_most(seen, depths_B, order.indices, real_B)
        counts_B = [min(self.max_nodes, count) for count in real_B.tolist()]
        if self._worth_B:
            settled_B = [worth.settle(chances_M) for worth, chances_M in zip(self._worth_B, scores_BM.exp().tolist())]
            counts_B = [min(pair) for pair in zip(counts_B, settled_B, strict=True)]
        tokens_BN, parents_BN, _ = seen.kept(order.indices, cuda.tensor(counts_B, real_B.device), max(counts_B))
        return Proposal(tokens_BN, counts_B, parents_BN, None, seen.levels)

    def _at_most(self, seen: Seen, depths_B: list[int], order_BM: Tensor, real_B: Tensor) -> Proposal:
        """As many nodes as there may be, without asking how many there are: `real_B` at most, the others are padding."""
        M = order_BM.shape[1]
        most_B = [min(self.max_nodes, M) if depth else 0 for depth in depths_B]
        if self._sizes_B:
            most_B = [min(sum(size.chosen), M) for size in self._sizes_B]
        counts_B = torch.minimum(real_B, cuda.tensor(most_B, real_B.device))
        tokens_BN, parents_BN, _ = seen.kept(order_BM, counts_B, max(most_B))
        proposal = Proposal(tokens_BN, most_B, parents_BN, None, seen.levels)
        if self._sizes_B:
            proposal.asks = lambda _: (seen.chances(self.max_nodes),)
        return proposal

    def time_step(self, beams: int = 1) -> None:
        """One forward over two levels of expanded nodes, the mean of a tree three deep; nothing is committed."""
        self.model.forward(
            torch.zeros(len(self.model.lengths_B), 2 * self.frontier, dtype=torch.long, device=self.model.device)
        )
