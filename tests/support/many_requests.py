"""Decode many requests of one prompt as rows of one batch: law 3 needs up to a million of them.

Three measures make a request cheap, and none changes its tokens (tests check that). A row leaves
the batch once it has the tokens that are counted. The uniforms of all rows are computed together,
in numpy's integers, which wrap as `noise` requires. Python's cyclic garbage collector is off: rows
contain no cycles, and its scans of many small objects would take half of the time.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from decoding.interfaces import Drafter, Target
from decoding.loop import prefill_batch
from decoding.rounds import batch as batches
from decoding.rounds.batch import Batch
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from decoding.sampling.token_chooser import FRESH, LOSSY, TokenChooser
from decoding.schedules.pearl import Pearl

PRODUCT = (TokenChooser.begin, TokenChooser.uniform, TokenChooser.draft_key, TokenChooser.node_keys)
Integers = np.ndarray
Key = tuple[int, int, int | None]


def mixed(z_B: Integers) -> Integers:
    """Return `noise.mix` of each integer."""
    z_B = (z_B ^ (z_B >> np.uint64(30))) * np.uint64(noise.MIX_1)
    z_B = (z_B ^ (z_B >> np.uint64(27))) * np.uint64(noise.MIX_2)
    return z_B ^ (z_B >> np.uint64(31))


def extended(states_B: Integers, part: Integers | int) -> Integers:
    """Return `noise.extend` of each state."""
    part = part if isinstance(part, np.ndarray) else np.uint64(part)
    return mixed((states_B ^ part) * np.uint64(5) + np.uint64(noise.GOLDEN))


class ManyChooser(TokenChooser):
    """Chooser that computes the uniforms of all rows when the first row needs one."""

    def begin(
        self,
        request_keys_B: Sequence[int],
        rounds_B: Sequence[int],
        positions_B: Sequence[int],
        depths: int,
    ) -> None:
        if self.rule not in (*FRESH, *LOSSY):
            super().begin(request_keys_B, rounds_B, positions_B, depths)
            return
        self.begun = (request_keys_B, rounds_B, positions_B, depths)
        self._states_B = extended(
            np.array(request_keys_B, np.uint64), np.array(rounds_B, np.uint64)
        )
        self._places_B = np.array(positions_B, np.uint64)
        self._uniforms: dict[Key, list[float]] = {}
        self._draft_keys: dict[int, list[int]] = {}

    def _at(self, depth: int, purpose: int) -> Integers:
        return extended(extended(self._states_B, self._places_B + np.uint64(depth)), purpose)

    def uniform(self, row: int, depth: int, purpose: int, node: int | None = None) -> float:
        made_B = self._uniforms.get((depth, purpose, node))
        if made_B is None:
            states_B = self._at(depth, purpose)
            bits_B = mixed(
                (states_B if node is None else extended(states_B, node)) + np.uint64(noise.GOLDEN)
            )
            made_B = (
                (bits_B >> np.uint64(12)).astype(np.float64) * 2.0**-52 + noise.HALF_STEP
            ).tolist()
            self._uniforms[depth, purpose, node] = made_B
        return made_B[row]

    def draft_key(self, row: int, depth: int) -> int:
        if depth not in self._draft_keys:
            self._draft_keys[depth] = self._at(depth, noise.DRAFT).view(np.int64).tolist()
        return self._draft_keys[depth][row]

    def node_keys(self, depth: int, nodes: Sequence[int]) -> list[list[int]]:
        return (
            extended(self._at(depth, noise.DRAFT)[:, None], np.array(nodes, np.uint64))
            .view(np.int64)
            .tolist()
        )


@contextmanager
def cheap_numbers() -> Iterator[None]:
    """Make batches that are created in the block sample with `ManyChooser`.

    If a control has replaced the random numbers of `TokenChooser`, its replacement stays in use.
    """
    with pytest.MonkeyPatch.context() as patch:
        if (
            TokenChooser.begin,
            TokenChooser.uniform,
            TokenChooser.draft_key,
            TokenChooser.node_keys,
        ) == PRODUCT:
            patch.setattr(batches, "TokenChooser", ManyChooser)
        yield


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn the garbage collector off while the block runs."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def opened(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    settings: Settings,
    request_ids: Sequence[int],
) -> Batch:
    """Return a batch of one prompt's requests after the prefill."""
    with cheap_numbers():
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
