"""Positions of a log that lie past a drafter's context, where it drafts nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.other_vocabulary import OtherVocabulary
from decoding.drafters.translation import Translation
from decoding.drafters.with_lookup import LookupFirst
from decoding.interfaces import Drafter
from eval.logged.texts import LoggedText


def context_of(drafter: Drafter) -> int | None:
    """Return the context of a drafter's model in its own tokens; None for lookups."""
    reader = _model_drafter(drafter)
    return None if reader is None else reader.model.max_length


def positions_past_context(drafter: Drafter, texts: Sequence[LoggedText]) -> int | None:
    """Return the number of output tokens for which a model has no room; None for lookups.

    A chain or a tree drafts after as many tokens as its context holds, and a drafter with another
    vocabulary after one less of its own.
    """
    reader = _model_drafter(drafter)
    if reader is None:
        return None
    past, context = 0, reader.model.max_length
    for text in texts:
        ids, starts = text.ids, range(len(text.prompt), len(text.ids))
        if isinstance(reader, ChainDrafter):
            past += max(0, len(ids) - max(len(text.prompt), context + 1))
        else:
            read = partial(_length_read, reader, ids)
            past += len(starts) - bisect_left(starts, context, key=read)
    return past


def _length_read(reader: OtherVocabulary, ids: Sequence[int], start: int) -> int:
    """Return the number of the drafter's own tokens in the first `start` tokens."""
    return len(Translation(reader.vocabularies).of(ids[:start]))


def _model_drafter(drafter: Drafter) -> ChainDrafter | OtherVocabulary | None:
    inner = drafter.drafter if isinstance(drafter, LookupFirst) else drafter
    return inner if isinstance(inner, ChainDrafter | OtherVocabulary) else None
