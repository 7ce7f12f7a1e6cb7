"""Decode many requests of one prompt in batches under a schedule that runs one prompt at a time.

Such a schedule has one state per batch (whether a chunk is fresh, acceptance estimates), so the
rows of a batch must agree in it. All requests start in one batch, which is split after every round
by the outcomes of its rows. A request's random numbers depend on its id alone, so it decodes the
same tokens as alone (tests/decoding/test_law_of_overlap.py).
"""

from collections.abc import Sequence
from copy import copy, deepcopy

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Drafter, Target
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.schedules import by_name
from decoding.schedules.pearl import Lane, Pearl, PearlWithoutPre
from decoding.schedules.pearl_plus import PearlPlus
from tests.support.many_requests import keep, opened


class ManyWithoutPre(PearlWithoutPre):
    one_row = False


class ManyPlus(PearlPlus):
    one_row = False

    def _learn(self, passed: int, tested: int) -> None:
        """Do nothing: `part` updates the estimates of each part with its outcomes."""


MANY: dict[str, type[Pearl]] = {
    "pearl_virtual_wo_pre": ManyWithoutPre,
    "pearl_plus_virtual": ManyPlus,
}


@torch.inference_mode()
def decode_in_batches(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    settings: Settings,
    request_ids: Sequence[int],
    wanted: int,
) -> list[list[int]]:
    """Return the first `wanted` tokens of each request, or fewer if its generation ends earlier.

    settings.schedule must be a key of MANY.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(by_name.SCHEDULES, settings.schedule, MANY[settings.schedule])
        batch = opened(target, drafter, prompt, settings, request_ids)
    assert isinstance(batch, Pearl)
    generations = [row.generation for row in batch.rows]
    waiting = [batch]
    while waiting:
        waiting += split_after_round(waiting.pop(), wanted)
    return [generation.tokens[:wanted] for generation in generations]


def split_after_round(batch: Pearl, wanted: int) -> list[Pearl]:
    """Run a round, and return the rows with fewer than `wanted` tokens, one batch per outcome."""
    rows = batch.rows
    before = [(row.generation.accepted, row.generation.tested) for row in rows]
    met = {}
    batch.round()
    for row, (accepted, tested) in zip(rows, before):
        met[row.index] = (row.generation.accepted - accepted, row.generation.tested - tested)
    alike: dict[tuple, list[int]] = {}
    for place, (row, lane) in enumerate(zip(batch.rows, batch.lanes, strict=True)):
        if len(row.generation.tokens) < wanted:
            alike.setdefault(state(row.generation, lane, met[row.index]), []).append(place)
    return [part(batch, places, *key[:2]) for key, places in alike.items()]


def state(generation: Generation, lane: Lane, met: tuple[int, int]) -> tuple[int, ...]:
    """Return the key for splitting a batch: all in which rows that agreed so far can now differ.

    met: accepted and tested tokens of that round.
    """
    return (*met, len(generation.tokens), len(lane.tokens))


def part(batch: Pearl, places: list[int], passed: int, tested: int) -> Pearl:
    """Return a new batch of the rows at `places`, with estimates updated from their last round.

    passed, tested: accepted and tested tokens of each row in that round.
    """
    mine = copy(batch)
    if isinstance(batch.target, NativeTarget):  # whose caches a shallow copy would share
        mine.target, mine.drafter = deepcopy((batch.target, batch.drafter))
    else:
        mine.target, mine.drafter = copy(batch.target), copy(batch.drafter)
        if isinstance(mine.drafter, ChainDrafter):
            mine.drafter.model = copy(mine.drafter.model)
    keep(mine, places)
    if isinstance(mine, PearlPlus):
        mine.overall, mine.first, mine.next = copy(mine.overall), copy(mine.first), copy(mine.next)
        mine.chosen = list(mine.chosen)
        PearlPlus._learn(mine, passed, tested)
    return mine
