"""Lookup: find the last tokens earlier in the prompt or output, and propose their continuation.

Prompt lookup (Saxena 2023) is the control row of every report: it costs almost nothing, needs no
model, and wins wherever text repeats itself. Suffix lookup finds the longest match of any length.
Their tokens are point masses, so sampling verifies them without q.

Shapes: B rows, N drafted tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.base import StatelessDrafter
from decoding.drafters.suffix_automaton import SuffixAutomaton
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Policies, Pool, Proposal, Tokens
from decoding.stopping.base import cut


class NgramIndex:
    """The latest position at which each n-gram of a growing sequence was followed by a token."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes  # largest first
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams that end before this position are in the index

    def find(self, sequence: Sequence[int]) -> int | None:
        """Return the position after the latest earlier occurrence of the longest repeated suffix.

        Returns None if no suffix of the indexed sizes occurred before.
        """
        for end in range(max(self._indexed, 1), len(sequence)):
            for size in self.sizes:
                if size <= end:
                    self._after[tuple(sequence[end - size : end])] = end
        self._indexed = len(sequence)
        for size in self.sizes:
            position = self._after.get(tuple(sequence[-size:])) if size <= len(sequence) else None
            if position is not None:
                return position
        return None


class Index(Protocol):
    """An index that finds where the suffix of a growing sequence occurred before."""

    def find(self, sequence: Sequence[int]) -> int | None: ...


def continuation(sequence: Sequence[int], position: int | None, budget: int) -> list[int]:
    """Copy at most `budget` tokens from `position`; past the end, repeat the copied ones."""
    drafted: list[int] = []
    while position is not None and len(drafted) < budget:
        at = position + len(drafted)
        drafted.append(sequence[at] if at < len(sequence) else drafted[at - len(sequence)])
    return drafted


def point_masses(drafted_B: Sequence[list[int]], chooser: Chooser) -> Proposal:
    """Return a proposal of point masses, without q."""
    counts_B = [len(drafted) for drafted in drafted_B]
    width = max(counts_B)
    padded = [drafted + [0] * (width - len(drafted)) for drafted in drafted_B]
    return Proposal(devices.tensor(padded, chooser.device, torch.long), counts_B)


def after_pools(before_B: Tokens, sequences_B: Tokens) -> list[Sequence[int]]:
    """Return each row's sequence after the text of its pool, which may be empty."""
    return [
        [*before, *sequence] if before else sequence
        for before, sequence in zip(before_B, sequences_B, strict=True)
    ]


class TextPool:
    """The end of the texts of earlier rows, at most `most` tokens.

    inner: pool of the drafter that drafts where the lookup finds nothing; None if it keeps none.
    """

    def __init__(self, most: int, inner: Pool | None = None) -> None:
        self.most, self.inner, self.tokens = most, inner, list[int]()

    def end(self, sequence: Sequence[int]) -> None:
        """Append a text."""
        self.tokens = [*self.tokens, *sequence][-self.most :]
        if self.inner is not None:
            self.inner.end(sequence)


class Lookup(StatelessDrafter):
    """A drafter that copies what followed an earlier occurrence of a row's suffix.

    make_index: creates a row's index, which finds this occurrence.
    """

    capabilities = Capabilities(shape="chain", has_q=False, steps="round", keeps_pools=True)

    def __init__(self, name: str, make_index: Callable[[], Index]) -> None:
        self.name = name
        self._make_index = make_index
        self._indices: list[Index] = []
        self._opened: list[list[int]] = []
        # of each row: text that is indexed before its own
        self._before: list[list[int]] = []

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Index the prompts."""
        self._opened = [list(prompt) for prompt in prompts_B]
        self._indices = [self._make_index() for _ in prompts_B]
        self._before = [[] for _ in prompts_B]
        for index, prompt in zip(self._indices, prompts_B, strict=True):
            index.find(prompt)

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Index the new prompts."""
        indices, opened, before = self._indices, self._opened, self._before
        self.open(prompts_B, None, 0)
        self._indices = [*indices, *self._indices]
        self._opened, self._before = [*opened, *self._opened], [*before, *self._before]

    def new_pool(self, most: int) -> TextPool:
        """Return an empty pool of at most `most` tokens."""
        return TextPool(most)

    def use_pool(self, row: int, pool: Any) -> None:
        """Index the pool's text before the row's own."""
        self._before[row], self._indices[row] = list(pool.tokens), self._make_index()

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Index the prompt again, which is cheap; an index cannot be rolled back."""
        self.open([prompt], None, len(prompt))

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Propose what followed each row's suffix at its earlier occurrence.

        A match that reaches the end of the sequence is continued periodically. Rows without a match
        get none.
        """
        texts_B = after_pools(self._before, sequences_B)
        drafted_B = [
            cut(continuation(text, index.find(text), budget), policy)
            for index, text, budget, policy in zip(
                self._indices, texts_B, budgets_B, stopping_B, strict=True
            )
        ]
        return point_masses(drafted_B, chooser)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._indices = [self._indices[row] for row in rows]
        self._opened = [self._opened[row] for row in rows]
        self._before = [self._before[row] for row in rows]

    def time_step(self, frontier: int = 1) -> None:
        """Look up each row once."""
        for index, prompt, before in zip(self._indices, self._opened, self._before, strict=True):
            index.find([*before, *prompt])


class PromptLookup(Lookup):
    """Lookup of n-grams. Hydra: `_target_: decoding.drafters.prompt_lookup.PromptLookup`."""

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, name: str = "prompt_lookup") -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UserError(
                f"prompt lookup: min_ngram is {min_ngram} and max_ngram is {max_ngram}, expected "
                f"1 <= min_ngram <= max_ngram."
            )
        super().__init__(name, lambda: NgramIndex(range(max_ngram, min_ngram - 1, -1)))


class SuffixLookup(Lookup):
    """Longest-suffix lookup. Hydra: `_target_: decoding.drafters.prompt_lookup.SuffixLookup`.

    min_match: minimum length of a match.
    """

    def __init__(self, min_match: int = 2, name: str = "suffix_lookup") -> None:
        if min_match < 1:
            raise UserError(f"suffix lookup: min_match is {min_match}, expected 1 or more.")
        super().__init__(name, lambda: SuffixAutomaton(min_match))
