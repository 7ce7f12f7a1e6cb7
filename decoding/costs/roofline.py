"""The roofline of a forward: the bytes that it must read, and its floating-point operations.

A forward reads every weight once, and the committed keys and values once per row; its operations
grow with the number of new tokens. A forward takes at least the time of its reads and at least that
of its operations: while the reads take longer, more tokens cost nothing.

Shapes: V vocabulary, C hidden size, Q query heads, H key/value heads, D head size, L layers.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from decoding.interfaces import Target
from decoding.models.native.weights import NativeConfig


@dataclass(frozen=True)
class ForwardBudget:
    """The bytes and operations of one forward."""

    weight_bytes: int  # all matrices, and the embeddings of the new tokens
    cache_bytes: int  # keys and values read
    operations: int  # a multiplication and an addition count as two

    @property
    def bytes_read(self) -> int:
        """Bytes of weights, keys and values."""
        return self.weight_bytes + self.cache_bytes

    def seconds(self, bytes_a_second: float, operations_a_second: float) -> float:
        """Return the minimum time: the longer of memory reads and products, which overlap."""
        return max(self.bytes_read / bytes_a_second, self.operations / operations_a_second)

    def times(self, forwards: float) -> "ForwardBudget":
        """Return the budget of `forwards` forwards, which may be a fraction."""
        return ForwardBudget(
            round(forwards * self.weight_bytes),
            round(forwards * self.cache_bytes),
            round(forwards * self.operations),
        )

    def __add__(self, other: "ForwardBudget") -> "ForwardBudget":
        """Return the sum of both budgets."""
        return ForwardBudget(
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.operations + other.operations,
        )


@runtime_checkable
class BudgetedDrafter(Protocol):
    """A drafter that knows the bytes and operations of its drafts, as trained heads do."""

    def draft_budget(
        self, target: Target, steps: float, gamma: int, context: int, rows: float
    ) -> ForwardBudget:
        """Return the budget of the draft of a mean round.

        target: the target that verifies, whose embedding, layers and lm_head the draft may read.
        steps: mean draft steps of a round, below 1 if some rounds do not draft. gamma: maximum
        draft length or depth. context: committed tokens of a row. rows: mean number of rows.
        """


def round_budget(
    target: NativeConfig, drafter: NativeConfig | None, dtype: torch.dtype, gamma: int, context: int
) -> ForwardBudget:
    """Return the budget of a chain's round: `gamma` draft steps and the target's forward.

    drafter: None for a draft that reads nothing. context: committed tokens.
    """
    budget = forward_budget(target, dtype, gamma + 1, context)
    for step in range(gamma if drafter is not None else 0):
        assert drafter is not None
        budget += forward_budget(drafter, dtype, 1, context + step)
    return budget


def forward_budget(
    config: NativeConfig,
    dtype: torch.dtype,
    new_tokens: float,
    context: int,
    batch_size: float = 1,
    skipped: tuple[int, int] = (0, 0),
) -> ForwardBudget:
    """Return the budget of a forward over `new_tokens` per row after `context` committed tokens.

    new_tokens and batch_size may be means over several forwards. skipped: numbers of skipped
    attention and MLP sub-layers.
    """
    C, D = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * D, config.num_kv_heads * D
    attending, feeding = (config.num_layers - left_out for left_out in skipped)
    matrices = (
        attending * (C * (queries + 2 * keys) + queries * C)
        + feeding * 3 * C * config.intermediate_size
    )
    matrices += C * config.head_rows  # tied to the embedding or not
    tokens = batch_size * new_tokens
    cache = 2 * attending * keys * context * batch_size
    attention = 4 * attending * queries * (context + new_tokens / 2) * tokens
    weights = matrices + tokens * C
    return ForwardBudget(
        round(weights * dtype.itemsize),
        round(cache * dtype.itemsize),
        int(2 * matrices * tokens + attention),
    )
