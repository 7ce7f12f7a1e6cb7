"""The two budgets that bound a target's forward: the bytes that must be read, and the
floating-point operations.

Batch-1 decoding reads every weight once a forward and the keys and values of the committed tokens
once a row; what a forward computes grows with its width. Which of the two binds says what V(n) can
be: where bytes bind, more tokens cost nothing.

Shapes: V vocabulary, C hidden size, Q query heads, H key/value heads, D head size, L layers.
"""

from dataclasses import dataclass

import torch

from decoding.models.native.weights import NativeConfig


@dataclass(frozen=True)
class Budget:
    """Of one forward."""

    weight_bytes: int  # all matrices; of the embedding table only the rows that are looked up
    cache_bytes: int  # keys and values read
    operations: int  # a multiplication and an addition are two

    @property
    def bytes_read(self) -> int:
        return self.weight_bytes + self.cache_bytes

    def seconds(self, bytes_a_second: float, operations_a_second: float) -> float:
        """The least time that the two budgets allow: the longer of them, as they run at the same
        time.
        """
        return max(self.bytes_read / bytes_a_second, self.operations / operations_a_second)

    def times(self, forwards: float) -> "Budget":
        """Of so many such forwards; a mean number may be broken."""
        return Budget(
            round(forwards * self.weight_bytes),
            round(forwards * self.cache_bytes),
            round(forwards * self.operations),
        )

    def __add__(self, other: "Budget") -> "Budget":
        """Of one after the other."""
        return Budget(
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.operations + other.operations,
        )


def round_budget(
    target: NativeConfig, drafter: NativeConfig | None, dtype: torch.dtype, gamma: int, context: int
) -> Budget:
    """What a round of a chain needs: `gamma` draft steps, and the target's forward over what they
    drew and the tip.
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
) -> Budget:
    """What a forward over `new_tokens` a row needs, after `context` committed tokens a row; tokens
    and rows may be means over forwards.

    skipped: attention and MLP sub-layers that are left out.
    """
    C, D = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * D, config.num_kv_heads * D
    attending, feeding = (config.num_layers - left_out for left_out in skipped)
    matrices = (
        attending * (C * (queries + 2 * keys) + queries * C)
        + feeding * 3 * C * config.intermediate_size
    )
    matrices += C * config.vocab_size  # the head, tied to the embedding or not
    tokens = batch_size * new_tokens
    cache = 2 * attending * keys * context * batch_size
    attention = 4 * attending * queries * (context + new_tokens / 2) * tokens
    weights = matrices + tokens * C
    return Budget(
        round(weights * dtype.itemsize),
        round(cache * dtype.itemsize),
        int(2 * matrices * tokens + attention),
    )
