"""Parts of the budget of a head's draft: the bytes that it must read, and its operations.

Matrices count and vectors do not, as in the budgets of whole models (decoding/costs/roofline.py).
Each product reads its matrix once, whatever the number of tokens.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from decoding.costs.roofline import ForwardBudget
from decoding.interfaces import Target
from decoding.models.load import DTYPES


def products(weights: Iterable[Tensor], tokens: float) -> ForwardBudget:
    """Return the budget of products of `tokens` tokens with the matrices among these weights."""
    matrices = [weight for weight in weights if weight.squeeze().dim() > 1]
    size_bytes = sum(matrix.numel() * matrix.element_size() for matrix in matrices)
    return ForwardBudget(size_bytes, 0, round(2 * sum(map(Tensor.numel, matrices)) * tokens))


def product(inputs: int, outputs: int, tokens: float, dtype: torch.dtype) -> ForwardBudget:
    """Return the budget of the product of `tokens` tokens with one matrix."""
    return ForwardBudget(inputs * outputs * dtype.itemsize, 0, round(2 * inputs * outputs * tokens))


def lm_head(target: Target, tokens: float) -> ForwardBudget:
    """Return the budget of the target's output layer."""
    return product(target.hidden_size, target.vocab_size, tokens, DTYPES[target.dtype])


def table_rows(size: int, count: float, dtype: torch.dtype) -> ForwardBudget:
    """Return the budget of reading `count` rows of a table, as an embedding does."""
    return ForwardBudget(round(size * count * dtype.itemsize), 0, 0)


def embedding(target: Target, tokens: float) -> ForwardBudget:
    """Return the budget of the target's embeddings of `tokens` different tokens."""
    return table_rows(target.hidden_size, tokens, DTYPES[target.dtype])


def attention(
    query_size: int, key_size: int, context: float, new: float, rows: float, dtype: torch.dtype
) -> ForwardBudget:
    """Return the budget of the attention of `new` tokens a row in one layer, without its products.

    query_size, key_size: channels of all query heads and of all key heads. context: tokens before
    the new ones, whose keys and values are read once a row.
    """
    return ForwardBudget(
        0,
        round(2 * key_size * context * rows * dtype.itemsize),
        round(4 * query_size * (context + new / 2) * new * rows),
    )
