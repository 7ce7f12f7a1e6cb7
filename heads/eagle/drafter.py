"""An EAGLE head as a drafter of chains and trees.

It drafts like a language model (decoding/drafters/chain.py, decoding/drafters/trees/ranked.py),
except that it reads the target's states at the verified tokens: a draft's own elements are
replaced after every round. Trees are grown as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858). Under
an overlapped schedule a chain continues from its own outputs before the target has read it.

Shapes: B rows, N drafted tokens, P new nodes, W verified tokens, C channels of the taps, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import Tensor

from decoding.costs.roofline import ForwardBudget
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.ranked import RankedTree
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
from decoding.models.load import DTYPES
from decoding.sampling.token_chooser import likeliest_chooser
from heads.eagle.cache import HeadCache
from heads.eagle.checkpoint import load_head
from heads.eagle.fused import make_cache
from heads.eagle.model import EagleHead
from training.heads import budget
from training.heads.drafter import (
    accepted_states,
    check_draft,
    check_target,
    choose_name,
    load_to_draft,
)


class EagleDrafter(RankedTree):
    """Drafter of a tree, or a chain, from an EAGLE head in a folder or in memory.

    shape: `tree`, or `chain`, whose length the stopping policy decides. frontier, max_nodes,
    by_cost: of a tree, see `RankedTree`. children: `sampled`, or `top_k` for the likeliest tokens
    as point masses, of a chain too. execution: `fused` runs the products of a loaded head like
    those of a fused target. Raises UserError for an invalid folder or argument.
    """

    one_pass = False  # drafts of heads with mask elements: heads/eagle/parallel.py

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        head: EagleHead | None = None,
        shape: str = "tree",
        frontier: int = 4,
        max_nodes: int = 24,
        by_cost: bool = False,
        children: str = "sampled",
        dtype: str = "float32",
        device: str = "cpu",
        name: str | None = None,
        execution: str = "eager",
    ) -> None:
        self._execution = execution if head is None else "eager"
        head = load_to_draft(folder, head, load_head, dtype, device, execution)
        kind = "eagle1" if head.config.predicts_states else "eagle3"
        name = choose_name(name, folder, kind)
        check_draft(name, shape, max_nodes)
        if bool(head.config.parallel) != self.one_pass:
            wrong, right = (kind, "p_eagle")[:: -1 if self.one_pass else 1]
            raise UserError(
                f"drafter '{name}': use is '{wrong}', but its head was trained to draft "
                f"{'a token a step' if self.one_pass else 'in one pass'}. Use `use: {right}`."
            )
        self.config = head.config
        # The base classes' uses of `model` are overridden, except those that HeadCache supports.
        super().__init__(
            model=cast(Target, HeadCache(head, name)),
            name=name,
            frontier=frontier,
            max_nodes=max_nodes,
            by_cost=by_cost and shape == "tree",
            children=children,
        )
        self._chain = shape == "chain"
        self._longest_text = 0  # of the target
        self._target: Target | None = None
        tree = self.capabilities
        self.capabilities = Capabilities(
            shape,
            has_q=tree.has_q,
            needs_hidden=True,
            taps=self.config.taps,  # EAGLE-1: none, for the state after the final norm
            can_overlap=self._chain,
            needs_costs=tree.needs_costs,
        )

    @property
    def cache(self) -> HeadCache:
        """The head and the rows' elements."""
        return cast(HeadCache, self.model)

    def as_chain(self, children: str) -> "EagleDrafter":
        """Return a drafter of chains with the same head, which no costs shorten."""
        head = self.cache.head
        return EagleDrafter(head=head, shape="chain", children=children, name=self.name)

    def width(self, gamma: int) -> int:
        """Return the maximum number of tokens in a proposal of draft length or depth `gamma`."""
        return gamma if self._chain else super().width(gamma)

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Use the target's embedding, for EAGLE-1 its lm_head too, and store the costs.

        Raises UserError for a target of other sizes than the head's, or on another device.
        """
        super().prepare(target, costs)
        check_target(self.name, self.config, self.cache.device, target)
        self.capabilities = replace(self.capabilities, taps=self.config.taps_of(target.num_layers))
        if target is not self._target:
            cache = make_cache(self.cache.head, self.name, target, self._execution)
            self.model, self._target = cast(Target, cache), target
        self.cache.embed, self._longest_text = target.embed, target.max_length
        if self.config.predicts_states:
            dtype = DTYPES[target.dtype]
            self.cache.lm_head = lambda hidden: target.lm_head(hidden.to(dtype))

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Read the prompts' tokens and states, with room for nodes that are not proposed.

        Raises UserError for texts that may be longer than the head's positions.
        """
        positions = self.config.max_positions
        longest = capacity - (0 if self._chain else self.max_nodes)
        if longest > positions < self._longest_text:
            raise UserError(
                f"drafter '{self.name}': its head has {positions:,} positions, but the texts and "
                f"their drafts may have {longest:,}. Load the target with max_length={positions}, "
                f"or use shorter prompts or fewer new tokens."
            )
        self.cache.open(len(prompts_B), capacity + self.max_nodes * self.frontier)
        self._budget = None
        self._read_prompts(prompts_B, prefill_hidden_BNC)

    def _read_prompts(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        if prefill_hidden_BNC is not None:
            self.cache.add_states(prefill_hidden_BNC, [len(prompt) - 1 for prompt in prompts_B])
            self.cache.read(prompts_B)

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Read the new prompts' tokens and states."""
        running = self.cache.open_more(len(prompts_B))
        self._read_prompts(prompts_B, prefill_hidden_BNC)
        self.cache.put_before(running)
        if self._budget is not None:
            self._budget.add_rows(len(prompts_B))

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Keep the first `kept` tokens, and read the others."""
        self._budget = None
        first = len(prompt) - 1 - (0 if hidden_NC is None else len(hidden_NC))
        self.cache.truncate([min(kept, first)])
        if hidden_NC is not None:
            self.cache.add_states(hidden_NC[None], [len(hidden_NC)])
        self.cache.read([prompt])

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain or a tree for each row."""
        if not self._chain:
            return super().propose(sequences_B, budgets_B, stopping_B, chooser)
        if self.children == "top_k" and chooser.tests_q:
            chooser = likeliest_chooser(chooser)
        return ChainDrafter.propose(self, sequences_B, budgets_B, stopping_B, chooser)

    def observe(self, observation: Observation) -> None:
        """Store the target's states at the tip and the accepted tokens of each row."""
        self.cache.add_states(*accepted_states(observation))
        super().observe(observation)

    def draft_budget(
        self, target: Target, steps: float, gamma: int, context: int, rows: float
    ) -> ForwardBudget:
        """Return the budget of a mean round's draft (see `BudgetedDrafter`).

        A step counts one element per row. EAGLE-1 joins states and embeddings in every step.
        """
        joined = steps if self.config.predicts_states else min(steps, 1)
        step = self._elements_budget(target, 1, context, rows)
        return (
            step.times(steps)
            + self._joining_budget(rows).times(joined)
            + budget.embedding(target, rows).times(min(steps, 1))  # of the tip before
        )

    def _joining_budget(self, rows: float) -> ForwardBudget:
        return budget.products([self.cache.head.fc.weight], rows)

    def _elements_budget(
        self, target: Target, count: int, context: int, rows: float
    ) -> ForwardBudget:
        """Return the budget of `count` elements of each row in one step."""
        head, config, tokens = self.cache.head, self.config, count * rows
        found = budget.products(head.midlayer.parameters(), tokens)
        sizes = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        found += budget.attention(*sizes, context, count, rows, self.cache.dtype)
        # one token a row, and the mask token
        found += budget.embedding(target, rows + (count > 1))
        if config.predicts_states:
            return found + budget.lm_head(target, tokens)
        return found + budget.products(head.lm_head.parameters(), tokens)

    def time_step(self, frontier: int = 1) -> None:
        """Run the nodes of one draft step without storing them."""
        self.cache.time_nodes(1 if self._chain else self.frontier)

    def _within_context(self, sequences_B: Tokens, budgets_B: Sequence[int]) -> list[int]:
        return list(budgets_B)

    def _unseen(self, sequences_B: Tokens, counts_B: Sequence[int]) -> list[list[int]]:
        return [list(sequence) for sequence in sequences_B]

    def _read_last(self, unseen_B: list[list[int]]) -> Tensor:
        return self.cache.start(unseen_B)

    def _step(self, tokens_B1: Tensor, counts_B: Sequence[int]) -> Tensor:
        return self.cache.extend(tokens_B1)[:, 0]

    def _run(self, chooser: Chooser, tokens_BN: Tensor, parents_BN: Tensor, last: int) -> Tensor:
        """Return the logits (B, `last`, V) after the last nodes; the others have run before."""
        return self.cache.run(tokens_BN[:, -last:], parents_BN[:, -last:] + 1)
