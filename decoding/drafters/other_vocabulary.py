"""A causal LM with another tokenizer than the target's drafts chains, without loss.

Timor et al. 2025, arXiv 2502.05202. The drafter reads the text in its own tokens. By the rule
`tokens` (token-level intersection) it drafts tokens that both vocabularies share: its distribution
over them, renormalised, is q, and any rule tests p / q. By the rule `strings` (string-level exact
match) it drafts text in its own tokens, which the target's tokenizer encodes as the continuation of
the row's tokens. These are point masses, so sampling verifies them without q.

Shapes: B rows, N drafted tokens, S shared tokens, V the target's vocabulary, D the drafter's.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.base import StatelessDrafter
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.prompt_lookup import point_masses
from decoding.drafters.translation import Translation, Vocabularies
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Policies, Proposal, Target, Tokens
from decoding.models.draft_vocabulary import spread
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.stopping.base import Fixed, cut

TOKENS, STRINGS = "tokens", "strings"
RULES = (TOKENS, STRINGS)
# Cache slots for each new token of the target. Rows whose text needs more draft nothing.
SLOTS_PER_TOKEN = 4
SPARE_SLOTS = 8
MOST_PER_TOKEN = 4.0  # drafted tokens of the drafter for each of the target


class OtherVocabulary(StatelessDrafter):
    """A causal LM with another tokenizer that proposes chains.

    Hydra: `_target_: decoding.drafters.other_vocabulary.OtherVocabulary`. rule: `tokens` or
    `strings`. target_folder: the target's, whose tokenizer is read; the front door passes it.
    vocabularies: with a `model` in memory. options: further options of `ChainDrafter`.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        rule: str = TOKENS,
        target_folder: str | Path | None = None,
        model: Target | None = None,
        vocabularies: Vocabularies | None = None,
        **options: Any,
    ) -> None:
        """Load a model folder, or use a `model` in memory.

        Raises UserError for an unknown rule, for a folder or a tokenizer that cannot be loaded, and
        for vocabularies without a common token.
        """
        if rule not in RULES:
            raise UserError(f"rule is {rule!r}, expected one of {', '.join(RULES)}.")
        self.rule = rule
        self.chain = ChainDrafter(folder, model=model, **options)
        self.model, self.name = self.chain.model, self.chain.name
        self.num_layers, self.num_parameters = self.chain.num_layers, self.chain.num_parameters
        if vocabularies is None:
            if folder is None or target_folder is None:
                raise ValueError(
                    "OtherVocabulary needs a folder and the target's, or a model and vocabularies."
                )
            trusted = bool(options.get("trust_remote_code", False))
            vocabularies = Vocabularies.of_folders(target_folder, folder, trusted)
        self.vocabularies = vocabularies
        if rule == TOKENS:
            self.capabilities = Capabilities(shape="chain", has_q=True)
        else:
            self.capabilities = Capabilities(shape="chain", stops_by_token=False)
        self._translations: list[Translation] = []
        # the drafter's tokens whose first `model.lengths_B` are in the cache
        self._held_B: list[list[int]] = []
        self._capacity = 0
        self._shared: _SharedIds | None = None

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Read each prompt in the drafter's tokens, except the last one."""
        self._translations = [Translation(self.vocabularies) for _ in prompts_B]
        self._held_B = self._translate(prompts_B)
        longest = max(
            len(held) + SLOTS_PER_TOKEN * (capacity - len(prompt))
            for held, prompt in zip(self._held_B, prompts_B, strict=True)
        )
        self._capacity = min(longest, self.model.max_length) + SPARE_SLOTS
        self.chain.open(self._held_B, None, self._capacity)

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Read the new prompts in the drafter's tokens; a row that has no room drafts nothing."""
        translations = [Translation(self.vocabularies) for _ in prompts_B]
        held_B = [new.of(prompt) for new, prompt in zip(translations, prompts_B, strict=True)]
        held_B = [held[: self._capacity - SPARE_SLOTS] for held in held_B]
        self._translations = [*self._translations, *translations]
        self._held_B = [*self._held_B, *held_B]
        self.chain.join(held_B, None)

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Keep the tokens of the text so far that begin the prompt's, and read the others."""
        self._translations = [Translation(self.vocabularies)]
        (translated,) = self._translate([prompt])
        if min(len(translated), self.model.max_length) + SPARE_SLOTS > self._capacity:
            self.open([prompt], None, len(prompt) + self.model.max_length)
            return
        same = _common(self._held_B[0][: self.model.lengths_B[0]], translated)
        self._held_B = [translated]
        self.chain.resume(translated, same, None)

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain for each row; rows past the drafter's context get none."""
        translated_B = self._translate(sequences_B)
        self._keep_common(translated_B)
        propose = self._propose_shared if self.rule == TOKENS else self._propose_text
        return propose(sequences_B, translated_B, budgets_B, stopping_B, chooser)

    def _propose_shared(
        self,
        sequences_B: Tokens,
        translated_B: list[list[int]],
        budgets_B: Sequence[int],
        stopping_B: Policies,
        chooser: Chooser,
    ) -> Proposal:
        """Draft shared tokens."""
        if self._shared is None or self._shared.ids_V.device != chooser.device:
            self._shared = _SharedIds(self.vocabularies, chooser)
        shared: Any = _SharedChooser(
            self._shared, self.model.vocab_size, chooser, sequences_B, stopping_B[0].reads
        )
        room_B = self._within_room(translated_B, budgets_B)
        drafted = self.chain.propose(translated_B, room_B, stopping_B, shared)
        if not shared.tokens:
            return drafted
        (own_BN,) = devices.read(drafted.tokens_BN)
        self._hold(translated_B, own_BN, drafted.counts_B)
        q_BNV = torch.stack(shared.rows_q, 1) if shared.rows_q else None
        tokens_BN = torch.stack(shared.tokens, 1)
        return Proposal(tokens_BN, drafted.counts_B, None, q_BNV, drafted.steps)

    def _propose_text(
        self,
        sequences_B: Tokens,
        translated_B: list[list[int]],
        budgets_B: Sequence[int],
        stopping_B: Policies,
        chooser: Chooser,
    ) -> Proposal:
        """Draft the likeliest text, about as long as the budgets, in the target's tokens."""
        wanted_B = [
            math.ceil(budget * min(len(translated) / len(sequence), MOST_PER_TOKEN))
            for budget, translated, sequence in zip(
                budgets_B, translated_B, sequences_B, strict=True
            )
        ]
        room_B = self._within_room(translated_B, wanted_B)
        likeliest = _likeliest(self.model)
        drafted = self.chain.propose(translated_B, room_B, [Fixed()] * len(room_B), likeliest)
        (own_BN,) = devices.read(drafted.tokens_BN)
        self._hold(translated_B, own_BN, drafted.counts_B)
        parts = zip(self._translations, own_BN, drafted.counts_B, budgets_B, stopping_B)
        tokens_B = [
            cut(translation.continued(own[:count], budget), policy) if count else []
            for translation, own, count, budget, policy in parts
        ]
        proposal = point_masses(tokens_B, chooser)
        proposal.steps = drafted.steps
        return proposal

    def _translate(self, sequences_B: Tokens) -> list[list[int]]:
        """Return each row's text in the drafter's tokens."""
        return [
            translation.of(sequence)
            for translation, sequence in zip(self._translations, sequences_B, strict=True)
        ]

    def _keep_common(self, translated_B: list[list[int]]) -> None:
        """Drop the cached tokens that are not the text's; the text's last token is read again."""
        lengths_B = self.model.lengths_B
        kept_B = [
            _common(held[:length], translated[:-1])
            for held, length, translated in zip(self._held_B, lengths_B, translated_B, strict=True)
        ]
        self.model.truncate(kept_B)
        self._held_B = [held[:kept] for held, kept in zip(self._held_B, kept_B, strict=True)]

    def _hold(
        self, translated_B: list[list[int]], own_BN: list[list[int]], counts_B: Sequence[int]
    ) -> None:
        """Note the tokens that the cache may hold: the text's and the drafted ones."""
        self._held_B = [
            [*translated, *own] if count else held
            for translated, own, count, held in zip(
                translated_B, own_BN, counts_B, self._held_B, strict=True
            )
        ]

    def _within_room(self, translated_B: list[list[int]], counts_B: Sequence[int]) -> list[int]:
        """Return draft lengths whose tokens fit into the cache."""
        room = self._capacity - SPARE_SLOTS
        return [
            max(0, min(count, room - len(translated)))
            for count, translated in zip(counts_B, translated_B, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.chain.select(rows)
        self._translations = [self._translations[row] for row in rows]
        self._held_B = [self._held_B[row] for row in rows]

    def time_step(self, frontier: int = 1) -> None:
        """Run one forward over one token per row without committing it."""
        self.chain.time_step(frontier)


class _SharedIds:
    """The shared tokens on a device."""

    def __init__(self, vocabularies: Vocabularies, chooser: Chooser) -> None:
        self.target_S = devices.tensor(vocabularies.target_ids_N, chooser.device, torch.long)
        self.drafter_S = devices.tensor(vocabularies.drafter_ids_N, chooser.device, torch.long)
        # the drafter's id of each token of the target; 0 where there is none
        self.ids_V = spread(self.drafter_S, self.target_S, chooser.vocab_size, 0)


class _SharedChooser:
    """A chooser for a chain in the drafter's vocabulary that chooses tokens of the target.

    It keeps the logits of shared tokens and lets the round's chooser draft from them, so q is
    renormalised over the shared tokens and warped like p. `tokens` and `rows_q` are its choices, in
    the target's vocabulary.
    """

    tests_q = drafts_likeliest = False  # chains are drafted in Python
    rule = ""
    processors = None  # those of the round's chooser need the target's vocabulary

    def __init__(
        self,
        shared: _SharedIds,
        vocab_size: int,
        chooser: Chooser,
        sequences_B: Tokens,
        reads: str,
    ) -> None:
        self._shared, self._chooser, self._reads = shared, chooser, reads
        self.vocab_size = vocab_size  # the drafter's
        self.device, self.warper = chooser.device, chooser.warper
        processors = chooser.processors
        self._process = None if processors is None else processors.drafting(sequences_B)
        self.tokens: list[Tensor] = []
        self.rows_q: list[Tensor] = []

    def draft(self, logits_BD: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """Return the drafter's ids of each row's next token, and q (B, D) if it is read."""
        logits_BS = logits_BD.index_select(-1, self._shared.drafter_S)
        V = self._chooser.vocab_size
        logits_BV = spread(logits_BS, self._shared.target_S, V, float("-inf"))
        if self._process is not None:
            logits_BV = self._process(logits_BV)
        tokens_B, q_BV = self._chooser.draft(logits_BV, depth)
        if self._process is not None:
            self._process.add(tokens_B)
        self.tokens.append(tokens_B)
        q_BD = None
        if q_BV is not None:
            self.rows_q.append(q_BV)
            if self._reads in ("confidence", "entropy"):
                q_BS = q_BV.index_select(-1, self._shared.target_S)
                q_BD = spread(q_BS, self._shared.drafter_S, self.vocab_size, 0.0)
        return self._shared.ids_V[tokens_B], q_BD


def _likeliest(model: Target) -> TokenChooser:
    """Return a chooser of a model's likeliest tokens."""
    return TokenChooser(Warper(0.0, 0, 1.0, 0.0), "greedy", 0, model.vocab_size, model.device)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    if first == second[: len(first)]:
        return len(first)
    pairs = zip(first, second)
    return next(
        (n for n, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second))
    )
