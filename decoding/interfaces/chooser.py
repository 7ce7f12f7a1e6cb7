"""Choice of a round's tokens, which drafters and verification rules share.

Shapes: B rows of a batch, R rows of logits, N nodes, P nodes with children, K candidates, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Warper(Protocol):
    """Sampling settings that turn logits into probabilities (decoding/sampling/warpers.py)."""

    @property
    def temperature(self) -> float: ...
    @property
    def greedy(self) -> bool: ...
    @property
    def truncates(self) -> bool: ...
    @property
    def is_shared(self) -> bool:
        """Whether all rows of the batch have the same settings."""

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
    # under the coupled rule, of seed, request and the position of each depth, signed
    shared_BW: Sequence[Sequence[int]] = ()


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
        """The keys of this round's random numbers, for calls outside Python."""

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
