"""Test the learning-rate schedule against its definition and against transformers."""

from itertools import pairwise

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from training.bounds import Bounds, RunTotals
from training.optimizer import learning_rate
from training.optimizer_config import OptimizerConfig


def rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Return the learning rate of a step in a run of `total` steps."""
    return learning_rate(
        config,
        step,
        Bounds(steps=total).share(RunTotals(step), since=RunTotals(config.warmup_steps)),
    )


def test_the_cosine_starts_where_the_warm_up_ends():
    """Check the linear rise to the peak, and the cosine from there to lr x final_lr.

    Both the last step of the warm-up and the first of the cosine have the peak rate.
    """
    config = OptimizerConfig(lr=2.0, warmup_steps=4, final_lr=0.1)
    rates = [rate(config, step, 12) for step in range(13)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert all(before > after for before, after in pairwise(rates[4:]))
    assert rates[8] == pytest.approx((2.0 + 0.2) / 2), "half of the way down"
    assert rates[12] == pytest.approx(0.2)


@pytest.mark.parametrize("warmup", [0, 3])
def test_after_the_warm_up_the_schedule_equals_transformers(warmup: int):
    """Check that after the warm-up the rates equal those of get_cosine_schedule_with_warmup.

    The warm-up of transformers differs: the first step has a rate of 0.
    """
    config = OptimizerConfig(lr=0.5, warmup_steps=warmup, final_lr=0.0)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup, 10)
    for step in range(10):
        if step >= warmup:
            assert rate(config, step, 10) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_a_run_shorter_than_its_warm_up_ends_while_the_rate_rises():
    config = OptimizerConfig(lr=1.0, warmup_steps=20)
    assert [rate(config, step, 5) for step in range(5)] == pytest.approx(
        [0.05, 0.1, 0.15, 0.2, 0.25]
    )
