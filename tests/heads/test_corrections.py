"""Heads with a correction: the target's output layer is neither copied nor given a gradient."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.block.kind import KIND as BLOCK
from heads.block.model import BlockHead
from heads.block.predictions import BlockPredictions
from scripts.bench.peak_memory import peak_bytes
from tests.heads import law_6
from tests.heads.test_block import text
from tests.support.block_heads import random_block
from training.config import StudentConfig
from training.data.packing import collate
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.heads.predicting import PredictingHead
from training.losses.chunked import SplitWeight, Weight, split_weight
from training.models.build import build_llama
from training.objectives import freeze

VOCABULARY, HIDDEN = 4096, 256
CORRECTIONS: dict[str, dict[str, Any]] = {
    "dspark": {"layout": "anchor_first", "correction": "markov", "rank": 4},
    "domino": {"layout": "anchor_first", "correction": "gru", "rank": 4, "gru_size": 4},
    "dflash2": {"correction": "selector", "rank": 4, "candidates": 5},
}


class JoinedPredictions(BlockPredictions):
    """Predictions with one joined output layer, whose whole gradient is computed."""

    def outputs(self, head: BlockHead, states: TargetStates) -> Sequence[Weight]:
        weight = split_weight(super().outputs(head, states)[0])
        joined = torch.cat((weight.frozen_VH, weight.trained_VE), 1)
        if self.candidates(head) is None:
            return [joined]
        frozen, trained = weight.split(joined)
        return [SplitWeight(frozen.detach(), trained)]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_step_holds_the_targets_output_layer_once(name: str):
    """Check that a step's peak is below half of the target's output layer.

    Control: the same step with a joined layer, whose loss and gradients are equal.
    """
    shape = StudentConfig(
        num_hidden_layers=2, hidden_size=HIDDEN, num_attention_heads=4, intermediate_size=24
    )
    model = freeze(build_llama(shape, torch.float32, vocab_size=VOCABULARY))
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "target_layers": 2}
    head = random_block(sizes, num_layers=1, block_size=4, **CORRECTIONS[name])
    head = head.float().requires_grad_(True)
    batch = collate([text(tokens=8)], [[0]], 8)

    def step(kind: PredictingHead) -> tuple[int, list[Tensor]]:
        head.zero_grad()
        states = TargetStates(model, taps=head.config.taps, final=False)
        loss = HeadLossConfig("cross_entropy", predict_n_tokens=3)
        objective = HeadObjective(kind, head, states, loss)
        totals: list[Tensor] = []

        def run() -> None:
            totals.append(objective(batch)[0])
            totals[0].backward()

        peak = peak_bytes(run)
        return peak, [*totals, *(each.grad for each in head.parameters() if each.grad is not None)]

    (ours, found), (joined, expected) = step(BLOCK), step(JoinedPredictions())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    size = VOCABULARY * HIDDEN * 4
    assert ours < size / 2
    assert joined > size, "the control"


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_step_builds_its_output_layer_once(name: str):
    """Check that a step gathers the rows of the draft vocabulary once."""
    read: list[int] = []

    class Counted(TargetStates):
        @property
        def lm_head(self) -> Tensor:
            read.append(1)
            return super().lm_head

    model = law_6.target()
    sizes = {"vocab_size": 61, "hidden_size": 16, "target_layers": 4, "draft_vocab_size": 50}
    head = random_block(sizes, num_layers=1, block_size=4, **CORRECTIONS[name]).float()
    head.token_ids_V = torch.arange(50)
    states = Counted(model, taps=head.config.taps, final=False)
    loss = HeadLossConfig("cross_entropy", predict_n_tokens=3)
    objective = HeadObjective(BLOCK, head, states, loss)
    read.clear()
    objective(collate([text(tokens=8)], [[0]], 8))
    assert len(read) == 1
