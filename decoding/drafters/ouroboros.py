"""Ouroboros: a small model drafts by lookahead decoding, and phrases from a pool extend its draft.

Source: Zhao et al. 2024, "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster
Speculative Decoding" (arXiv 2402.13720). The draft model's forwards carry a lookahead window, so a
step drafts more than one token. The newest phrases after the last drafted token are attached to it
as branches, and the target verifies all in one forward. The pool then stores the target's tokens:
those for the rest of the draft after a rejection, and a corrected copy of each attached phrase.
Drafts are the model's choices, point masses for every rule.

On a GPU a round waits once for each forward of the draft model and once for the target's, since
phrases are looked up on the host by the last chosen token.

Shapes: B rows, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.lookahead import (
    Lookahead,
    Phrase,
    PhrasePool,
    TreeBuilder,
    argmax_tokens,
    pack_trees,
)
from decoding.errors import UserError
from decoding.interfaces import (
    Capabilities,
    Chooser,
    Observation,
    Outcome,
    Policies,
    Proposal,
    Tokens,
    ancestors,
)
from decoding.sampling.readback import DeviceReadback
from decoding.verification.follow import follow


@dataclass(slots=True)
class DraftedRow:
    """A row's draft in the proposed tree."""

    chain: list[int]  # nodes of the chain
    tokens: list[int]  # their tokens
    # of each attached phrase: its nodes, their tokens, and the complete phrase
    suffixes: list[tuple[list[int], list[int], Phrase]]


