"""The head's statistics for dry runs against closed forms and a real backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from recurrent_drafting.head import HeadConfig
from recurrent_drafting.kind import KIND
from tests.support import tiny_heads as tiny
from training.features.states import TargetStates
from training.heads.measure import measure
from training.heads.positions import positions


def flops(config: HeadConfig, heads: int) -> float:
    """Return the FLOPs of the forward pass over one draft.

    The first linear map of the hidden state runs once. The first linear map of the recurrent state,
    the blocks and the output layer run for every prediction.
    """
    H, E = config.hidden_size, config.exit_dim
    context = H * E if config.projects or config.num_draft_layers else 0
    blocks = config.num_draft_layers - (0 if config.projects or not config.num_draft_layers else 1)
    prediction = context + blocks * E * E + E * config.num_drafted
    recurrence = (2 * heads - 1) * H * H if config.rnn else 0
    return 2.0 * (context + heads * prediction + recurrence)


@pytest.mark.parametrize("form", tiny.FORMS)
def test_flops_equal_the_closed_form(form: str):
    config = tiny.head(form).config
    for heads in (2, 5):
        assert measure(KIND, config, heads, torch.float32).flops == flops(config, heads)
    assert measure(KIND, config, 2, torch.float32).flops != flops(config, 3)  # the control


def test_parameters_by_part_equal_the_published_ones():
    config = HeadConfig(32000, 4096, 8192, num_draft_layers=2)
    parts = measure(KIND, config, 5, torch.bfloat16).parts
    assert {name: round(count / 1e6, 1) for name, count in parts.items()} == {
        "output": 262.1,
        "blocks": 134.2,
        "recurrence": 33.6,
    }


@pytest.mark.parametrize("form", ["recurrent", "projected"])
def test_kept_bytes_are_of_the_size_of_a_real_backward_pass(form: str):
    """Check that autograd keeps over half of the estimated bytes per draft, and never more.

    It keeps less than estimated, because some drafts end before their last prediction. The weights
    are not counted.
    """
    head, states = tiny.head(form), TargetStates(tiny.target())
    batch = tiny.packed(tiny.samples())
    where = positions(batch, tiny.HEADS, uses_teacher=False)
    states_PC = states(batch, where)
    weights = {parameter.untyped_storage().data_ptr() for parameter in head.parameters()}
    kept: dict[int, Any] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        features_NE = KIND.features(head, states, batch, where, states_PC)
    found = sum(storage.nbytes() for storage in kept.values()) + 2 * features_NE.nbytes
    expected = measure(KIND, head.config, tiny.HEADS, torch.float64).kept
    # some drafts end before their last prediction
    assert 0.5 < found / (len(where.drafts_M) * expected) < 1.0
    # the control: without the features and their gradient the estimate is too low
    assert found - 2 * features_NE.nbytes < 0.9 * found
