"""Suffix lookup before a model drafter: a long match in a row's text replaces the model's draft.

If the last `min_match` or more tokens occurred before, what followed them is proposed and the
model does not run; otherwise the model reads the tokens that it missed, and drafts its chain or
tree. Source: the hybrid of SAM Decoding (Hu et al. 2024, arXiv 2411.10666).

Shapes: B rows, N drafted tokens, V vocabulary, P nodes with children, K candidates.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.lookahead import Lookahead
from decoding.drafters.prompt_lookup import (
    Lookup,
    TextPool,
    after_pools,
    continuation,
    point_masses,
)
from decoding.drafters.remote import RemoteChain
from decoding.drafters.suffix_automaton import SuffixAutomaton
from decoding.errors import UserError
from decoding.interfaces import (
    Chooser,
    Drafter,
    Observation,
    Policies,
    PoolKeeper,
    Proposal,
    RoundCosts,
    Target,
    Tokens,
    TopRows,
)
from decoding.stopping.base import cut


class LookupFirst:
    """Suffix lookup before a drafter, which drafts only for the rows without a match.

    min_match: the match length from which lookup is preferred to the drafter.
    """

    def __init__(self, drafter: Drafter, min_match: int = 6) -> None:
        if min_match < 1:
            raise UserError(f"min_match is {min_match}, expected 1 or more.")
        self.drafter, self.min_match, self.name = drafter, min_match, drafter.name
        # the index cannot be rolled back
        self.capabilities = replace(drafter.capabilities, can_overlap=False, keeps_pools=True)
        self._indices: list[SuffixAutomaton] = []
        # of each row: text of earlier rows that is indexed before its own
        self._before: list[list[int]] = []

    @property
    def num_layers(self) -> int:
        """Number of layers of the drafter."""
        return self.drafter.num_layers

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the drafter."""
        return self.drafter.num_parameters

    def width(self, gamma: int) -> int:
        """Return the drafter's width or the length of a copied chain, whichever is larger."""
        return max(self.drafter.width(gamma), gamma)

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Prepare the drafter."""
        self.drafter.prepare(target, costs)

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Open the drafter and index the prompts."""
        self.drafter.open(prompts_B, prefill_hidden_BNC, capacity)
        self._indices = [SuffixAutomaton(self.min_match) for _ in prompts_B]
        self._before = [[] for _ in prompts_B]

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Let the drafter start the new rows, and index their prompts."""
        self.drafter.join(prompts_B, prefill_hidden_BNC)
        self._indices = [*self._indices, *(SuffixAutomaton(self.min_match) for _ in prompts_B)]
        self._before = [*self._before, *([] for _ in prompts_B)]

    def new_pool(self, most: int) -> TextPool:
        """Return an empty pool of at most `most` tokens, and in it one of the drafter."""
        inner = self.drafter
        keeps = inner.capabilities.keeps_pools
        return TextPool(most, cast(PoolKeeper, inner).new_pool(most) if keeps else None)

    def use_pool(self, row: int, pool: Any) -> None:
        """Index the pool's text before the row's own, and let the drafter use its pool."""
        self._before[row], self._indices[row] = list(pool.tokens), SuffixAutomaton(self.min_match)
        if pool.inner is not None:
            cast(PoolKeeper, self.drafter).use_pool(row, pool.inner)

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Resume the drafter and index the text again."""
        self.drafter.resume(prompt, kept, hidden_NC)
        self._indices, self._before = [SuffixAutomaton(self.min_match)], [[]]

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Propose copied tokens for rows with a match, and the drafter's tokens for the others."""
        texts_B = after_pools(self._before, sequences_B)
        copied_B = [
            cut(continuation(text, index.find(text), budget), policy) if budget else []
            for index, text, budget, policy in zip(
                self._indices, texts_B, budgets_B, stopping_B, strict=True
            )
        ]
        copied = point_masses(copied_B, chooser)
        # a tree even if no row drafts one, since the noise of trees is keyed by node
        if self.capabilities.shape == "tree":
            chain_N = torch.arange(-1, copied.tokens_BN.shape[1] - 1, device=chooser.device)
            copied.parents_BN = chain_N.expand_as(copied.tokens_BN)
        left_B = [0 if tokens else budget for tokens, budget in zip(copied_B, budgets_B)]
        if max(left_B) == 0:
            return copied
        drafted = self.drafter.propose(sequences_B, left_B, stopping_B, chooser)
        if max(copied.counts_B) == 0:
            return drafted
        # past the model's context, or not worth drafting
        if max(drafted.counts_B) == 0 and drafted.riders is None:
            copied.steps, copied.frontiers = drafted.steps, drafted.frontiers
            return copied
        return _merged(drafted, copied, chooser)

    def observe(self, observation: Observation) -> None:
        """Pass the outcome to the drafter, which skips the rows without drafted tokens."""
        self.drafter.observe(observation)

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Roll back the drafter; the index holds emitted tokens only."""
        self.drafter.rollback(lengths_B)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.drafter.select(rows)
        self._indices = [self._indices[row] for row in rows]
        self._before = [self._before[row] for row in rows]

    def time_step(self, frontier: int = 1) -> None:
        """Run one step of the drafter; a lookup costs almost nothing."""
        self.drafter.time_step(frontier)


class ChainWithLookup(LookupFirst):
    """A chain drafter with suffix lookup before it.

    Hydra: `_target_: decoding.drafters.with_lookup.ChainWithLookup`. The other arguments are those
    of ChainDrafter.
    """

    def __init__(self, *arguments: Any, min_match: int = 6, **named: Any) -> None:
        super().__init__(ChainDrafter(*arguments, **named), min_match)


def check_lookup_before(kind: type) -> None:
    """Raise UserError for a drafter class that lookup cannot precede.

    Lookup needs a drafter with a model that does not draft while the target verifies.
    """
    reasons: dict[tuple[type, ...], str] = {
        (Lookup, LookupFirst): "already looks up by itself",
        (Lookahead,): "has no draft model",
        (RemoteChain,): "drafts while the target verifies, and a lookup cannot be rolled back",
    }
    for kinds, reason in reasons.items():
        if issubclass(kind, kinds):
            raise UserError(
                f"lookup= needs a model that drafts in turn with the target, but {kind.__name__} "
                f"{reason}. Omit lookup=."
            )


def _merged(drafted: Proposal, copied: Proposal, chooser: Chooser) -> Proposal:
    """Merge two proposals, at most one of which has tokens for a given row.

    Copied tokens are point masses.
    """
    width = max(drafted.tokens_BN.shape[1], copied.tokens_BN.shape[1])
    is_copied_B1 = devices.tensor(copied.counts_B, chooser.device)[:, None] > 0
    tokens_BN = torch.where(
        is_copied_B1, _widen(copied.tokens_BN, width), _widen(drafted.tokens_BN, width)
    )
    counts_B = [a or b for a, b in zip(drafted.counts_B, copied.counts_B, strict=True)]
    merged = replace(drafted, tokens_BN=tokens_BN, counts_B=counts_B, with_tips_BN=None)
    if drafted.parents_BN is not None:
        assert copied.parents_BN is not None
        chain_BN, parents_BN = _widen(copied.parents_BN, width), _widen(drafted.parents_BN, width)
        merged.parents_BN = torch.where(is_copied_B1, chain_BN, parents_BN)
    is_copied_B11 = is_copied_B1[:, :, None]
    if drafted.q_BNV is not None:
        q_BNV = _widen(drafted.q_BNV, width)
        masses_BNV = torch.zeros_like(q_BNV).scatter_(-1, tokens_BN[:, :, None], 1.0)
        merged.q_BNV = torch.where(is_copied_B11, masses_BNV, q_BNV)
    if drafted.q_top is not None:
        merged.q_top = _with_masses(drafted.q_top, tokens_BN, is_copied_B11, chooser.vocab_size)
    return merged


def _widen(values: Tensor, width: int) -> Tensor:
    """Pad the second dimension with zeros, which no row counts."""
    after = [0, 0] * (values.dim() - 2)
    return F.pad(values, [*after, 0, max(width - values.shape[1], 0)])


def _with_masses(
    sampled: TopRows, tokens_BN: Tensor, is_copied_B11: Tensor, vocab_size: int
) -> TopRows:
    """Return `sampled` with point masses in the rows of copied chains.

    Node n of a chain is the only child of the node before it, and row n holds its distribution.
    """
    P, K = max(sampled.ids_BPK.shape[1], tokens_BN.shape[1]), sampled.ids_BPK.shape[2]
    ids_BPK, probs_BPK = _widen(sampled.ids_BPK, P), _widen(sampled.probs_BPK, P)
    # the ids of a row must be distinct; those after the token have probability 0
    others_K = torch.arange(K, device=tokens_BN.device)
    copied_BPK = (_widen(tokens_BN, P)[:, :, None] + others_K) % vocab_size
    masses_BPK = (others_K == 0).to(probs_BPK.dtype).expand_as(probs_BPK)
    # the tail of a copied row has no weight
    tail_BPV = None if sampled.tail_BPV is None else _widen(sampled.tail_BPV, P)
    return TopRows(
        torch.where(is_copied_B11, copied_BPK, ids_BPK),
        torch.where(is_copied_B11, masses_BPK, probs_BPK),
        tail_BPV,
    )
