"""The head that training starts from: a new one, or that of the folder in head.path."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from decoding.engine import stop_tokens
from decoding.models.text.mask_token import check_mask_token, choose_mask_token
from decoding.models.text.tokenizer import load_tokenizer
from jobs.paths import resolve_model
from jobs.ranks import is_rank
from training.data.packing import Sample
from training.heads.checkpoint import check_sizes
from training.heads.config import HeadJobConfig, HeadOptions
from training.heads.kind import HeadKind
from training.models.build import target_is_here

MASK_TOKEN_KEY = "head.mask_token_id"


def shape_of(kind: HeadKind, config: HeadJobConfig, target: Any) -> Any:
    """Return the `HeadShape` of the head that a job trains.

    target: the target's Hugging Face configuration. Raises UserError if the folder in head.path
    holds no head of this kind, or one for other sizes than the target's.
    """
    if not config.head.path:
        return _limit_vocabulary(kind.shape(config, target))
    folder = resolve_model(config.head.path)
    shape = kind.assume(target_layers=target.num_hidden_layers).read_shape(folder)
    check_sizes(folder, shape, target)
    return shape


def _limit_vocabulary(shape: Any) -> Any:
    """Return the `HeadShape` with all tokens if it asks for as many as the target has, or more."""
    asked, most = shape.draft_vocab_size, shape.vocab_size
    if asked < most:
        return shape
    if not is_rank():
        print(
            f"note: head.draft_vocab_size is {asked:,} and the target's vocabulary has {most:,} "
            f"tokens, so the head drafts from all of them"
        )
    return replace(shape, draft_vocab_size=0)


def mask_token_of(config: HeadJobConfig, asked: int | None, target: Any) -> int:
    """Return the id `asked` for in head.mask_token_id, or one that no text has if it is None.

    A dry run without the target's folder, whose tokenizer names such an id, takes the last id of
    the vocabulary and prints a note.
    target: the target's Hugging Face configuration. Raises UserError for an id that texts have.
    """
    if config.dry_run and not target_is_here(config.target):
        if asked is not None:
            check_mask_token(MASK_TOKEN_KEY, asked, target.vocab_size)
            return asked
        last = int(target.vocab_size) - 1
        print(
            f"note: without the target's tokenizer, the mask token of this dry run is {last:,}, "
            f"the last of the vocabulary; training chooses one that no text has"
        )
        return last
    folder = resolve_model(config.target.path)
    tokenizer = load_tokenizer(folder)
    special = (*stop_tokens(folder, tokenizer), target.pad_token_id, target.bos_token_id)
    return choose_mask_token(MASK_TOKEN_KEY, asked, tokenizer, target.vocab_size, special)


def describe_mask_token(token: int | None, samples: Sequence[Sample]) -> str:
    """Describe how often training texts have the mask token; empty if they never do."""
    count = 0 if token is None else sum(int((sample.ids == token).sum()) for sample in samples)
    if not count:
        return ""
    return (
        f"the training texts have the mask token {token} {count:,} times. Drafts after it stay "
        f"exact, but the head cannot tell it from a slot to fill: set {MASK_TOKEN_KEY} to an id "
        f"that no text has"
    )


def start_head(kind: HeadKind, options: HeadOptions, shape: Any) -> Any:
    """Return the head in head.path, or a new one for `initialize_head`, in float32.

    Raises UserError if the folder in head.path holds no head of this kind.
    """
    if options.path:
        return kind.load(resolve_model(options.path)).requires_grad_(True).train()
    return kind.empty(shape)


def initialize_head(
    kind: HeadKind,
    options: HeadOptions,
    head: Any,
    lm_head_VH: Tensor,
    token_ids_V: Tensor | None = None,
) -> None:
    """Set the draft vocabulary of a new head, and the weights that follow from the target's.

    lm_head_VH: the target's output weights. token_ids_V: rising ids; None: all tokens.
    """
    if token_ids_V is not None:
        head.token_ids_V = token_ids_V
    kind.initialize(head, options, lm_head_VH)
