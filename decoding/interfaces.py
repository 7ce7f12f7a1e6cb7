"""The protocols of decoding, Target, Drafter and Stopping, and what they exchange in a round.

A row's *sequence* is its prompt and the tokens emitted so far. Its last token, the *tip*, is in no
cache yet: the round's target forward runs over the tip and the drafted tokens.

Shapes: B rows, N new tokens (nodes), L tokens of an accepted path, V vocabulary, C hidden size, P
nodes with children, K tokens of a distribution.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

NO_NODE = -2  # in place of a parent: padding, where only the device knows how many nodes a row has

Readback = Callable[..., list[Any]]  # tensors -> the same as lists on the host, in one wait


class Warper(Protocol):
    """Sampling settings, as drafters and verification rules use them
    (decoding/sampling/warpers.py).
    """

    @property
    def temperature(self) -> float: ...
    @property
    def greedy(self) -> bool: ...
    @property
    def truncates(self) -> bool: ...

    def probs(self, logits_RV: Tensor) -> Tensor:
        """Return the warped probabilities, (R, V)."""
        ...

    def of_likeliest(self, logits_RK: Tensor) -> Tensor:
        """Return warped probabilities, in proportion, of the K highest logits of a row."""
        ...


class Chooser(Protocol):
    """Choose tokens in a round: drafters ask for theirs, verification rules for the target's.

    Both so use the same warpers and the same keyed noise (decoding/sampling/token_chooser.py).
    Depth 0 is the first drafted token.
    """

    rule: str  # "greedy", "token", "block", "coupled" or "typical"
    vocab_size: int
    device: torch.device
    # what an equal chooser in another process needs: its settings, and the round it has begun
    spec: tuple[Any, str, int, int]
    begun: tuple[Sequence[int], Sequence[int], Sequence[int], int]

    @property
    def warper(self) -> Warper: ...
    @property
    def processors(self) -> Any:
        """The changes to logits by the text so far (decoding/sampling/logits_processors.py), or
        None.
        """
        ...

    @property
    def tests_q(self) -> bool:
        """Whether the rule tests sampled tokens by p / q."""
        ...

    @property
    def depths(self) -> int:
        """The depths of this round that have shared noise."""
        ...

    def uniform(self, row: int, depth: int, purpose: int, node: int | None = None) -> float:
        """Return the uniform of (seed, request, round, position, purpose), and of a node."""
        ...

    def draft_key(self, row: int, depth: int) -> int:
        """Return the key of (seed, request, round, position) for a drafter's own numbers."""
        ...

    def draft(self, logits_BV: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """Return a drafter's next token of each row, and its q (B, V) where the rule tests it."""
        ...

    def children(self, logits_BPV: Tensor, count: int, depth: int) -> tuple[Tensor, Tensor | None]:
        """Return `count` different next tokens (B, P, count) of each node, and their q
        (B, P, V).
        """
        ...

    def draw_children(
        self, q_BPV: Tensor, count: int, depth: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return `count` different tokens sampled from q at each node, and their probabilities."""
        ...

    def log_scores(self, logits_BPV: Tensor, depth: int) -> Tensor:
        """Return log probabilities (B, P, V) by which a drafter ranks the next tokens of nodes."""
        ...

    def race(
        self, logits_BNV: Tensor, first_depth: int = 0, depths_BN: Tensor | None = None
    ) -> Tensor:
        """Return the tokens (B, N) that the shared noise chooses at these depths."""
        ...


@dataclass(frozen=True)
class RoundCosts:
    """Measured milliseconds of a round's parts, which policies and planners weigh.

    The *frontier* of a draft step is the number of nodes that it continues from: 1 in a chain, the
    beams of a beam search, the expanded nodes of a tree.
    """

    # of a draft step with its samples and tree nodes; where the frontier matters, of the widest
    t_draft_ms: float
    # of n = 1, 2, ... new tokens; further ones on the line through the last two
    t_target_ms: tuple[float, ...]
    overhead_ms: float = 0.0  # the rest of a round that drafts
    plain_overhead_ms: float | None = None  # the rest of one that does not; None: the same
    # Rows of the batch that was timed. One row's draft makes the round of all its rows more
    # expensive, so rows of a batch decide together before the round, from what they have seen.
    rows: int = 1
    # (frontier, milliseconds of a step), narrowest first, linear in between; empty: all alike
    t_draft_by_frontier_ms: tuple[tuple[int, float], ...] = ()
    # with which `overhead_ms` was measured; None: the planner's choice by these costs
    frontier: int | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "RoundCosts":
        """Read what `dataclasses.asdict` gave, by way of JSON."""
        steps = tuple((frontier, ms) for frontier, ms in entry.get("t_draft_by_frontier_ms", ()))
        values = {"t_target_ms": tuple(entry["t_target_ms"]), "t_draft_by_frontier_ms": steps}
        return cls(**{**entry, **values})

    @property
    def plain_ms(self) -> float:
        """A round that does not draft."""
        return self.target_ms(1) + (
            self.overhead_ms if self.plain_overhead_ms is None else self.plain_overhead_ms
        )

    def step_ms(self, frontier: float) -> float:
        """Return the milliseconds of a draft step with this (mean) frontier."""
        known = self.t_draft_by_frontier_ms
        if not known:
            return self.t_draft_ms
        # In Python: it is asked several times a round, and numpy takes longer over one number than
        # over a thousand.
        for (fewer, less_ms), (more, more_ms) in pairwise(known):
            if frontier < more:
                return less_ms + (more_ms - less_ms) * max(frontier - fewer, 0) / (more - fewer)
        return known[-1][1]

    def steps_ms(self, steps: int, frontier: int | None = None) -> float:
        """Return the milliseconds of several draft steps: the first from the tip alone, the others
        with this frontier (None: the widest).
        """
        return self.step_ms(1) + (steps - 1) * (
            self.t_draft_ms if frontier is None else self.step_ms(frontier)
        )

    def with_slower_steps(self, ms: float) -> "RoundCosts":
        """Return these costs with `ms` more a draft step."""
        steps = tuple((frontier, step_ms + ms) for frontier, step_ms in self.t_draft_by_frontier_ms)
        return replace(self, t_draft_ms=self.t_draft_ms + ms, t_draft_by_frontier_ms=steps)

    def round_ms(self, steps: int, nodes: int) -> float:
        """A round of so many draft steps that has so many nodes verified."""
        return self.drafted_ms(self.steps_ms(steps), nodes) if steps else self.plain_ms

    def drafted_ms(self, draft_ms: float, nodes: int) -> float:
        """A round whose draft took so long, and that has so many nodes verified."""
        return draft_ms + self.target_ms(nodes + 1) + self.overhead_ms

    def target_ms(self, n: int) -> float:
        """t_target(n)."""
        known = self.t_target_ms
        if n <= len(known):
            return known[n - 1]
        slope = known[-1] - known[-2] if len(known) > 1 else 0.0
        return known[-1] + max(slope, 0.0) * (n - len(known))


@dataclass(frozen=True, slots=True)
class Sign:
    """What a drawn token's distribution tells: the token's own probability, and the entropy in nats
    where a policy reads it.
    """

    confidence: float
    entropy: float = math.nan


class Stopping(Protocol):
    """A policy that ends the drafting of its row before the budget is spent."""

    # Policies that read are *eager* on a GPU: each drafted token waits for the device. "nothing",
    # "confidence" or "entropy": what `more` looks at; anything but nothing waits for the device
    reads: str

    def limit(self, budget: int) -> int:
        """The most tokens to draft in the round that begins, at most `budget`."""
        ...

    def more(self, depth: int, sign: Sign | None) -> bool:
        """After `depth` drawn tokens, the last with this sign: draft another?"""
        ...

    def update(self, drafted: int, accepted: int) -> None:
        """Learn from a verified round."""
        ...


@dataclass(frozen=True, slots=True)
class TopRows:
    """What a tree's tokens were drawn from, by few candidates: row 0 is of the tip's children, row
    n + 1 of node n's.

    Siblings stand in the order in which they were drawn, without replacement. Nodes at the end that
    have no children may be left out. With a tail the last candidate is none but stands for all
    tokens that are not among the others: the share is that of them together, and the id that of the
    one that was drawn from them.
    """

    ids_BPK: Tensor  # different within a row
    probs_BPK: Tensor  # in proportion
    # in proportion, 0 at the candidates; None: other tokens have no share
    tail_BPV: Tensor | None = None

    def at(self, row: int, place: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """One row of each."""
        tail_V = None if self.tail_BPV is None else self.tail_BPV[row, place]
        return self.ids_BPK[row, place], self.probs_BPK[row, place], tail_V


@dataclass(slots=True)
class Proposal:
    """The tokens put forward in one round."""

    tokens_BN: Tensor  # rows with fewer than N are padded on the right
    counts_B: list[int]  # drafted tokens of each row; what a tree has behind them is not verified
    # None: a chain; else the parent's index, -1 for the tip, NO_NODE for padding; parents first.
    parents_BN: Tensor | None = None
    # probabilities that each token was drawn from; None: none (greedy, coupled, n-gram)
    q_BNV: Tensor | None = None
    steps: int = 0  # the model's forwards that made it
    q_top: TopRows | None = None  # of a tree, in place of q_BNV
    siblings: int = 0  # of a tree with q_BNV: the most children that a node has
    # From the target's logits (B, N + 1, V) to what the drafter wants to read with the outcome; see
    # `Observation.answers`.
    readback: Callable[[Tensor], Sequence[Tensor]] | None = None
    frontiers: int = 0  # the frontiers of its steps, summed; 0: one node each

    def counted(self) -> "Proposal | None":
        """Without the nodes that no row counts: they ride along in the forward and are not
        verified. None if no row counts any.
        """
        N = max(self.counts_B)
        if self.tokens_BN.shape[1] == N:
            return self
        if N == 0:
            return None
        parents_BN = None if self.parents_BN is None else self.parents_BN[:, :N]
        q_BNV = None if self.q_BNV is None else self.q_BNV[:, :N]
        return replace(self, tokens_BN=self.tokens_BN[:, :N], parents_BN=parents_BN, q_BNV=q_BNV)

    def drafted(self, parents: Sequence[Sequence[int]]) -> list[int]:
        """Drafted tokens of each row of a tree, padding left out; parents: `parents_BN`
        as lists.
        """
        pairs = zip(parents, self.counts_B, strict=True)
        return [sum(parent != NO_NODE for parent in row[:count]) for row, count in pairs]


@dataclass(slots=True)
class Outcome:
    """What became of one round's proposal."""

    # tokens gained by each row: the accepted ones and the target's own next one
    tokens_B: list[list[int]]
    # accepted nodes of the proposal; None: the first ones of the chain
    paths_B: list[list[int]] | None
    accepted_B: list[int]  # accepted tokens
    tested_B: list[int]  # tested tokens along the path: the accepted ones and the one that failed
    # drafted tokens, where padding may be among the proposal's; None: its counts
    drafted_B: list[int] | None = None


@dataclass(slots=True)
class Observation:
    """What a drafter may learn from after a round."""

    outcome: Outcome
    logits_BNV: Tensor  # of the tip and the drafted tokens
    hidden_BNC: Tensor  # of the same; with `Capabilities.taps` their states, side by side
    readback: list[Any] = field(default_factory=list)  # what the proposal asked for, as lists


class FrontierPlanner(Protocol):
    """Choose how many nodes each draft step continues from, by measured costs."""

    def best_frontier(self, costs: RoundCosts) -> int:
        """Return the frontier with the most expected tokens per millisecond."""
        ...

    def expected_rate(self, costs: RoundCosts) -> float:
        """Return the expected tokens per millisecond with the frontier of these costs."""
        ...


@dataclass(frozen=True)
class Capabilities:
    """What a drafter can do and needs."""

    shape: str = "chain"  # or "tree"
    has_q: bool = False  # proposals carry the probabilities that the tokens were drawn from
    needs_hidden: bool = False  # wants the target's hidden states
    # layers whose states it wants in place of the one after the final norm (`Target.forward`); they
    # come side by side as the channels of every hidden state that it is given
    taps: tuple[int, ...] = ()
    # of a prompt's only the last: `open` may be given that alone, as the only column
    last_hidden: bool = False
    can_overlap: bool = False  # can draft while the target verifies
    needs_costs: bool = False  # weighs its proposal by the measured costs of a round
    # what t_draft times: one drafted "token", or a whole "round" (trees, one-pass drafters)
    steps: str = "token"
    # Of a chain: the stopping policy is asked after every token; else it limits the length before a
    # round alone.
    stops_by_token: bool = True
    # frontiers at which a draft step is timed, narrowest first; one where all steps cost the same
    frontiers: tuple[int, ...] = (1,)
    frontier_planner: FrontierPlanner | None = None  # chooses among them by measured costs

    def __post_init__(self) -> None:
        if self.taps and not self.needs_hidden:
            raise ValueError("a drafter with taps needs hidden states: set needs_hidden=True")


class Target(Protocol):
    """A causal LM with a cache whose rows have their own lengths."""

    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def max_length(self) -> int:
        """Most tokens a row may hold, prompt and output together."""
        ...

    @property
    def lengths_B(self) -> list[int]:
        """Committed tokens in the cache, by row."""
        ...

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """Start `batch_size` empty rows of at most `capacity` cache slots (default max_length)."""
        ...

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """(logits_BNV, hidden_BNC) of new tokens after each row's committed ones; nothing is
        committed by it.

        parents_BN[b, n] is the index of node n's parent among the new tokens, -1 for the committed
        tip, and always smaller than n; None is a chain. Rows with fewer tokens are padded on the
        right with any id and commit fewer.

        hidden is after the final norm. With taps it is (B, N, len(taps) * C): the hidden states at
        these layers side by side, in this order. Number k is Hugging Face's `hidden_states[k]`: 0
        the output of the embedding, k the state after k layers, and k = num_layers the one after
        the final norm. Raises UserError for a layer that there is not, and for one named twice.
        """
        ...

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        """The hidden states of `forward` alone, without the product with the vocabulary (for
        prefill).
        """
        ...

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        """Keep the first counts_B[b] nodes of paths_BL[b] of the last forward; None is the chain 0,
        1, 2 ...
        """
        ...

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Roll rows back to at most these lengths."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        ...

    def keep(self, row: int, name: int) -> None:
        """Put a copy of what a row has committed aside under a name, for `begin`; it stays until
        `forget`.
        """
        ...

    def begin(self, row: int, name: int, length: int) -> None:
        """Let a row, empty since `open`, begin with the first `length` tokens of what was kept
        under a name.
        """
        ...

    def forget(self) -> None:
        """Drop all that was kept."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings (..., C)."""
        ...

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states after the final norm."""
        ...


class Drafter(Protocol):
    """Proposes tokens. Rows are those of the running batch; `select` drops the finished ones."""

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def name(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...

    def width(self, gamma: int) -> int:
        """The most tokens of a round's proposal at draft length (of a tree: depth) `gamma`."""
        ...

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """The target that will verify and the measured costs of a round, if the settings have any;
        told before `open`.
        """
        ...

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        """Start rows with these prompts; sequences will hold `capacity` tokens at most.

        prefill_hidden_BNC: the target's hidden states of all prompt tokens but the last, if
        `capabilities.needs_hidden`; or, if `capabilities.last_hidden`, maybe one column alone, each
        prompt's last of these.
        """
        ...

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Go on with the one row of `open`: the first `kept` tokens of this prompt are those that
        the row held, the others are new.

        hidden_NC: the target's hidden states of the tokens that it has just read, at least one; the
        last stands before the prompt's last token. Given if `capabilities.needs_hidden`; of all new
        tokens, unless `capabilities.last_hidden`.
        """
        ...

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """Draft at most budgets_B[b] tokens for each row, fewer where its policy says so."""
        ...

    def observe(self, observation: Observation) -> None:
        """See what became of the proposal. A row for which nothing was drafted may have been given
        tokens by another (decoding/drafters/with_lookup.py).
        """
        ...

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Forget cached tokens past these lengths (the committed tokens, the new tip
        not counted).
        """
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...

    def time_step(self, frontier: int = 1) -> None:
        """Do the work of one draft step (see `Capabilities.steps`) with this frontier, one of
        `Capabilities.frontiers`, and leave no trace; for timing, after `open`.
        """
        ...


def ancestors(parents_BN: Tensor) -> Tensor:
    """Boolean (B, N, N): node n descends from m, or is m. By repeated squaring of the parent
    relation. Rows of padding mean nothing.
    """
    B, N = parents_BN.shape
    device = parents_BN.device
    # the extra column swallows parent -1
    reach = torch.eye(N + 1, device=device).repeat(B, 1, 1)[:, :N]
    reach.scatter_(2, parents_BN.remainder(N + 1)[:, :, None], 1.0)
    reach = reach[:, :, :N]
    for _ in range(max(N - 1, 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0
