"""Lookahead decoding: the verifying forward also guesses tokens, which later rounds propose.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"
(arXiv 2402.02057). Besides the candidates, each forward carries a window of guessed tokens:
`columns` positions ahead, `rows` deep, refined by Jacobi iteration from round to round. The tokens
of a column and the target's token after them form an n-gram, which is stored in a pool under its
first token. The pool's n-grams that begin with the tip are the candidates, point masses for every
rule. No other model is needed. Forwards become wider, so this suits a target whose forward over
dozens of tokens is nearly as fast as over one.

The window is a tree: its first row is a chain from the tip, and each column continues below its
token of that row. It follows the counted nodes of the proposal, so verification ignores it.

Shapes: B batch rows, N nodes of a forward, V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.base import StatelessDrafter
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Observation, Policies, Proposal, Tokens

Phrase = tuple[int, ...]


class PhrasePool:
    """The phrases that followed each token, newest last; at most `per_key` per token.

    most: maximum number of tokens that have phrases, of which the oldest is dropped; None: any.
    """

    def __init__(self, per_key: int, most: int | None = None) -> None:
        self.per_key, self.most = per_key, most
        self._after: dict[int, OrderedDict[Phrase, None]] = {}

    def add(self, first: int, phrase: Phrase) -> None:
        """Store a phrase as the newest, and remove its prefixes.

        If it equals or begins a stored phrase, that one becomes the newest instead.
        """
        if not phrase:
            return
        stored = self._after.setdefault(first, OrderedDict())
        longest = next((one for one in reversed(stored) if one[: len(phrase)] == phrase), phrase)
        for beginning in [one for one in stored if longest[: len(one)] == one]:
            del stored[beginning]
        stored[longest] = None
        if len(stored) > self.per_key:
            stored.popitem(last=False)
        if self.most is not None and len(self._after) > self.most:
            del self._after[next(iter(self._after))]

    def drop(self, first: int, phrase: Phrase) -> None:
        """Remove a phrase that was rejected."""
        self._after.get(first, OrderedDict()).pop(phrase, None)

    def newest(self, first: int, count: int) -> list[Phrase]:
        """Return at most `count` phrases that followed `first`, newest first."""
        return list(reversed(self._after.get(first, ())))[:count]

    def end(self, sequence: Sequence[int]) -> None:
        """Do nothing: phrases are stored while their row runs."""

    def read(self, sequence: Sequence[int], start: int, length: int) -> None:
        """Store the phrase of `length` tokens after each token from position `start`."""
        for at in range(max(start, 0), len(sequence) - length):
            self.add(sequence[at], tuple(sequence[at + 1 : at + 1 + length]))


class TreeBuilder:
    """A tree under construction, in which phrases share the nodes of their common prefixes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, phrase: Sequence[int], tip: int = -1, shared: bool = True) -> list[int]:
        """Add a phrase below node `tip`; return its nodes."""
        nodes = []
        for token in phrase:
            node = self._children.get((tip, token)) if shared else None
            if node is None:
                node = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(tip)
                if shared:
                    self._children[tip, token] = node
            nodes.append(node)
            tip = node
        return nodes


class GuessWindow:
    """The guesses of one request: `rows` rows of `columns` tokens, row 0 next to the tip."""

    def __init__(self, prompt: Sequence[int], rows: int, columns: int) -> None:
        self.rows = [
            [prompt[(row * columns + column) % len(prompt)] for column in range(columns)]
            for row in range(rows)
        ]

    def add_to(self, tree: TreeBuilder) -> list[int]:
        """Add the window to a tree without sharing nodes; return the nodes of its last row."""
        ends = tree.add(self.rows[0], shared=False)
        for row in self.rows[1:]:
            ends = [tree.add([token], above, shared=False)[0] for token, above in zip(row, ends)]
        return ends

    def advance(self, next_tokens: Sequence[int], pool: PhrasePool) -> None:
        """Store the columns as phrases and move every row one step closer to the tip.

        next_tokens: the target's token after each column.
        """
        for column, last in enumerate(next_tokens):
            pool.add(self.rows[0][column], (*(row[column] for row in self.rows[1:]), last))
        self.rows = [*self.rows[1:], list(next_tokens)]


