"""Suffix lookup before any model drafter: a long match in the row's text replaces its draft.

If the last `min_match` or more tokens occurred before, what followed them is proposed and the
model does not run; otherwise the model reads the tokens that it missed, and drafts its chain or
tree. Source: the hybrid of SAM Decoding (Hu et al. 2024, arXiv 2411.10666).

Shapes: B rows, N drafted tokens, V vocabulary, P nodes with children, K candidates.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.lookahead import Lookahead
from decoding.drafters.prompt_lookup import Lookup, continuation, point_masses
from decoding.drafters.remote import RemoteChain
from decoding.drafters.suffix_automaton import SuffixAutomaton
from decoding.errors import UserError
from decoding.interfaces import (
    Chooser,
    Drafter,
    Observation,
    Proposal,
    RoundCosts,
    Stopping,
    Target,
    TopRows,
)
from decoding.stopping.base import cut


class LookupFirst:
    """Suffix lookup before a drafter, which drafts only for the rows without a match.

    min_match: the match length from which lookup is preferred to the drafter.
    """

    def __init__(self, drafter: Drafter, min_match: int = 6) -> None:
        if min_match < 1:
            raise UserError(f"min_match is {min_match}, expected at least 1. Use 1 or more.")
        self.drafter, self.min_match, self.name = drafter, min_match, drafter.name
        # the index cannot be rolled back
        self.capabilities = replace(drafter.capabilities, can_overlap=False)
        self._indices: list[SuffixAutomaton] = []

    @property
    def num_layers(self) -> int:
        """Number of layers of the drafter."""
        return self.drafter.num_layers

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the drafter."""
        return self.drafter.num_parameters

    def width(self, gamma: int) -> int:
        """Return the larger of the drafter's width and a copied chain's."""
        return max(self.drafter.width(gamma), gamma)

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Prepare the drafter."""
        self.drafter.prepare(target, costs)

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        """Open the drafter and index the prompts."""
        self.drafter.open(prompts_B, prefill_hidden_BNC, capacity)
        self._indices = [SuffixAutomaton(self.min_match) for _ in prompts_B]

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Resume the drafter and index the text again."""
        self.drafter.resume(prompt, kept, hidden_NC)
        self._indices = [SuffixAutomaton(self.min_match)]

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """Propose copied tokens for rows with a match, and the drafter's tokens for the others."""
        copied_B = [
            cut(continuation(sequence, index.find(sequence), budget), policy) if budget else []
            for index, sequence, budget, policy in zip(
                self._indices, sequences_B, budgets_B, stopping_B, strict=True
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
        if max(drafted.counts_B) == 0:  # past the model's context, or not worth drafting
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

    Lookup needs a model that drafts while the target waits.
    """
    why = ""
    if issubclass(kind, (Lookup, LookupFirst)):
        why = "already looks up by itself"
    elif issubclass(kind, Lookahead):
        why = "has no draft model"
    elif issubclass(kind, RemoteChain):
        why = (
            "drafts while the target verifies, and the lookup cannot be rolled back when a chunk "
            "is discarded"
        )
    if why:
        raise UserError(
            f"lookup= needs a model that drafts in turn with the target, but {kind.__name__} "
            f"{why}. Omit lookup=."
        )


def _merged(drafted: Proposal, copied: Proposal, chooser: Chooser) -> Proposal:
    """Merge two proposals, at most one of which has tokens for a given row.

    Copied tokens are point masses.
    """
    width = max(drafted.tokens_BN.shape[1], copied.tokens_BN.shape[1])
    sides_BN = [
        F.pad(side.tokens_BN, (0, width - side.tokens_BN.shape[1])) for side in (drafted, copied)
    ]
    is_copied_B1 = devices.tensor(copied.counts_B, chooser.device)[:, None] > 0
    merged = Proposal(
        torch.where(is_copied_B1, sides_BN[1], sides_BN[0]),
        [a or b for a, b in zip(drafted.counts_B, copied.counts_B, strict=True)],
        steps=drafted.steps,
        frontiers=drafted.frontiers,
        siblings=drafted.siblings,
        readback=drafted.readback,
    )
    if drafted.parents_BN is not None:
        parents_BN = F.pad(drafted.parents_BN, (0, width - drafted.parents_BN.shape[1]), value=-1)
        assert copied.parents_BN is not None
        chain_BN = F.pad(copied.parents_BN, (0, width - copied.parents_BN.shape[1]), value=-1)
        merged.parents_BN = torch.where(is_copied_B1, chain_BN, parents_BN)
    if drafted.q_BNV is not None:
        q_BNV = F.pad(drafted.q_BNV, (0, 0, 0, width - drafted.q_BNV.shape[1]))
        masses_BNV = torch.zeros_like(q_BNV).scatter_(-1, merged.tokens_BN[:, :, None], 1.0)
        merged.q_BNV = torch.where(is_copied_B1[:, :, None], masses_BNV, q_BNV)
    if drafted.q_top is not None:
        merged.q_top = _with_masses(
            drafted.q_top, merged.tokens_BN, is_copied_B1[:, :, None], chooser.vocab_size
        )
    return merged


def _with_masses(
    drawn: TopRows, tokens_BN: Tensor, is_copied_B11: Tensor, vocab_size: int
) -> TopRows:
    """Return `drawn` with point masses in the rows of copied chains.

    Node n of a chain is the only child of the node before it, and row n holds its distribution.
    """
    _, P, K = drawn.ids_BPK.shape
    N = tokens_BN.shape[1]
    ids_BPK, probs_BPK = (
        F.pad(part, (0, 0, 0, max(N - P, 0))) for part in (drawn.ids_BPK, drawn.probs_BPK)
    )
    tokens_BP = F.pad(tokens_BN, (0, max(P - N, 0)))
    # the ids of a row must be distinct; those after the token have probability 0
    others_K = torch.arange(K, device=tokens_BN.device)
    mass_BPK = torch.zeros_like(probs_BPK)
    mass_BPK[:, :, 0] = 1.0
    # the tail of a copied row has no weight
    tail_BPV = None if drawn.tail_BPV is None else F.pad(drawn.tail_BPV, (0, 0, 0, max(N - P, 0)))
    return TopRows(
        torch.where(is_copied_B11, (tokens_BP[:, :, None] + others_K) % vocab_size, ids_BPK),
        torch.where(is_copied_B11, mass_BPK, probs_BPK),
        tail_BPV,
    )
