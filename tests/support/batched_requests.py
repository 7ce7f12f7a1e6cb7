"""Many requests in batches, under a schedule that runs one prompt at a time.

Such a schedule keeps its state (assumed tokens, acceptance rates) for the complete batch, so rows
with different states need separate batches. All requests begin in one batch. After every round it
is split by the rows' states. A request's noise depends on its id alone, so its output is that of a
single request (tests/decoding/test_law_of_overlap.py).
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
    """The ablation without pre-verify, for several rows."""

    one_row = False


class ManyPlus(PearlPlus):
    """PEARL+ for several rows."""

    one_row = False

    def _learn(self, accepted: int, tested: int) -> None:
        """Do nothing: `split` updates the rates of each new batch."""


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
    """Return at most `wanted` first tokens of each request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(by_name.SCHEDULES, settings.schedule, MANY[settings.schedule])
        batch = opened(target, drafter, prompt, settings, request_ids)
    assert isinstance(batch, Pearl)
    generations = [row.generation for row in batch.rows]
    waiting = [batch]
    while waiting:
        waiting += run_and_split(waiting.pop(), wanted)
    return [generation.tokens[:wanted] for generation in generations]


def run_and_split(batch: Pearl, wanted: int) -> list[Pearl]:
    """Run a round; return batches of the rows that need more tokens, by their states."""
    rows = batch.rows
    before = [(row.generation.accepted, row.generation.tested) for row in rows]
    tests = {}
    batch.round()
    for row, (accepted, tested) in zip(rows, before):
        tests[row.index] = (row.generation.accepted - accepted, row.generation.tested - tested)
    alike: dict[tuple, list[int]] = {}
    for place, (row, lane) in enumerate(zip(batch.rows, batch.lanes, strict=True)):
        if len(row.generation.tokens) < wanted:
            alike.setdefault(state(row.generation, lane, tests[row.index]), []).append(place)
    return [split(batch, places, *key[:2]) for key, places in alike.items()]


def state(generation: Generation, lane: Lane, tests: tuple[int, int]) -> tuple[int, ...]:
    """Return a row's state after a round that it began with the state of its batch."""
    return (*tests, len(generation.tokens), len(lane.tokens))


def split(batch: Pearl, places: list[int], accepted: int, tested: int) -> Pearl:
    """Return a batch of these rows, and leave the others in `batch`."""
    new = copy(batch)
    new.target, drafter = copy(batch.target), copy(batch.drafter)
    assert isinstance(drafter, ChainDrafter)
    drafter.model = copy(drafter.model)
    new.drafter = drafter
    keep(new, places)
    if isinstance(new, PearlPlus):
        new.overall, new.first, new.next = copy(new.overall), copy(new.first), copy(new.next)
        new.chosen = list(new.chosen)
        PearlPlus._learn(new, accepted, tested)
    return new