class Lookahead(StatelessDrafter):
    """A drafter of the target's guesses. Hydra: `_target_: decoding.drafters.lookahead.Lookahead`.

    ngram: length of a phrase with its first token (the paper's level). columns: width of the
    window. candidates: maximum number of phrases that are stored for a token and verified in a
    round. from_text: also store the phrases of the prompt and the output.
    """

    capabilities = Capabilities(shape="tree", steps="round", keeps_pools=True)

    def __init__(
        self,
        ngram: int = 4,
        columns: int = 6,
        candidates: int = 4,
        from_text: bool = True,
        name: str = "lookahead",
    ) -> None:
        if ngram < 2 or columns < 1 or candidates < 1:
            raise UserError(
                f"lookahead: ngram is {ngram}, columns {columns} and candidates {candidates}; "
                f"expected at least 2, 1 and 1. Increase every value below its minimum."
            )
        self.ngram, self.columns, self.candidates = ngram, columns, candidates
        self.from_text, self.name = from_text, name
        self.pools: list[PhrasePool] = []
        self._windows: list[GuessWindow] = []
        self._stored: list[int] = []  # positions up to which the text is in the pools
        self._ends: list[list[int]] = []  # nodes of the last row of this round's windows

    def width(self, gamma: int) -> int:
        """Return the number of nodes: candidates of at most gamma tokens each, and the window."""
        return self.candidates * min(gamma, self.ngram - 1) + self.columns * (self.ngram - 1)

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Fill the windows with the prompts' tokens, and start empty pools."""
        self.pools = [PhrasePool(self.candidates) for _ in prompts_B]
        self._windows = [GuessWindow(prompt, self.ngram - 1, self.columns) for prompt in prompts_B]
        self._stored = [0] * len(prompts_B)
        self._ends = [[] for _ in prompts_B]

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Start more windows and empty pools."""
        pools, windows, stored, ends = self.pools, self._windows, self._stored, self._ends
        self.open(prompts_B, None, 0)
        self.pools, self._windows = [*pools, *self.pools], [*windows, *self._windows]
        self._stored, self._ends = [*stored, *self._stored], [*ends, *self._ends]

    def new_pool(self, most: int) -> PhrasePool:
        """Return an empty pool with phrases after at most `most` tokens."""
        return PhrasePool(self.candidates, most)

    def use_pool(self, row: int, pool: Any) -> None:
        """Let a row use this pool, in which it stores its phrases too."""
        self.pools[row] = pool

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Start with empty pools, and a window of the prompt's tokens."""
        self.open([prompt], None, len(prompt))

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Propose the pool's phrases after each tip, then the windows, which are not counted."""
        trees, counts_B = [], []
        for row, (sequence, budget) in enumerate(zip(sequences_B, budgets_B, strict=True)):
            # A row without a budget is left unchanged, so that its pool does not depend on the
            # other rows of the batch.
            if self.from_text and budget:
                self.pools[row].read(sequence, self._stored[row], self.ngram - 1)
                self._stored[row] = max(0, len(sequence) - self.ngram + 1)
            tree = TreeBuilder()
            for phrase in self.pools[row].newest(sequence[-1], self.candidates) if budget else []:
                tree.add(phrase[:budget])
            counts_B.append(len(tree.tokens))
            self._ends[row] = self._windows[row].add_to(tree) if budget else []
            trees.append(tree)
        proposal = pack_trees(trees, counts_B, chooser.device)
        proposal.readback = argmax_tokens
        return proposal

    def observe(self, observation: Observation) -> None:
        """Store each window's columns as phrases that end with the target's tokens."""
        (choices_BN,) = observation.readback or ([],)
        for row, ends in enumerate(self._ends):
            if ends:  # empty if the round had no window, since no row drafted
                next_tokens = [choices_BN[row][end + 1] for end in ends]
                self._windows[row].advance(next_tokens, self.pools[row])
            self._ends[row] = []

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.pools = [self.pools[row] for row in rows]
        self._windows = [self._windows[row] for row in rows]
        self._stored = [self._stored[row] for row in rows]
        self._ends = [self._ends[row] for row in rows]

    def time_step(self, frontier: int = 1) -> None:
        """Look up the pools and build the windows once, without the forward over the windows."""
        for pool, window in zip(self.pools, self._windows, strict=True):
            pool.newest(window.rows[0][0], self.candidates)
            window.add_to(TreeBuilder())


def argmax_tokens(logits_BNV: Tensor) -> tuple[Tensor]:
    """Return the most likely token after every node, for the readback."""
    return (devices.argmax(logits_BNV),)


def pack_trees(trees: Sequence[TreeBuilder], counts_B: list[int], device: torch.device) -> Proposal:
    """Return the trees of several rows as one proposal, padded on the right."""
    width = max(len(tree.tokens) for tree in trees)
    tokens = [tree.tokens + [0] * (width - len(tree.tokens)) for tree in trees]
    parents = [tree.parents + [-1] * (width - len(tree.parents)) for tree in trees]
    shape = (len(trees), width)
    return Proposal(
        devices.tensor(tokens, device, torch.long).view(shape),
        counts_B,
        devices.tensor(parents, device, torch.long).view(shape),
    )
