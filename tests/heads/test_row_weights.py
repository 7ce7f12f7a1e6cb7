"""The weight of a row's loss depends on the row alone, where training samples drafts or depths.

So neither the size of micro-batches nor the number of ranks changes what a step learns.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from training.data.packing import Sample, collate
from training.heads import objective
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective

FEW = {"drafts_per_row": 5}
SAMPLED: dict[str, dict[str, Any]] = {
    "p_eagle": {"depth_share": 0.6},
    "dflash": FEW,
    "specdiff": FEW,
    "sdsat": FEW,
    "dspark": FEW | {"depth_weights": "d_pace", "depth_share": 0.8},
}
LENGTH = 40


def texts() -> list[Sample]:
    """Return texts, one a row, whose numbers of supervised tokens differ widely."""
    random = np.random.default_rng(0)
    return [
        Sample(
            random.integers(0, law_6.VOCABULARY, LENGTH).astype(np.int32),
            random.random(LENGTH) < share,
        )
        for share in (0.9, 0.2, 0.6, 0.4)
    ]


def learnt(name: str, parts: list[list[int]]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradient, and the loss with the figures, of a step in micro-batches of rows."""
    row, model = next(row for row in HEAD_ROWS if row.name == name), law_6.target().double()
    head = law_6.head_of(row, model).double().requires_grad_(True)
    settings = HeadLossConfig("cross_entropy", predict_n_tokens=4, **SAMPLED[name])
    step = HeadObjective(row.kind, head, law_6.states_of(row, model), settings)
    data, total = texts(), torch.zeros(1 + len(step.metric_names), dtype=torch.float64)
    for part in parts:
        loss, sums = step(collate(data, [[number] for number in part], LENGTH))
        loss.backward()
        total += torch.cat((loss.detach()[None], sums))
    gradient = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    assert sum(float(each.abs().sum()) for each in gradient.values()) > 1
    return gradient, total


def check_micro_batches_do_not_matter(name: str) -> None:
    expected, figures = learnt(name, [[0, 1, 2, 3]])
    for parts in ([[0], [1], [2], [3]], [[0, 2], [1, 3]], [[1, 2, 3], [0]]):
        found, others = learnt(name, parts)
        torch.testing.assert_close(others, figures, rtol=1e-6, atol=1e-6)
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SAMPLED)
def test_micro_batches_of_other_sizes_give_the_same_gradient(name: str):
    check_micro_batches_do_not_matter(name)


def test_weights_by_the_counts_of_the_whole_batch_are_found(monkeypatch: pytest.MonkeyPatch):
    """Control: a batch's own share of sampled predictions weighs its rows by their neighbours."""

    def of_batch(*arguments: Any, **options: Any) -> Any:
        where = objective_positions(*arguments, **options)
        if where.scale_N is not None:
            where.scale_N = where.scale_N.mean().expand_as(where.scale_N)
        return where

    objective_positions = objective.positions
    monkeypatch.setattr(objective, "positions", of_batch)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_micro_batches_do_not_matter("dflash")
