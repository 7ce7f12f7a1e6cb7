"""Models with a draft vocabulary, made from models without one."""

import copy

import torch
from torch import Tensor

from decoding.interfaces import Target
from decoding.models.draft_vocabulary import spread
from decoding.models.native.model import NativeTarget
from tests.support.tiny_targets import TableTarget

NONE = float("-inf")


def restricted(model: Target, ids_N: Tensor) -> NativeTarget:
    """Return a native model with another cache, which gives all other tokens the logit -inf."""
    assert isinstance(model, NativeTarget)
    weights, head, V = copy.copy(model.weights), model.weights.head, model.vocab_size
    weights.head = lambda x_NC: spread(head(x_NC)[..., ids_N], ids_N, V, NONE)
    return NativeTarget(weights, model.name, model.max_length, execution=model.execution)


def restricted_table(table: TableTarget, ids_N: Tensor) -> TableTarget:
    """Return a table in which all other tokens have the logit -inf."""
    kept_VVN = table.table_VVV[..., ids_N]
    return TableTarget(spread(kept_VVN, ids_N, table.vocab_size, NONE))


def even(model: Target) -> Tensor:
    """Return the even token ids of a model."""
    return torch.arange(0, model.vocab_size, 2)
