"""Exported heads in the real speculators, which loads them and computes the same drafts."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.export import export
from tests.heads import law_6
from tests.heads.published import LLAMA3, change, config_of, saved
from training.data.packing import Sample, collate

pytestmark = pytest.mark.engines
PROGRAM = Path(__file__).parents[1] / "support/speculators_forward.py"
HEADS: dict[str, dict[str, Any]] = {  # rows, and other fields of their shapes
    "eagle3": {},
    "eagle3 with a draft vocabulary": {"taps": (1, 3)},
    "eagle3 with a normalized residual": LLAMA3,
    "eagle3 as first published": {"taps": (1, 3)},
    "p_eagle": {},
    "p_eagle with a draft vocabulary": {},
    "dflash": {},
    "dflash with a draft vocabulary": {},
    "dspark": {},
    "dspark with a draft vocabulary": {"layout": "anchor_first"},
    "dflash2": {},
}
CONTROLS = {  # another value of a key in the exported config.json, which must be seen
    "eagle3": {"norm_output": False},
    "p_eagle": {"mask_token_id": 3},
    "dspark": {"mask_token_id": 3},
}


class Computed:
    """The predictions of one head here, and the folder that speculators reads."""

    def __init__(self, name: str, folder: Path, changed: dict[str, Any]) -> None:
        row, ours = saved(folder / "ours", name, **HEADS[name])
        model = law_6.target()
        model.save_pretrained(folder / "target")
        (ours / "drafter_card.json").write_text(json.dumps({"target": str(folder / "target")}))
        self.folder = folder / "theirs"
        export(ours, "speculators", self.folder, folder / "target")
        assert changed.keys() <= config_of(self.folder).keys()
        change(self.folder, **changed)
        ids = np.random.default_rng(0).integers(0, law_6.VOCABULARY, 24).astype(np.int32)
        batch = collate([Sample(ids, np.arange(len(ids)) > 0)], [[0]], len(ids))
        head, states = row.kind.load(ours), law_6.states_of(row, model)
        self.predicted = law_6.predict(row.kind, head, states, batch)
        where, states_PC = self.predicted.where, self.predicted.states_PC
        states_TX = torch.zeros(len(ids), states_PC.shape[1]).index_copy(0, where.kept_P, states_PC)
        with torch.no_grad():
            features_NE = row.kind.features(head, states, batch, where, states_PC)
            self.chance_N = row.kind.chance_logits(head, features_NE)
        given = {"ids_T": torch.from_numpy(ids).long(), "states_TX": states_TX}
        save_file(given, self.folder / "inputs.safetensors")

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return what both computed, in pairs of equal order: chances too if the head has them."""
        found = load_file(self.folder / "found.safetensors")
        numbers = {place: number for number, place in enumerate(self.predicted.places)}
        places = zip(found["begins_N"].tolist(), found["depths_N"].tolist(), strict=True)
        shared = [(numbers[place], n) for n, place in enumerate(places) if place in numbers]
        mine, theirs = (torch.tensor(each) for each in zip(*shared, strict=True))
        pairs = [(self.predicted.q_NV[mine], found["q_NV"][theirs])]
        if self.chance_N is not None:
            pairs.append((self.chance_N[mine], found["chance_N"][theirs]))
        return pairs


@pytest.fixture(scope="module")
def computed(
    speculators_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, bool], Computed]:
    """Return all heads, and those of the controls (name, True), after one run of speculators."""
    folder = tmp_path_factory.mktemp("speculators")
    heads = {(name, False): Computed(name, folder / name, {}) for name in HEADS}
    for name, changed in CONTROLS.items():
        heads[name, True] = Computed(name, folder / f"control {name}", changed)
    command = [str(speculators_python), str(PROGRAM), *(str(one.folder) for one in heads.values())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return heads


@pytest.mark.parametrize("name", HEADS)
def test_speculators_computes_the_same_drafts(
    name: str, computed: dict[tuple[str, bool], Computed]
) -> None:
    for mine, theirs in computed[name, False].pairs():
        assert len(mine) > 40
        torch.testing.assert_close(mine, theirs, **law_6.CLOSE)


@pytest.mark.parametrize("name", CONTROLS)
def test_control_another_value_of_a_key_is_seen(
    name: str, computed: dict[tuple[str, bool], Computed]
) -> None:
    mine, theirs = computed[name, True].pairs()[0]
    assert (mine - theirs).abs().max() > 1e-2
