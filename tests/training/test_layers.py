"""Test that compiled layers compute what the others do, under the names that checkpoints have."""

from typing import Any

import numpy as np
import pytest
import torch

from training.config import StudentConfig
from training.data.packing import PackedBatch, Sample, best_fit, collate
from training.models.build import build_llama
from training.models.layers import compile_layers, decoder_layers
from training.objectives import Distillation, freeze


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    shape = StudentConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=48
    )
    return build_llama(shape, torch.float32, vocab_size=61)


def batch(lengths: list[int], seed: int) -> PackedBatch:
    random = np.random.default_rng(seed)
    samples = [
        Sample(random.integers(0, 61, length), np.ones(length, dtype=bool)) for length in lengths
    ]
    return collate(samples, best_fit(lengths, 32), 32)


def results(student: Any, teacher: Any, batches: list[PackedBatch]) -> list[torch.Tensor]:
    """Return the losses of the batches and the student's gradients."""
    objective = Distillation(student, teacher)
    losses = [objective(each)[0] for each in batches]
    return [*losses, *torch.autograd.grad(torch.stack(losses).sum(), [*student.parameters()])]


@pytest.mark.long
def test_compiled_layers_give_the_losses_and_gradients_of_the_others():
    """Check a student and a teacher on batches of two shapes; a scaled weight is the control."""
    student, teacher = model(0), freeze(model(1))
    batches = [batch([20, 9, 17], 0), batch([31, 12], 1)]
    plain, names = results(student, teacher, batches), list(student.state_dict())
    for each in (student, teacher):
        compile_layers(each, backend="aot_eager")
    assert list(student.state_dict()) == names
    near = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(results(student, teacher, batches), plain, **near)
    with torch.no_grad():
        decoder_layers(student)[0].mlp.down_proj.weight.mul_(1.001)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(results(student, teacher, batches), plain, **near)
