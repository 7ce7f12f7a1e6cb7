"""Draft vocabularies: the subset of the target's tokens that a head drafts from.

A head's logits follow the order of `ids_V`, the rising ids of the drafted tokens in the target's
vocabulary. A draft vocabulary restricts only q, so decoding stays exact.

Shapes: V drafted vocabulary, T the target's vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decoding.errors import UserError
from training.data.packing import Sample


def choose_tokens(
    samples: Sequence[Sample], vocab_size: int, draft_vocab_size: int, show: bool
) -> Tensor:
    """Return the ids [V] of the most frequent supervised tokens, rising; ties go to smaller ids.

    show: print their share of the supervised tokens.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.ids[sample.mask], minlength=vocab_size)
    chosen = np.argsort(-counts, kind="stable")[:draft_vocab_size]
    share = counts[chosen].sum() / max(1, counts.sum())
    if show:
        print(
            f"shortlist: {len(chosen):,} of {vocab_size:,} tokens, {share:.2%} of the "
            f"training answers' tokens"
        )
    return torch.from_numpy(np.sort(chosen))


def index_tokens(ids_V: Tensor, vocab_size: int) -> Tensor:
    """Return the index in the logits of each of the target's tokens [T], -1 if not drafted."""
    indices_T = torch.full((vocab_size,), -1, device=ids_V.device)
    indices_T[ids_V] = torch.arange(len(ids_V), device=ids_V.device)
    return indices_T


def spread(values: Tensor, ids_V: Tensor | None, vocab_size: int, others: float) -> Tensor:
    """Spread values (..., V) to the target's vocabulary (..., T); other tokens get `others`.

    ids_V: the drafted tokens; None: all tokens, whose values are returned unchanged.
    """
    if ids_V is None:
        return values
    return values.new_full((*values.shape[:-1], vocab_size), others).index_copy_(-1, ids_V, values)


def check_tokens(file: Path, name: str, ids_V: Tensor, vocab_size: int) -> None:
    """Raise UserError unless `ids_V` are rising token ids (int64) below `vocab_size`.

    file, name: the file and the tensor's name in it, for the error.
    """
    if (
        ids_V.dtype != torch.long
        or bool((ids_V.diff() <= 0).any())
        or int(ids_V[0]) < 0
        or int(ids_V[-1]) >= vocab_size
    ):
        raise UserError(
            f"{file}: {name} is not a rising list of token ids (int64) below {vocab_size}. The "
            f"file is damaged; copy it again."
        )
