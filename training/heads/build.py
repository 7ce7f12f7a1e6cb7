"""The head that training starts from: a new one, or that of the folder in head.path."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from jobs.paths import resolve
from training.data.packing import Sample
from training.heads.checkpoint import check_sizes
from training.heads.config import HeadJobConfig, HeadOptions
from training.heads.draft_vocabulary import choose_tokens
from training.heads.kind import HeadKind


def shape_of(kind: HeadKind, config: HeadJobConfig, target: Any) -> Any:
    """Return the `HeadShape` of a job's head for a target. Raises UserError.

    target: its Hugging Face configuration.
    """
    if not config.head.path:
        return kind.shape(config, target)
    folder = resolve(config.head.path)
    shape = kind.read_shape(folder)
    check_sizes(folder, shape, target)
    return shape


def build_head(
    kind: HeadKind,
    options: HeadOptions,
    shape: Any,
    lm_head_VH: Tensor,
    samples: Sequence[Sample],
    show: bool,
) -> Any:
    """Return the head in float32.

    lm_head_VH: the target's output weights. samples: texts whose answers are counted for the draft
    vocabulary. show: print its share of them.
    """
    if options.path:
        return kind.load(resolve(options.path)).requires_grad_(True).train()
    head = kind.empty(shape)
    if shape.draft_vocab_size:
        head.token_ids_V = choose_tokens(samples, shape.vocab_size, shape.draft_vocab_size, show)
    kind.initialize(head, options, lm_head_VH)
    return head
