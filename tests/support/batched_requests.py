"""Many requests under a schedule that runs one prompt at a time, at the cost of a batch: those that
went alike so far run as its rows.

Such a schedule keeps what it decides by for the whole batch (a fresh chunk, what was learned of
acceptance), so rows of one batch must agree in it. All requests begin alike; after every round they
are parted by what happened to them, and each part goes on as a batch of its own. A request's random
numbers hang on its id alone, so it decodes what it would decode alone
(tests/decoding/test_law_of_overlap.py).
"""

from collections.abc import Sequence
from copy import copy

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Target
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
        """Each part learns what its own rows met, when they are parted."""


MANY: dict[str, type[Pearl]] = {
    "pearl_virtual_wo_pre": ManyWithoutPre,
    "pearl_plus_virtual": ManyPlus,
}


@torch.inference_mode()
def decode_alike(
    target: Target,
    drafter: ChainDrafter,
    prompt: Sequence[int],
    settings: Settings,
    request_ids: Sequence[int],
    wanted: int,
) -> list[list[int]]:
    """The first `wanted` tokens of each request (fewer where it ends before)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(by_name.SCHEDULES, settings.schedule, MANY[settings.schedule])
        batch = opened(target, drafter, prompt, settings, request_ids)
    assert isinstance(batch, Pearl)
    generations = [row.generation for row in batch.rows]
    waiting = [batch]
    while waiting:
        waiting += parts_after_a_round(waiting.pop(), wanted)
    return [generation.tokens[:wanted] for generation in generations]


def parts_after_a_round(batch: Pearl, wanted: int) -> list[Pearl]:
    """Run a round; the batches of rows that still want tokens, by what happened to them."""
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
    """All that a schedule decides by, of rows that were alike before their last round."""
    return (*met, len(generation.tokens), len(lane.tokens))


def part(batch: Pearl, places: list[int], passed: int, tested: int) -> Pearl:
    """A batch of these rows; the others stay where they are."""
    mine = copy(batch)
    mine.target, drafter = copy(batch.target), copy(batch.drafter)
    assert isinstance(drafter, ChainDrafter)
    drafter.model = copy(drafter.model)
    mine.drafter = drafter
    keep(mine, places)
    if isinstance(mine, PearlPlus):
        mine.overall, mine.first, mine.next = copy(mine.overall), copy(mine.first), copy(mine.next)
        mine.chosen = list(mine.chosen)
        PearlPlus._learn(mine, passed, tested)
    return mine