class Ouroboros(ChainDrafter):
    """A small model whose chains end with phrases from a pool.

    Hydra: `_target_: decoding.drafters.ouroboros.Ouroboros`. ngram, columns, candidates: arguments
    of the lookahead inside the draft model (decoding/drafters/lookahead.py). suffixes: number of
    attached phrases. An attached phrase takes ngram - 1 tokens of the draft length, at most half
    of it. The other arguments are those of ChainDrafter.
    """

    capabilities = Capabilities(shape="tree", keeps_pools=True)

    def __init__(
        self,
        *arguments: Any,
        ngram: int = 4,
        columns: int = 4,
        candidates: int = 3,
        suffixes: int = 3,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        if suffixes < 0:
            raise UserError(f"suffixes is {suffixes}, expected 0 or more. Use 0 for no phrases.")
        self.suffixes = suffixes
        self.inner = Lookahead(ngram, columns, max(candidates, suffixes))
        self.candidates = candidates
        self._drafted: list[DraftedRow | None] = []

    @property
    def phrase_length(self) -> int:
        """Number of tokens of an attached phrase."""
        return self.inner.ngram - 1

    def width(self, gamma: int) -> int:
        """Return the maximum number of nodes: the chain and the attached phrases."""
        return gamma + self.suffixes * min(self.phrase_length, gamma)

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Read the prompts, with room for the window in the cache, and start with empty pools."""
        super().open(prompts_B, prefill_hidden_BNC, capacity + self.inner.width(self.phrase_length))
        self.inner.open(prompts_B, None, capacity)
        self._drafted = [None] * len(prompts_B)

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Read the new prompts, and start with empty pools."""
        super().join(prompts_B, prefill_hidden_BNC)
        self.inner.join(prompts_B, None)
        self._drafted = [*self._drafted, *[None] * len(prompts_B)]

    def new_pool(self, most: int) -> PhrasePool:
        """Return an empty pool with phrases after at most `most` tokens."""
        return self.inner.new_pool(most)

    def use_pool(self, row: int, pool: Any) -> None:
        """Let a row begin with the phrases of earlier ones: the paper's warm start."""
        self.inner.use_pool(row, pool)

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Read the new tokens, and start with empty pools."""
        super().resume(prompt, kept, hidden_NC)
        self.inner.resume(prompt, kept, None)
        self._drafted = [None]

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft each row's chain with phrases; rows past this model's context get none."""
        depths_B = self._within_context(sequences_B, budgets_B)
        self._drafted = [None] * len(depths_B)
        if max(depths_B) == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), depths_B)
        wanted_B = [depth - min(self.phrase_length, depth // 2) for depth in depths_B]
        drafted_B, steps = self._draft(sequences_B, wanted_B, chooser)
        trees = []
        for row, (drafted, depth) in enumerate(zip(drafted_B, depths_B)):
            tree = TreeBuilder()
            if drafted:
                chain = tree.add(drafted)
                phrases = self.inner.pools[row].newest(drafted[-1], self.suffixes)
                cuts = [(list(phrase[: depth - len(drafted)]), phrase) for phrase in phrases]
                attached = [(tree.add(cut, chain[-1]), cut, phrase) for cut, phrase in cuts if cut]
                self._drafted[row] = DraftedRow(chain, drafted, attached)
            trees.append(tree)
        proposal = pack_trees(trees, [len(tree.tokens) for tree in trees], chooser.device)
        proposal.steps, proposal.readback = steps, argmax_tokens
        return proposal

    def _draft(
        self, sequences_B: Tokens, wanted_B: Sequence[int], chooser: Chooser
    ) -> tuple[list[list[int]], int]:
        """Return each row's next tokens by lookahead decoding, and the number of forwards."""
        logits_BV = self._fit(self._catch_up(sequences_B, wanted_B), chooser)
        depths_B1 = torch.zeros(len(wanted_B), 1, dtype=torch.long, device=chooser.device)
        (first_B,) = devices.read(self._choose(logits_BV[:, None], depths_B1, chooser))
        drafted_B = [[first[0]] if wanted else [] for first, wanted in zip(first_B, wanted_B)]
        steps = 1
        while any(len(drafted) < wanted for drafted, wanted in zip(drafted_B, wanted_B)):
            contexts_B = [[*text, *drafted] for text, drafted in zip(sequences_B, drafted_B)]
            done_B = [len(drafted) for drafted in drafted_B]
            left_B = [wanted - done for wanted, done in zip(wanted_B, done_B)]
            outcome = self._inner_round(contexts_B, left_B, done_B, chooser)
            for drafted, new, left in zip(drafted_B, outcome.tokens_B, left_B):
                drafted += new[:left] if left else []
            steps += 1
        return drafted_B, steps

    def _inner_round(
        self,
        contexts_B: Sequence[Sequence[int]],
        left_B: list[int],
        done_B: list[int],
        chooser: Chooser,
    ) -> Outcome:
        """Run one lookahead round of the draft model; finished rows keep their state."""
        proposal = self.inner.propose(contexts_B, left_B, (), chooser)
        assert proposal.parents_BN is not None
        device = self.model.device
        tips_B1 = devices.tensor([context[-1:] for context in contexts_B], device)
        known_BN = self._fit_ids(torch.cat((tips_B1, proposal.tokens_BN.to(device)), 1), chooser)
        below_BN = torch.cat((torch.full_like(tips_B1, -1), proposal.parents_BN.to(device) + 1), 1)
        logits_BNV = self._fit(self.model.forward(known_BN, below_BN)[0], chooser)
        counted = proposal.counted()
        width = 1 if counted is None else 1 + counted.tokens_BN.shape[1]
        done_B1 = devices.tensor(done_B, device)[:, None]
        depths_BN = ancestors(below_BN[:, :width]).sum(-1) - 1 + done_B1
        readback = DeviceReadback(*argmax_tokens(logits_BNV))
        outcome = follow(self._choose(logits_BNV[:, :width], depths_BN, chooser), counted, readback)
        kept_B = [min(accepted + 1, left) for accepted, left in zip(outcome.accepted_B, left_B)]
        paths_B = outcome.paths_B
        if paths_B is not None:
            paths_B = [[0, *(node + 1 for node in path)] for path in paths_B]
        self.model.commit(paths_B, kept_B)
        self.inner.observe(Observation(outcome, logits_BNV, logits_BNV, readback.drafter_values()))
        return outcome

    @staticmethod
    def _choose(logits_BNV: Tensor, depths_BN: Tensor, chooser: Chooser) -> Tensor:
        """Return the model's token after each node: its argmax, or its choice by shared noise."""
        if chooser.rule != "coupled":
            return devices.argmax(logits_BNV)
        depths_BN = depths_BN.to(chooser.device).clamp(max=chooser.depths - 1)
        return chooser.race(logits_BNV, 0, depths_BN)

    def observe(self, observation: Observation) -> None:
        """Store the target's tokens for the rejected part of the chain and for each phrase."""
        (choices_BN,) = observation.readback or ([],)
        for row, drafted in enumerate(self._drafted):
            if drafted is None:
                continue
            chosen, pool = choices_BN[row], self.inner.pools[row]
            accepted = min(observation.outcome.accepted_B[row], len(drafted.chain))
            if accepted < len(drafted.chain):
                nodes = [-1, *drafted.chain][accepted:]
                corrections = [chosen[node + 1] for node in nodes]
                # the last phrases of a short draft are prefixes
                for at, first in enumerate(corrections[:-1], 1):
                    pool.add(first, tuple(corrections[at : at + self.phrase_length]))
            for nodes, tokens, phrase in drafted.suffixes:
                corrected = [chosen[node + 1] for node in [drafted.chain[-1], *nodes[:-1]]]
                if corrected != tokens:
                    pool.drop(drafted.tokens[-1], phrase)
                    # the target predicted nothing for the part that was cut off
                    pool.add(drafted.tokens[-1], (*corrected, *phrase[len(corrected) :]))
        self._drafted = [None] * len(self._drafted)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().select(rows)
        self.inner.select(rows)
        self._drafted = [self._drafted[row] for row in rows]

    def time_step(self, frontier: int = 1) -> None:
        """Run one forward over a token, the window and the candidates without committing."""
        self._time_forward(1 + self.inner.width(self.phrase_length))
