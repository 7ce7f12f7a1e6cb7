"""The target's states at chosen layers equal transformers', with and without a store."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.errors import UserError
from tests.support import tiny_heads as tiny
from tests.support.model_families import FAMILIES, family
from training.data.packing import PackedData, collate
from training.features.states import TargetStates, layers_read
from training.features.stores import MemoryStore, StoreLayout, states_on_disk
from training.features.taps import read_layers
from training.heads.positions import count_kept, positions
from training.models.attention import document_mask
from training.objectives import freeze, hidden_states

H, LAYERS = tiny.HIDDEN, 2


def batch_of(model: Any) -> tuple[Any, Any]:
    batch = tiny.packed(tiny.samples())
    return batch, positions(batch, tiny.HEADS, uses_teacher=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_are_numbered_as_transformers_numbers_them(name: str):
    model = freeze(family(name))
    last, (batch, _) = model.config.num_hidden_layers, batch_of(model)
    expected = model.model(
        batch.ids_RT,
        position_ids=batch.positions_RT,
        attention_bias=document_mask(batch.documents_RT, model.dtype),
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    layers = (last, 0, 1)
    found = read_layers(model, layers, lambda: hidden_states(model, batch))
    torch.testing.assert_close(found, torch.cat([expected[layer] for layer in layers], dim=-1))
    # the control: one layer off
    wrong = torch.cat([expected[layer] for layer in (last - 1, 1, 0)], dim=-1)
    assert not torch.allclose(found, wrong)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_head_reads_its_taps_and_the_teacher_the_last_state():
    model = tiny.target()
    batch, where = batch_of(model)
    states = TargetStates(model, taps=(1, 0))
    assert states.layers == (1, 0, LAYERS)
    read_PC, plain_PH = states(batch, where), TargetStates(model)(batch, where)
    assert torch.equal(states.select_final(read_PC), plain_PH)
    torch.testing.assert_close(
        states.select_taps(read_PC), TargetStates(model, taps=(1, 0), final=False)(batch, where)
    )
    embedded = states.embed(batch.ids_RT.flatten()[where.kept_P])
    torch.testing.assert_close(states.select_taps(read_PC)[:, H:], embedded)
    plain = TargetStates(model)
    assert plain.layers == (LAYERS,)
    assert torch.equal(plain.select_taps(plain_PH), plain_PH) and torch.equal(
        plain.select_final(plain_PH), plain_PH
    )


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_stores_keep_all_layers_and_are_keyed_by_layers(kind: str, tmp_path: Path):
    model, data = tiny.target(), PackedData(tiny.samples(), tiny.ROW, 2, 0)

    def store(taps: tuple[int, ...]) -> Any:
        channels = H * len(layers_read(taps, LAYERS, final=True))
        layout = StoreLayout(tiny.HEADS, True, channels, torch.float64, taps=taps)
        if kind == "memory":
            return MemoryStore(10**6)
        return states_on_disk(
            tmp_path, "hash", data, layout, lambda mask: count_kept(mask, tiny.HEADS, True), False
        )

    batch = collate(data.samples, data.rows, tiny.ROW)
    where = positions(batch, tiny.HEADS, uses_teacher=True)
    for taps in ((), (0, 1), (1, 0)):
        kept = TargetStates(model, store(taps), taps)
        for _ in range(2):
            torch.testing.assert_close(
                kept(batch, where), TargetStates(model, taps=taps)(batch, where)
            )
    if kind == "disk":
        assert len(list(tmp_path.iterdir())) == 3, "another order of taps is another layout"


@pytest.mark.parametrize("final", [True, False])
def test_continuations_do_not_depend_on_taps(final: bool):
    model = tiny.target()
    batch, where = batch_of(model)
    plain_PH, said_PK = TargetStates(model).continue_greedily(batch, where, 3)
    states = TargetStates(model, taps=(1,), final=final)
    read_PC, also_PK = states.continue_greedily(batch, where, 3)
    assert torch.equal(said_PK, also_PK)
    torch.testing.assert_close(read_PC, states(batch, where))
    if final:
        torch.testing.assert_close(states.select_final(read_PC), plain_PH)


def test_a_layer_outside_the_target_is_refused():
    with pytest.raises(UserError, match="reads layer 3 of the target, expected .* from 0, .* to 2"):
        TargetStates(tiny.target(), taps=(0, 3))
