"""Hidden states of the packed target in training equal those of the decoding target.

Shapes: C hidden size, N tokens of a document, R rows, T tokens.
"""

import pytest
import torch
from torch import Tensor

from decoding.models.native.model import NativeTarget
from tests.support import tiny_heads as tiny
from tests.support.model_families import FAMILIES, SIZES, family
from training.data.packing import PackedBatch
from training.models.attention import document_mask
from training.objectives import freeze

TAPS = tuple(range(SIZES["num_hidden_layers"] + 1))


def packed_states(model: torch.nn.Module, batch: PackedBatch) -> tuple[Tensor, ...]:
    """Return Hugging Face's hidden states of packed rows, each (R, T, C)."""
    bias = document_mask(batch.documents_RT, model.dtype)
    with torch.inference_mode():
        return model.model(
            batch.ids_RT,
            position_ids=batch.positions_RT,
            attention_bias=bias,
            use_cache=False,
            output_hidden_states=True,
        ).hidden_states


def relative_error(left: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest value of `right`."""
    return float((left - right).abs().max() / right.abs().max().clamp(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_of_a_packed_row_equals_decoding(name: str) -> None:
    model = freeze(family(name))
    native = NativeTarget.from_state(model.config.to_dict(), model.state_dict(), execution="eager")
    samples = tiny.samples()
    batch = tiny.packed(samples)
    states = packed_states(model, batch)
    assert len(states) == len(TAPS)
    compared = 0
    for number, row in enumerate(batch.rows):
        start = 0
        for index in row:
            ids_1N = torch.from_numpy(samples[index].ids).long()[None]
            stop = start + ids_1N.shape[1]
            with torch.inference_mode():
                native.open(1, ids_1N.shape[1])
                found = native.features(ids_1N, None, TAPS)[0].chunk(len(TAPS), -1)
            for tap in TAPS:
                assert relative_error(states[tap][number, start:stop], found[tap]) < 1e-5
                # the controls: one layer off, and one position off
                assert relative_error(states[tap - 1][number, start:stop], found[tap]) > 1e-2
                assert relative_error(states[tap][number, start : stop - 1], found[tap][1:]) > 1e-2
            compared, start = compared + 1, stop
    assert compared == len(samples)
