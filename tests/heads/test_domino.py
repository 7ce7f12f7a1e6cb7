"""Domino: the loss of the uncorrected logits, whose weight falls over the run."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

import heads.train
from decoding.errors import UserError
from heads.block.kind import KIND as BLOCK
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_block import text
from tests.heads.test_heads_train import configured
from training.bounds import Bounds, Place, RunTotals
from training.data.packing import collate
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective

STEPS = 8


@pytest.mark.parametrize("name", ["domino", "dspark with a draft vocabulary"])
@pytest.mark.parametrize(("step", "base"), [(0, 0.6), (2, 0.45), (STEPS, 0.0)])
def test_the_loss_moves_from_uncorrected_to_corrected_logits(name: str, step: int, base: float):
    """Compare loss and gradients in float64 with those of plain formulas, by autograd."""
    row = next(row for row in HEAD_ROWS if row.name == name)
    model = law_6.target().double()
    head = law_6.head_of(row, model).double().requires_grad_(True)
    states = TargetStates(model, taps=head.config.taps, final=False)
    loss = HeadLossConfig("cross_entropy", predict_n_tokens=4, decay=0.8, base_weight=0.6)
    objective = HeadObjective(BLOCK, head, states, loss)
    batch = collate([text(0), text(1)], [[0], [1]], 24)
    objective.begin(step, Place(RunTotals(step), Bounds(STEPS)), [[0], [1]])
    total, sums = objective(batch)
    total.backward()
    gradients = {name: each.grad for name, each in head.named_parameters()}

    head.zero_grad()
    where, states_PC = objective.read_target(batch)
    features_NE = BLOCK.features(head, states, batch, where, states.select_taps(states_PC))
    (weight,) = BLOCK.outputs(head, states)
    weight_VE = torch.cat((weight.frozen_VH, weight.trained_VE), 1)
    labels_N = where.labels_N
    if objective.indices_V is not None:
        labels_N = objective.indices_V[labels_N]

    def losses(count: int) -> torch.Tensor:
        logits_NV = linear(features_NE[:, :count], weight_VE[:, :count])
        return cross_entropy(logits_NV, labels_N, reduction="none", ignore_index=-1)

    weights_N = 0.8 ** where.head_N.double()
    corrected_N, first_N = losses(weight_VE.shape[1]), losses(model.config.hidden_size)
    assert not torch.allclose(first_N, corrected_N), "the correction must matter"
    expected = (weights_N * ((1 - base) * corrected_N + base * first_N)).sum()
    expected.backward()
    torch.testing.assert_close(total, expected, atol=1e-9, rtol=0)
    for part, parameter in head.named_parameters():
        torch.testing.assert_close(gradients[part], parameter.grad, atol=1e-9, rtol=0)
    torch.testing.assert_close(sums[4:].sum(), corrected_N.sum())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["head=domino", "loss.base_weight=1.5"], "base_weight is 1.5, expected a share from 0 to"),
        (["head=dflash", "loss.base_weight=1"], "base_weight is 1.0, expected 0 with this head"),
        (["head=dflash2", "loss.base_weight=1"], "base_weight is 1.0, expected 0 with this head"),
        (["head=medusa", "loss.base_weight=1"], "base_weight is 1.0, expected 0 with this head"),
    ],
    ids=str,
)
def test_invalid_weights_are_refused(given: list[str], words: str, tiny_target: Path):
    config = configured("heads.train", f"target.path={tiny_target}", *given)
    with pytest.raises(UserError, match=words):
        heads.train.run(config)
