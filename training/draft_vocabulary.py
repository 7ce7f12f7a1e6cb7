"""Choice of a draft vocabulary from the training data (decoding/models/draft_vocabulary.py).

Shapes: V drafted vocabulary, T the target's vocabulary.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from training.data.packing import Sample


def choose_tokens(
    samples: Sequence[Sample],
    vocab_size: int,
    draft_vocab_size: int,
    show: bool,
    always: Iterable[int] = (),
) -> Tensor:
    """Return the ids [V] of the most frequent supervised tokens, rising; ties go to smaller ids.

    show: print their share of the supervised tokens. always: tokens that are chosen first, such as
    stop tokens.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.ids[sample.mask], minlength=vocab_size)
    ranks = counts.copy()
    kept = [token for token in set(always) if token < vocab_size]
    ranks[kept] += counts.sum() + 1
    chosen = np.argsort(-ranks, kind="stable")[:draft_vocab_size]
    share = counts[chosen].sum() / max(1, counts.sum())
    if show:
        print(
            f"draft vocabulary: {len(chosen):,} of {vocab_size:,} tokens, {share:.2%} of the "
            f"training answers' tokens"
        )
    return torch.from_numpy(np.sort(chosen))


def index_tokens(ids_V: Tensor, vocab_size: int) -> Tensor:
    """Return the index in the logits of each of the target's tokens [T], -1 if not drafted."""
    indices_T = torch.full((vocab_size,), -1, device=ids_V.device)
    indices_T[ids_V] = torch.arange(len(ids_V), device=ids_V.device)
    return indices_T
