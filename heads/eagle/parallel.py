"""P-EAGLE and ParallelSpec: EAGLE-3 heads that draft a chain in one pass (2602.01469, 2410.05589).

The first element of a draft has the target's states and the tip. All later ones have learned states
and the embedding of a mask token in their place, so none waits for a drafted token. Each depth's
distribution depends on the text alone, so tokens are sampled and verified as those of a chain.

Shapes: B rows, N drafted tokens, V the target's vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from decoding.costs.roofline import ForwardBudget
from decoding.drafters.parallel import choose_at_each_depth
from decoding.interfaces import Chooser, Policies, Proposal, Target, Tokens
from decoding.sampling.token_chooser import likeliest_chooser
from heads.eagle.drafter import EagleDrafter
from heads.eagle.model import EagleHead
from training.heads import budget
from training.heads.drafter import choose_name


class ParallelEagleDrafter(EagleDrafter):
    """Drafter of a chain in one pass, from a P-EAGLE head in a folder or in memory.

    A chain has at most as many tokens as the head was trained to draft. The arguments are those of
    `EagleDrafter`. Raises UserError for an invalid folder or argument.
    """

    one_pass = True

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        head: EagleHead | None = None,
        children: str = "sampled",
        dtype: str = "float32",
        device: str = "cpu",
        name: str | None = None,
        execution: str = "eager",
    ) -> None:
        super().__init__(
            folder,
            head=head,
            shape="chain",
            children=children,
            dtype=dtype,
            device=device,
            name=choose_name(name, folder, "p_eagle"),
            execution=execution,
        )
        self.capabilities = replace(
            self.capabilities,
            steps="round",
            stops_by_token=False,
            can_overlap=False,  # its states come from the target alone
        )

    def as_chain(self, children: str) -> "ParallelEagleDrafter":
        """Return a drafter of chains with the same head."""
        return ParallelEagleDrafter(head=self.cache.head, children=children, name=self.name)

    def width(self, gamma: int) -> int:
        """Return the number of tokens of a chain."""
        return min(gamma, self.config.parallel)

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain for each row in one pass."""
        counts_B = [min(budget, self.config.parallel) for budget in budgets_B]
        if max(counts_B) == 0:
            return Proposal(torch.empty(len(counts_B), 0, dtype=torch.long), counts_B)
        if self.children == "top_k" and chooser.tests_q:
            chooser = likeliest_chooser(chooser)
        logits_BNV = self.cache.draft_in_one_pass(sequences_B, max(counts_B))
        fitted_BNV = self._fit(logits_BNV, chooser)
        tokens_BN, q_BNV = choose_at_each_depth(fitted_BNV, sequences_B, chooser)
        return Proposal(tokens_BN, counts_B, None, q_BNV, 1)

    def draft_budget(
        self, target: Target, steps: float, gamma: int, context: int, rows: float
    ) -> ForwardBudget:
        """Return the budget of a mean round's draft (see `BudgetedDrafter`): of one pass."""
        count = self.width(gamma)
        passed = self._elements_budget(target, count, context, rows)
        passed += self._joining_budget(rows) + budget.embedding(target, rows)  # of the tip before
        if self.config.masks_by_depth:
            size = self.config.num_taps * self.config.hidden_size
            passed += budget.table_rows(size, count - 1, self.cache.dtype)
        return passed.times(steps)

    def time_step(self, frontier: int = 1) -> None:
        """Run the longest pass without storing it."""
        self.cache.time_pass(self.config.parallel)
