"""Decode many requests of one prompt as rows of one batch: law 3 needs up to a million of them.

Two measures make a request cheap, and neither changes its tokens (tests check that). A row leaves
the batch once it has the tokens that are counted. Python's cyclic garbage collector is off: rows
contain no cycles, and its scans of many small objects would take half of the time.
"""

from collections.abc import Callable, Sequence

import pytest
import torch

from decoding.interfaces import Drafter, Target
from decoding.loop import prefill_batch
from decoding.rounds.batch import Batch
from decoding.rounds.settings import Settings
from decoding.sampling import token_chooser
from decoding.sampling.token_chooser import TokenChooser
from decoding.schedules.pearl import Pearl


def replace_uniform(patch: pytest.MonkeyPatch, uniform: Callable[..., float]) -> None:
    """Replace the random numbers of all rules and drafters by those of another `uniform`."""
    patch.setattr(TokenChooser, "uniform", uniform)
    patch.setattr(token_chooser, "FEW", 10**9)  # numpy computes none of them


def opened(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    settings: Settings,
    request_ids: Sequence[int],
) -> Batch:
    """Return a batch of one prompt's requests after the prefill."""
    return prefill_batch(
        target, drafter, [prompt] * len(request_ids), settings, request_ids=request_ids
    )


def keep(batch: Batch, places: list[int]) -> None:
    """Drop all rows of a batch except those at `places`."""
    if isinstance(batch, Pearl):
        batch.lanes = [batch.lanes[place] for place in places]
    batch._select(places)


@torch.inference_mode()
def first_tokens(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    settings: Settings,
    request_ids: Sequence[int],
    wanted: int,
) -> list[list[int]]:
    """Return the first `wanted` tokens of each request, or fewer if its generation ends earlier."""
    batch = opened(target, drafter, prompt, settings, request_ids)
    generations = [row.generation for row in batch.rows]
    while batch.rows:
        batch.round()
        going = [
            place for place, row in enumerate(batch.rows) if len(row.generation.tokens) < wanted
        ]
        if len(going) < len(batch.rows):
            keep(batch, going)
    return [generation.tokens[:wanted] for generation in generations]
