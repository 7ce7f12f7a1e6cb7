"""Protocols of decoding (Target, Drafter, Stopping) and the data that they exchange in a round.

A round drafts, runs one target forward, verifies and commits:

    proposal = drafter.propose(sequences, budgets, stopping, chooser)
    logits, hidden = target.forward(tip + proposal.tokens)
    outcome = rule(logits, proposal, chooser, readback)
    target.commit(outcome.paths)
    drafter.observe(observation)
    drafter.rollback(target.lengths)

A row's *sequence* is its prompt and the tokens emitted so far. Its last token, the *tip*, is not in
the caches: the round's target forward runs over the tip and the drafted tokens.

Shapes: B rows, N new tokens (nodes), L tokens of an accepted path, V vocabulary, C hidden size, P
nodes with children, K candidates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

# parent of a padding node, if the host does not read the number of nodes
NO_NODE = -2

Tokens = Sequence[Sequence[int]]  # token ids of every row

Readback = Callable[..., list[Any]]  # copies tensors to the host as lists, with one wait


class Warper(Protocol):
    """Sampling settings that turn logits into probabilities (decoding/sampling/warpers.py)."""

    @property
    def temperature(self) -> float: ...
    @property
    def greedy(self) -> bool: ...
    @property
    def truncates(self) -> bool: ...

    def probs(self, logits_RV: Tensor) -> Tensor:
        """Return the warped probabilities (R, V)."""

    def of_likeliest(self, logits_RK: Tensor) -> Tensor:
        """Return unnormalised warped probabilities (R, K) of each row's K highest logits."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The temperature and the keys of a round's random numbers (decoding/sampling/noise.py)."""

    temperature: float = 0.0  # 0: the largest logit, the lowest id among equals
    keys_B: Sequence[int] = ()  # of seed, request and round
    positions_B: Sequence[int] = ()  # of the first token that the round emits


class Chooser(Protocol):
    """Token choice of a round, shared by drafters and verification rules.

    Both use the same warpers and the same keyed noise (decoding/sampling/token_chooser.py). Depth 0
    is the first drafted token.
    """

    rule: str  # "greedy", "token", "block", "coupled", "typical" or "lossy_lenience"
    lenience: float  # factor of q in its tests; 1 but for "lossy_lenience"
    vocab_size: int
    device: torch.device
    # settings and arguments of `begin`, from which another process builds an equal chooser
    spec: tuple[Any, str, int, int]
    begun: tuple[Sequence[int], Sequence[int], Sequence[int], int]

    @property
    def warper(self) -> Warper: ...
    @property
    def processors(self) -> Any:
        """Logits processors (decoding/sampling/logits_processors.py), or None."""

    @property
    def tests_q(self) -> bool:
        """Whether the rule tests sampled tokens by p / q, so proposals must carry q."""

    @property
    def drafts_likeliest(self) -> bool:
        """Whether `draft` returns the tokens with the largest logits."""

    @property
    def depths(self) -> int:
        """Number of depths with shared noise in this round."""

    @property
    def draws(self) -> Draws:
        """The keys of this round's `uniform`, for calls outside Python."""

    def uniform(self, row: int, depth: int, purpose: int, node: int | None = None) -> float:
        """Return a number in (0, 1), keyed by seed, request, round, position, purpose and node.

        node: None leaves the node out of the key.
        """

    def uniforms(self, rows: Any, depths: Any, purposes: Any, nodes: Any = None) -> Any:
        """Return `uniform` for integers or arrays of them, in their broadcast shape."""

    def draft_keys(self, depths: Sequence[int]) -> Any:
        """Return the keys (B, len(depths)) of (seed, request, round, position) for drafts."""

    def draft(self, logits_BV: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """Return each row's next draft token (B,), and q (B, V) if the rule tests it."""

    def draw_children(
        self, q_BPV: Tensor, count: int, depth: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return `count` distinct tokens sampled from q at each node, and their probabilities.

        Both are (B, P, count); a token with probability 0 counts as not sampled. first: the first
        node's number, which keys the noise; the other nodes follow it.
        """

    def log_scores(self, logits_BPV: Tensor, depth: int) -> Tensor:
        """Return log probabilities (B, P, V) that rank the children of each node."""

    def race(
        self, logits_BNV: Tensor, first_depth: int = 0, depths_BN: Tensor | None = None
    ) -> Tensor:
        """Return the tokens (B, N) that the shared noise selects.

        Node n is at depth first_depth + n, or at depths_BN[:, n] if they are given.
        """


@dataclass(frozen=True)
class RoundCosts:
    """Measured milliseconds of a round's parts, from which policies and planners decide.

    The *frontier* of a draft step is the number of nodes that it continues from: 1 in a chain, the
    number of beams in a beam search, the number of expanded nodes in a tree.
    """

    # one draft step at the widest frontier, sampling and tree building included
    t_draft_ms: float
    # a target forward over n = 1, 2, ... new tokens; extrapolated through the last two
    t_target_ms: tuple[float, ...]
    overhead_ms: float = 0.0  # the rest of a round that drafts
    plain_overhead_ms: float | None = None  # the rest of a round without a draft; None: the same
    # Rows of the timed batch. One row's draft lengthens the round of all rows, so the rows of a
    # batch decide together before the round, from past rounds.
    rows: int = 1
    # (frontier, milliseconds of a step) in increasing order, linear in between; empty if all steps
    # cost the same
    t_draft_by_frontier_ms: tuple[tuple[int, float], ...] = ()
    # frontier at which `overhead_ms` was measured; None: the planner's choice for these costs
    frontier: int | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "RoundCosts":
        """Return the costs read from JSON, in the form that `dataclasses.asdict` produces."""
        steps = tuple((frontier, ms) for frontier, ms in entry.get("t_draft_by_frontier_ms", ()))
        values = {"t_target_ms": tuple(entry["t_target_ms"]), "t_draft_by_frontier_ms": steps}
        return cls(**{**entry, **values})

    @property
    def plain_ms(self) -> float:
        """Milliseconds of a round that does not draft."""
        rest_ms = self.plain_overhead_ms
        return self.target_ms(1) + (self.overhead_ms if rest_ms is None else rest_ms)

    def step_ms(self, frontier: float) -> float:
        """Return the milliseconds of a draft step at this frontier, which may be a mean."""
        known = self.t_draft_by_frontier_ms
        if not known:
            return self.t_draft_ms
        # for a single number Python is faster than numpy
        for (fewer, less_ms), (more, more_ms) in pairwise(known):
            if frontier < more:
                return less_ms + (more_ms - less_ms) * max(frontier - fewer, 0) / (more - fewer)
        return known[-1][1]

    def steps_ms(self, steps: int, frontier: int | None = None) -> float:
        """Return the milliseconds of `steps` draft steps, of which the first starts from the tip.

        steps: at least 1. frontier: the frontier of every later step; None is the widest.
        """
        return self.step_ms(1) + (steps - 1) * (
            self.t_draft_ms if frontier is None else self.step_ms(frontier)
        )

    def with_slower_steps(self, ms: float) -> "RoundCosts":
        """Return these costs with `ms` milliseconds added to every draft step."""
        steps = tuple((frontier, step_ms + ms) for frontier, step_ms in self.t_draft_by_frontier_ms)
        return replace(self, t_draft_ms=self.t_draft_ms + ms, t_draft_by_frontier_ms=steps)

    def of_one_pass(self) -> "RoundCosts":
        """Return these costs for a drafter whose step drafts all tokens: later steps cost nothing.

        `Capabilities.steps` of such a drafter is "round".
        """
        return replace(self, t_draft_ms=0.0, t_draft_by_frontier_ms=((1, self.t_draft_ms),))

    def round_ms(self, steps: int, nodes: int) -> float:
        """Return the milliseconds of a round with `steps` draft steps and `nodes` drafted tokens.

        Without steps the round does not draft, and `nodes` is ignored.
        """
        return self.drafted_ms(self.steps_ms(steps), nodes) if steps else self.plain_ms

    def drafted_ms(self, draft_ms: float, nodes: int) -> float:
        """Return the milliseconds of a round whose draft of `nodes` tokens takes `draft_ms`."""
        return draft_ms + self.target_ms(nodes + 1) + self.overhead_ms

    def target_ms(self, n: int) -> float:
        """Return the milliseconds of a target forward over n new tokens."""
        known = self.t_target_ms
        if n <= len(known):
            return known[n - 1]
        slope = known[-1] - known[-2] if len(known) > 1 else 0.0
        return known[-1] + max(slope, 0.0) * (n - len(known))


@dataclass(frozen=True, slots=True)
class TokenConfidence:
    """A sampled token's probability, and the entropy of the distribution it was sampled from.

    The entropy is in nats, and NaN if the stopping policy does not read it.
    """

    confidence: float
    entropy: float = math.nan


class Stopping(Protocol):
    """Policy that may end a row's draft before its budget is spent."""

    # Input of `more`: "nothing", "time", "confidence" or "entropy". With "nothing" the draft length
    # may be decided before the draft. For the last two, the host waits for the device at every
    # drafted token.
    reads: str

    def limit(self, budget: int) -> int:
        """Begin a round; return its maximum draft length, at most `budget`."""

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        """Return whether to draft another token after `depth` tokens, of which `token` is the last.

        token: None if the policy reads nothing.
        """

    def update(self, drafted: int, accepted: int) -> None:
        """Record the numbers of drafted and accepted tokens of the round that ends."""


Policies = Sequence[Stopping]  # one for every row

# maps a depth, the probabilities of the rows' tokens there and the draft lengths to new lengths
Shorten = Callable[[int, Sequence[float], list[int]], list[int]]


@dataclass(frozen=True, slots=True)
class ChainChoice:
    """How the tokens of a chain are chosen, and where the chain ends (see `Target.chain_call`)."""

    vocab_size: int  # tokens below it may be drafted
    draws: Draws = Draws()
    shorten: Shorten | None = None  # called after every step; None: the lengths are fixed


# drafts chains, see `Target.chain_call`
ChainCall = Callable[
    [Tokens, Sequence[int], list[int], ChainChoice], tuple[Tensor, Tensor | None, list[int]]
]


@dataclass(frozen=True, slots=True)
class TopRows:
    """Distributions over few candidates, from which a tree's tokens were sampled.

    Place 0 holds the distribution of the tip's children, and place n + 1 the distribution of node
    n's children; places of nodes without children may be missing at the end. Siblings were sampled
    without replacement, in their order in the proposal.

    With a tail, the last candidate represents all tokens outside the other candidates: its
    probability is their sum, and its id is the token that was sampled from them.
    """

    ids_BPK: Tensor  # distinct at each place
    probs_BPK: Tensor  # unnormalised
    # unnormalised, 0 at the candidates; None: all other tokens have probability 0
    tail_BPV: Tensor | None = None

    def at(self, row: int, place: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the ids (K,), probabilities (K,) and tail (V,) of one node's children.

        row: the batch row. place: 0 for the tip, n + 1 for node n.
        """
        tail_V = None if self.tail_BPV is None else self.tail_BPV[row, place]
        return self.ids_BPK[row, place], self.probs_BPK[row, place], tail_V


@dataclass(slots=True)
class Proposal:
    """The tokens that a drafter proposes in one round: a chain or a tree."""

    tokens_BN: Tensor  # padded on the right
    counts_B: list[int]  # drafted tokens of each row; nodes past this count are not verified
    # index of each node's parent, -1 for the tip, NO_NODE for padding; parents precede their
    # children. None: a chain.
    parents_BN: Tensor | None = None
    # distributions that the tokens were sampled from; None: point masses (greedy, coupled, n-gram)
    q_BNV: Tensor | None = None
    steps: int = 0  # forwards of the draft model
    q_top: TopRows | None = None  # replaces q_BNV if children were sampled from few candidates
    siblings: int = 0  # maximum number of children of a node, for a tree with q_BNV
    # Maps the target's logits (B, N + 1, V) to tensors that are copied to the host together with
    # the outcome; they arrive in `Observation.readback`.
    readback: Callable[[Tensor], Sequence[Tensor]] | None = None
    frontiers: int = 0  # sum of the frontiers of all steps; 0: one node per step
    # the rows' tips and then tokens_BN, on the target's device, if the drafter has them like that
    with_tips_BN: Tensor | None = None

    def counted(self) -> "Proposal | None":
        """Return the proposal without nodes past every row's count, or None if no node is left.

        The target's forward runs over the dropped nodes too, but they are not verified.
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
        """Return each row's number of drafted tokens, without padding.

        parents: `parents_BN` as lists.
        """
        pairs = zip(parents, self.counts_B, strict=True)
        return [sum(parent != NO_NODE for parent in row[:count]) for row, count in pairs]


@dataclass(slots=True)
class Outcome:
    """The result of verifying one round's proposal."""

    tokens_B: list[list[int]]  # emitted: the accepted tokens, then one chosen by the target
    paths_B: list[list[int]] | None  # accepted nodes; None: the first `accepted_B` of a chain
    accepted_B: list[int]
    tested_B: list[int]  # the accepted tokens and the rejected one, if any
    drafted_B: list[int] | None = None  # None: the proposal's counts, which have no padding


# verifies chains, see `Target.verify_call`
VerifyCall = Callable[[Tensor, Proposal | None, Chooser], tuple[Outcome, tuple[float, float]]]


@dataclass(slots=True)
class Observation:
    """The data that a drafter receives after a round."""

    outcome: Outcome
    logits_BNV: Tensor  # of the tip and the drafted tokens, (B, N + 1, V)
    hidden_BNC: Tensor  # at the same nodes; with `Capabilities.taps`, the tapped states
    readback: list[Any] = field(default_factory=list)  # tensors of `Proposal.readback`, as lists


class FrontierPlanner(Protocol):
    """Planner that chooses the frontier of a drafter's steps from measured costs."""

    def best_frontier(self, costs: RoundCosts) -> int:
        """Return the frontier with the most expected tokens per millisecond."""

    def expected_rate(self, costs: RoundCosts) -> float:
        """Return the expected tokens per millisecond at the frontier of these costs."""


@dataclass(frozen=True)
class Capabilities:
    """Abilities and needs of a drafter, which determine its inputs and schedules."""

    shape: str = "chain"  # or "tree"
    has_q: bool = False  # proposals carry the probabilities that the tokens were sampled from
    needs_hidden: bool = False  # reads the target's hidden states
    taps: tuple[int, ...] = ()  # layers of these states, see `Target.forward`; (): the final norm
    last_hidden: bool = False  # of a prompt only the last hidden state is needed
    can_overlap: bool = False  # can continue a chain while the target verifies it
    needs_costs: bool = False  # chooses the size of its proposals from measured costs
    steps: str = "token"  # unit of t_draft: a drafted "token" or a "round" (one-pass drafters)
    # chains: whether stopping policies decide after every token, and not just before a round
    stops_by_token: bool = True
    # frontiers at which a draft step is timed, in increasing order; one if all steps cost the same
    frontiers: tuple[int, ...] = (1,)
    frontier_planner: FrontierPlanner | None = None  # chooses one from measured costs

    def __post_init__(self) -> None:
        if self.taps and not self.needs_hidden:
            raise ValueError(
                f"taps is {self.taps} but needs_hidden is False; taps are hidden states. Set "
                f"needs_hidden=True."
            )


class Target(Protocol):
    """A causal LM with a KV cache whose rows have separate lengths.

    `forward` changes no row's committed tokens; `commit` then keeps the tip and the accepted nodes.
    """

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
        """Maximum number of tokens in a row, prompt and output together."""

    @property
    def lengths_B(self) -> list[int]:
        """Number of committed tokens in the cache of each row."""

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        """Start `batch_size` empty rows of `capacity` cache slots each (default: max_length)."""

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return (logits_BNV, hidden_BNC) of new tokens after each row's committed ones.

        parents_BN[b, n] is the index of node n's parent among the new tokens, -1 for the last
        committed token, and always less than n; None is a chain. Rows with fewer tokens are padded
        on the right with any id, and commit fewer.

        hidden_BNC is the state after the final norm. With taps it is (B, N, len(taps) * C): the
        hidden states at these layers, concatenated in this order. Layers are numbered as in
        Hugging Face's `hidden_states`: 0 is the output of the embedding, k the state after k
        layers, and k = num_layers the state after the final norm. Raises UserError for a layer
        that does not exist or is named twice.
        """

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        """Return the hidden states of `forward` without computing logits, for prefill."""

    def chain_call(self, num_tokens: int) -> ChainCall | None:
        """Return a function that drafts chains outside Python, None if there is none.

        num_tokens: new tokens of its first step in all rows, padding included. The function takes
        (unseen_B, tips_B, counts_B, choice). It reads each row's unseen tokens, drafts counts_B[b]
        tokens, or as many as `choice.shorten` leaves, and commits all tokens but the last drafted
        one. It returns the tips and the drafted tokens (B, 1 + N), padded on the right, the
        distributions (B, N, V) that they were sampled from, None at temperature 0, and the draft
        lengths. Greedy tokens and the cache have the same bits as with a `forward` for each step.
        """

    def verify_call(self, chooser: Chooser) -> VerifyCall | None:
        """Return a function that verifies chains outside Python by the chooser's rule, or None.

        The function takes (logits_BNV, proposal, chooser). It returns the outcome, and the largest
        of the tested logits and the largest probability under the drafter of a tested token, each
        NaN if one is.
        """

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        """Commit the first counts_B[b] nodes of the path paths_BL[b], and drop the others.

        paths_BL: indices of the last forward's tokens; None is the chain 0, 1, 2, ...
        """

    def truncate(self, lengths_B: Sequence[int]) -> None:
        """Shorten each row to at most lengths_B[b] committed tokens."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""

    def keep(self, row: int, name: int) -> None:
        """Store a copy of a row's committed cache under a name."""

    def begin(self, row: int, name: int, length: int) -> None:
        """Fill an empty row with the first `length` tokens that `keep` stored under this name."""

    def forget(self) -> None:
        """Drop all caches that `keep` stored."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., C) of token ids."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states after the final norm."""


class Drafter(Protocol):
    """Proposer of tokens for the rows of a running batch.

    The order of calls is: `prepare` and `open` once; then in each round `propose`, `observe`,
    `rollback`, and `select` if rows have finished. `resume` replaces `open` in a conversation.
    """

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def name(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...

    def width(self, gamma: int) -> int:
        """Return the maximum number of tokens in a proposal of draft length or depth `gamma`."""

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target that verifies the drafts, and the measured costs of a round, if any."""

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Start rows with these prompts; no sequence will exceed `capacity` tokens.

        prefill_hidden_BNC: the target's hidden states of all prompt tokens except the last, if
        `capabilities.needs_hidden`. With `capabilities.last_hidden` it may be a single column: each
        prompt's last such state.
        """

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Continue the single row of `open` with a new prompt.

        The row already holds the prompt's first `kept` tokens. hidden_NC: with
        `capabilities.needs_hidden`, the target's hidden states of the tokens that the target has
        just read: at least one, the last of which is the prompt's second-to-last token. Without
        `capabilities.last_hidden` they cover all tokens past `kept`.
        """

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft at most budgets_B[b] tokens for row b; its stopping policy may end the draft.

        With `can_overlap`, the end of a sequence may be tokens that this drafter has drafted and
        the target has not read yet.
        """

    def observe(self, observation: Observation) -> None:
        """Use the results of a round, in which other drafters may have proposed for some rows.

        See decoding/drafters/with_lookup.py. Under an overlapped schedule `accepted_B` counts the
        accepted tokens that this round's forward has read, whose hidden states it has.
        """

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Drop cached tokens past these lengths, which count committed tokens without the tip.

        Under an overlapped schedule they also count the tokens that are assumed and not verified.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""

    def time_step(self, frontier: int = 1) -> None:
        """Run one draft step for timing, and leave the state unchanged.

        frontier: one of `Capabilities.frontiers`. `Capabilities.steps` defines a step.
        """


def ancestors(parents_BN: Tensor) -> Tensor:
    """Return a mask (B, N, N), true at [b, n, m] if node n is m or a descendant of m.

    The mask is undefined at rows n of padding nodes.
    """
    B, N = parents_BN.shape
    device = parents_BN.device
    # the extra column absorbs parent -1
    reach = torch.eye(N + 1, device=device).repeat(B, 1, 1)[:, :N]
    reach.scatter_(2, parents_BN.remainder(N + 1)[:, :, None], 1.0)
    reach = reach[:, :, :N]
    # each squaring doubles the number of generations that are reached
    for _ in range(max(N - 1, 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0
