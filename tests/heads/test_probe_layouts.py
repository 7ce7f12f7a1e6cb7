"""Folders of trained heads in every layout: wrong layers and wrong slots are found in each."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.errors import UserError
from heads.export import export
from heads.registry import kind_in
from tests.heads.published import ROWS, config_of
from tests.heads.test_probe import trained
from training.data.packing import Sample
from training.heads.checkpoint import save_head
from training.heads.config_keys import get
from training.heads.probe import check_reading, probe
from training.heads.published import put

CPU = torch.device("cpu")
# Of four layers: both shifts of these taps are layers, too.
TWO, THREE = {"taps": (2, 3)}, {"taps": (1, 2, 3)}
PLAIN = {"fc_norm": False, "norm_output": False, **THREE}
# row, fields of its shape, and the layouts that hold it
FORMS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("eagle3", PLAIN, ["served", "specforge", "modelopt", "speculators"]),
    ("p_eagle", {"fc_norm": False, **THREE}, ["served", "specforge", "speculators"]),
    ("dflash", TWO, ["served", "speculators"]),
    ("jetspec", TWO, ["served"]),
    ("dflash2", TWO, ["served", "speculators"]),
    ("domino", TWO, ["served"]),
    ("dspark", {"temperatures": (), **TWO}, ["served", "speculators", "deepspec"]),
    ("medusa", {"num_layers": 1}, ["vllm", "original"]),
    ("eagle1", {}, ["served"]),
]
SHORT = {("dspark", "deepspec"), ("medusa", "original")}  # of the short suite


def cases(*, tapped: bool) -> list[Any]:
    """Return the rows and layouts of heads with or without taps; most run in the long suite."""
    return [
        pytest.param(
            name, layout,
            id=f"{name} {layout}",
            marks=[] if (name, layout) in SHORT else [pytest.mark.long],
        )
        for name, fields, layouts in FORMS
        for layout in layouts
        if ("taps" in fields) is tapped
    ]  # fmt: skip


@cache
def learned(name: str) -> tuple[Any, Any, Any, list[Sample]]:
    """Return a row's target, its trained head and the head's shape, and texts of the target."""
    (fields,) = [fields for known, fields, _ in FORMS if known == name]
    row = ROWS[name]
    row = replace(row, shape=lambda target: replace(ROWS[name].shape(target), **fields))
    model, head, _, samples = trained(row)
    return model, head, row.shape(model.config), samples


def written(tmp_path: Path, name: str, layout: str) -> Path:
    """Return the folder of a row's trained head in a layout."""
    _, head, shape, _ = learned(name)
    save_head(ROWS[name].kind.layout, shape, head, tmp_path / "ours")
    contract = ROWS[name].kind.contract
    assert contract is not None
    if layout == next(iter(contract.layouts)):
        return tmp_path / "ours"
    export(tmp_path / "ours", layout, tmp_path / layout)
    return tmp_path / layout


def check(folder: Path, name: str) -> None:
    """Probe the head of a folder as scripts/check_head.py does."""
    model, _, _, samples = learned(name)
    kind = kind_in(folder)
    shape, head = kind.read_shape(folder), kind.load(folder).eval()
    found = probe(kind, head, kind.taps(shape), model, samples, CPU, kind.longest_draft(shape))
    check_reading(found, "HEAD")


def shift_layers(folder: Path, by: int) -> None:
    """Shift the numbers of the layers under all keys of a folder's config.json."""
    values, contract = config_of(folder), kind_in(folder).contract
    assert contract is not None
    paths = [path for path in contract.layout_of(values).layers if get(values, path)]
    assert paths, "the layout has numbers of layers"
    for path in paths:
        put(values, path, [layer + by for layer in get(values, path)])
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(("name", "layout"), cases(tapped=True))
def test_layers_one_off_are_found_in_every_layout(name: str, layout: str, tmp_path: Path) -> None:
    folder = written(tmp_path, name, layout)
    check(folder, name)  # the control
    shift_layers(folder, 1)
    with pytest.raises(UserError, match="HEAD is read in the wrong layout.*one layer earlier"):
        check(folder, name)
    shift_layers(folder, -2)
    with pytest.raises(UserError, match="HEAD is read in the wrong layout.*one layer later"):
        check(folder, name)
    shift_layers(folder, 1)
    check(folder, name)


BLOCKS = [case for case in cases(tapped=True) if case.values[0] not in ("eagle3", "p_eagle")]


@pytest.mark.parametrize(("name", "layout"), BLOCKS)
def test_the_other_layout_of_blocks_is_found(name: str, layout: str, tmp_path: Path) -> None:
    """Change the layout of blocks, then the numbers of layers too: both are named together."""
    folder = written(tmp_path, name, layout)
    values = config_of(folder)
    anchor_first = values["sample_from_anchor"]
    options = values.get("dflash_config", values)
    # Domino's files have the same under a second key
    options |= {"shift_label": not anchor_first} if "shift_label" in options else {}
    values["sample_from_anchor"] = not anchor_first
    (folder / "config.json").write_text(json.dumps(values))
    right = "anchor_first" if anchor_first else "fill_in"
    words = f"HEAD is read in the wrong layout.*if its blocks have the layout {right}"
    with pytest.raises(UserError, match=f"{words}\\."):
        check(folder, name)
    shift_layers(folder, 1)
    with pytest.raises(UserError, match=f"{words} and its taps are read one layer earlier"):
        check(folder, name)


@pytest.mark.parametrize(("name", "layout"), cases(tapped=False))
def test_slots_in_another_order_are_found(name: str, layout: str, tmp_path: Path) -> None:
    """Check Medusa heads without the first one, and EAGLE-1's map of states before embeddings."""
    folder = written(tmp_path, name, layout)
    check(folder, name)  # the control
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    if name == "eagle1":
        state["fc.weight"] = torch.cat(state["fc.weight"].chunk(2, 1)[::-1], 1).contiguous()
        words = "no reading of its taps and slots explains"
    else:
        state = without_first_head(state)
        values = config_of(folder)
        values["num_heads" if layout == "vllm" else "medusa_num_heads"] -= 1
        (folder / "config.json").write_text(json.dumps(values))
        words = "HEAD is read in the wrong layout.*one place later"
    save_file(state, file)
    with pytest.raises(UserError, match=words):
        check(folder, name)


def without_first_head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of Medusa heads, each under the number of the head before it."""
    found = {}
    for name, tensor in state.items():
        parts = name.split(".")
        place = next(index for index, part in enumerate(parts) if part.isdigit())
        if int(parts[place]):
            parts[place] = str(int(parts[place]) - 1)
            found[".".join(parts)] = tensor
    return found


def test_every_layout_is_probed() -> None:
    contracts = {
        id(row.kind.contract): row.kind.contract
        for row in ROWS.values()
        if row.kind.contract is not None
    }
    probed: dict[int, set[str]] = {}
    for name, _, layouts in FORMS:
        probed.setdefault(id(ROWS[name].kind.contract), set()).update(layouts)
    for key, contract in contracts.items():
        assert probed[key] == contract.layouts.keys()
