"""Test counts of the memory of tensors, and with them the peaks of the losses at full size."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from scripts.bench.gpu_losses import GOAL, REAL, TOY, Sizes, chunked, eager, gradients, make_inputs
from scripts.bench.peak_memory import META, count_bytes, peak_bytes
from training.losses.config import CROSS_ENTROPY, PARTS, LossConfig

SMALL = replace(TOY, vocab=2048, chunk=16)


def steps(name: str, sizes: Sizes, device: str) -> dict[str, Callable[[], Tensor]]:
    """Return a loss with its gradients, in chunks as training computes it and eagerly."""
    given, loss = make_inputs(sizes, device), LossConfig(name=name)
    return {
        "chunked": partial(gradients, partial(chunked, loss, given, sizes.chunk), given),
        "eager": partial(gradients, partial(eager, loss, given), given),
    }


@pytest.mark.parametrize("name", PARTS)
def test_counted_sizes_are_the_memory_that_is_allocated(name: str):
    """Compare the count with the profiler's, and without memory or computation."""
    for side, step in steps(name, SMALL, "cpu").items():
        step()
        allocated = peak_bytes(step)
        assert abs(count_bytes(step) / allocated - 1) < 0.01
        assert abs(peak_bytes(steps(name, SMALL, META)[side], META) / allocated - 1) < 0.01


def test_a_count_includes_what_is_kept_and_not_what_is_freed():
    held = torch.zeros(1000)

    def kept() -> list[Tensor]:
        return [held + 1 for _ in range(3)]

    def freed() -> None:
        for _ in range(3):
            held.add_(1).view(10, 100)
            held + 1

    assert (count_bytes(kept), count_bytes(freed)) == (12_000, 4_000)


@pytest.mark.parametrize("name", PARTS)
def test_a_loss_takes_a_quarter_of_the_eager_loss_at_a_large_vocabulary(name: str):
    """Count the peaks of 4,096 rows over 128,256 tokens. Control: all rows in one chunk.

    The gradient of the output layer, in float32 and as it is returned, is a quarter of the eager
    cross-entropy already.
    """
    found = {side: peak_bytes(step, META) for side, step in steps(name, REAL, META).items()}
    goal = 1.02 * GOAL if name == CROSS_ENTROPY else GOAL
    assert found["chunked"] <= goal * found["eager"]
    whole = steps(name, replace(REAL, chunk=REAL.rows), META)["chunked"]
    assert peak_bytes(whole, META) > 2 * GOAL * found["eager"]
