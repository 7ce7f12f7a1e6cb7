"""Any model drafter, copying where it can: a long match in the row's own text stands in for its draft.

Where the row's ending stood before for at least `min_match` tokens, what followed it is proposed and the model does not run; elsewhere the
model drafts its chain or tree. The model reads what it missed in its next turn. Source: the hybrid of SAM Decoding (Hu et al. 2024, arXiv
2411.10666).

Shapes: B rows, N drafted tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import cuda
from decoding.chain import ChainDrafter
from decoding.chooser import Chooser
from decoding.drafter import Proposal
from decoding.errors import UserError
from decoding.prompt_lookup import continuation, point_masses
from decoding.stopping import Stopping, cut
from decoding.suffix_automaton import SuffixAutomaton


class LookupFirst(ChainDrafter):
    """Suffix lookup before the drafter that stands behind this class in the order of bases.

    min_match: tokens of a match that is trusted more than the model; the other arguments are that drafter's.
    """

    def __init__(self, *arguments: Any, min_match: int = 6, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if min_match < 1:
            raise UserError(f"min_match is {min_match}, expected a number of tokens from 1 up.")
        self.min_match = min_match
        self.caps = replace(self.caps, can_overlap=False)  # what the index has read cannot be taken back
        self._indices: list[SuffixAutomaton] = []

    def width(self, gamma: int) -> int:
        """The drafter's own, or a copied chain."""
        return max(super().width(gamma), gamma)

    def open(self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Index the prompts, and have the model read them."""
        super().open(prompts_B, prefill_hidden_BNC, capacity)
        self._indices = [SuffixAutomaton(self.min_match) for _ in prompts_B]

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Have the model read what is new, and index the text again."""
        super().resume(prompt, kept, hidden_NC)
        self._indices = [SuffixAutomaton(self.min_match)]

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """Copied tokens for the rows that have a match, the model's for the others."""
        copied_B = [
            cut(continuation(sequence, index.find(sequence), budget), policy) if budget else []
            for index, sequence, budget, policy in zip(self._indices, sequences_B, budgets_B, stopping_B, strict=True)
        ]
        copied = point_masses(copied_B, chooser)
        if self.caps.shape == "tree":  # whatever a row's neighbours draft: on trees every node has noise of its own
            chain_N = torch.arange(-1, copied.tokens_BN.shape[1] - 1, device=chooser.device)
            copied.parents_BN = chain_N.expand_as(copied.tokens_BN)
        left_B = [0 if tokens else budget for tokens, budget in zip(copied_B, budgets_B)]
        if max(left_B) == 0:
            return copied
        drafted = super().propose(sequences_B, left_B, stopping_B, chooser)
        if drafted.tokens_BN.shape[1] == 0:  # beyond the model's context, or not worth it
            return copied
        return _merged(drafted, copied, chooser) if max(copied.counts_B) else drafted

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().select(rows)
        self._indices = [self._indices[row] for row in rows]


class ChainWithLookup(LookupFirst, ChainDrafter):
    """A chain drafter with suffix lookup before it. Hydra: `_target_: decoding.with_lookup.ChainWithLookup`."""


@cache
def with_lookup(kind: type) -> type[LookupFirst]:
    """The class of a model drafter with suffix lookup before it.

    Raises UserError for one that is no model, or that learns from what became of its own proposals: it would take copies for them.
    """
    if kind is ChainDrafter:
        return ChainWithLookup
    why = ""
    if not issubclass(kind, ChainDrafter):
        why = "has no model that drafts"
    elif issubclass(kind, LookupFirst):
        why = "looks up by itself already"
    elif kind.caps.learns_words:
        why = "learns from what became of its proposals, and would take copies for them"
    if why:
        raise UserError(
            f"lookup= goes before a model that drafts chains or trees; {kind.__name__} {why}: leave lookup= out."
        )
    return type(f"{kind.__name__}WithLookup", (LookupFirst, kind), {})


def _merged(drafted: Proposal, copied: Proposal, chooser: Chooser) -> Proposal:
    """One proposal of both; of a row at most one has tokens. A copied token is drawn from a point mass."""
    width = max(drafted.tokens_BN.shape[1], copied.tokens_BN.shape[1])
    sides_BN = [F.pad(side.tokens_BN, (0, width - side.tokens_BN.shape[1])) for side in (drafted, copied)]
    is_copied_B1 = cuda.tensor(copied.counts_B, chooser.device)[:, None] > 0
    merged = Proposal(
        torch.where(is_copied_B1, sides_BN[1], sides_BN[0]),
        [a or b for a, b in zip(drafted.counts_B, copied.counts_B, strict=True)],
        steps=drafted.steps,
        siblings=drafted.siblings,
        asks=drafted.asks,
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
    return merged
