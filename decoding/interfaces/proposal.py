"""Data of a round: a proposal, the outcome of its verification, and the drafter's observation.

Shapes: B rows, N new tokens (nodes), M riders, P places of nodes with children, K candidates, V
vocabulary, C hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

# parent of a padding node, if the host does not read the number of nodes
NO_NODE = -2

Readback = Callable[..., list[Any]]  # copies tensors to the host as lists, with one wait


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


class Reader(Protocol):
    """A model whose forward reads new tokens after the target's committed ones."""

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states, see `Target.forward`."""


@dataclass(frozen=True, slots=True)
class Riders:
    """Tokens that the verifying forward also reads, after the proposal's nodes.

    They are neither verified nor committed; their logits arrive in `Observation.riders_BMV`.
    """

    tokens_BM: Tensor
    # index of each rider's parent among the riders, or -1 for the tip and -2 - n for node n of the
    # proposal; parents precede their children
    parents_BM: Tensor
    # reads the forward instead of the target: a view on the target's cache that has the target's
    # logits at the proposal's nodes, and also knows the riders' ids
    reader: Reader


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
    riders: Riders | None = None

    @property
    def width(self) -> int:
        """Number of tokens after the tip that the forward reads."""
        return self.tokens_BN.shape[1] + (self.riders.tokens_BM.shape[1] if self.riders else 0)

    def counted(self) -> "Proposal | None":
        """Return the proposal without nodes past every row's count, or None if no node is left.

        The target's forward runs over the dropped nodes too, but they are not verified.
        """
        N = max(self.counts_B)
        if N == 0:
            return None
        if self.tokens_BN.shape[1] == N:
            return self
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


@dataclass(slots=True)
class Observation:
    """The data that a drafter receives after a round."""

    outcome: Outcome
    logits_BNV: Tensor  # of the tip and the drafted tokens, (B, N + 1, V)
    hidden_BNC: Tensor  # at the same nodes; with `Capabilities.taps`, the tapped states
    readback: list[Any] = field(default_factory=list)  # tensors of `Proposal.readback`, as lists
    riders_BMV: Tensor | None = None  # logits of `Proposal.riders`; None if there were none


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
