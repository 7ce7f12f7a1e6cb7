"""Published folders whose config.json leaves out what no tensor shows: a block's layout."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from decoding.interfaces import Drafter
from heads.block.drafter import BlockDrafter
from heads.export import export
from scripts import check_head, export_head
from scripts.usage import run_script
from tests.heads import law_6
from tests.heads.published import ROWS, config_of, saved
from tests.support import tiny_folders
from training.data.packing import Sample
from training.heads.checkpoint import save_head
from training.models.build import load_causal_lm
from training.objectives import freeze


class Trained(NamedTuple):
    """A target with a tokenizer, and texts of it as the script writes them."""

    folder: Path
    model: Any
    samples: list[Sample]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tiny_folders.save(tmp_path_factory.mktemp("incomplete") / "target", layers=4)
    whole = check_head.write_texts(folder)
    samples = [Sample(one.ids[-law_6.ROW :], one.mask[-law_6.ROW :]) for one in whole]
    return Trained(folder, freeze(load_causal_lm(folder, torch.float32)), samples)


def write_head(target: Trained, out: Path, name: str, learns: bool = True, **fields: Any) -> Path:
    """Write the head of a row for a target in our layout; it has learned its texts, or nothing."""
    row = replace(ROWS[name], shape=lambda sizes: replace(ROWS[name].shape(sizes), **fields))
    head, shape = law_6.head_of(row, target.model), row.shape(target.model.config)
    if learns:
        law_6.learn(row, head, law_6.states_of(row, target.model), target.samples)
    save_head(row.kind.layout, shape, head, out)
    return out


def as_deepspec(folder: Path) -> Path:
    """Write a DSpark head as DeepSpec does: keys at the top level, none of the layout."""
    export(folder, "deepspec", folder.with_name("deepspec"))
    return without(folder.with_name("deepspec"), "sample_from_anchor")


def as_z_lab(folder: Path) -> Path:
    """Write a DFlash head as z-lab does, without the keys of others in `dflash_config`."""
    without(folder, "sample_from_anchor", "projector_type", "taps", "taps_convention")
    assert config_of(folder)["dflash_config"].keys() == {
        "mask_token_id",
        "target_layer_ids",
        "causal",
    }
    return folder


def without(folder: Path, *keys: str) -> Path:
    """Remove keys from a folder's config.json, inner ones too."""
    values = config_of(folder)
    for each in (values, values.get("dflash_config", {})):
        for key in keys:
            each.pop(key, None)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *arguments: Path | str) -> str:
    """Run a script, and return its error; "" for success."""
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    try:
        run_script(main)
    except SystemExit as stopped:
        return " ".join(str(stopped.code).split())
    return ""


FORMS = {
    "deepspec": ("dspark", {"temperatures": ()}, as_deepspec, "anchor_first"),
    "z-lab": ("dflash", {}, as_z_lab, "fill_in"),
}


@pytest.mark.parametrize("form", ["deepspec", pytest.param("z-lab", marks=pytest.mark.long)])
def test_the_layout_that_a_block_drafter_does_not_name_is_found(
    form: str,
    target: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, fields, publish, right = FORMS[form]
    wrong = "fill_in" if right == "anchor_first" else "anchor_first"
    folder = publish(write_head(target, tmp_path / "head", name, taps=(2, 3), **fields))
    assert run(monkeypatch, check_head.main, folder, target.folder) == ""
    printed = capsys.readouterr().out
    assert "does not name the layout of its blocks" in printed
    assert f"the layout of blocks that fits is {right}: give layout={right}" in printed
    found = run(monkeypatch, check_head.main, folder, target.folder, f"layout={wrong}")
    assert "read in the wrong layout: " in found and f"blocks have the layout {right}" in found


@pytest.mark.parametrize("form", FORMS)
def test_no_layout_fits_an_untrained_block_drafter(
    form: str, target: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fields, publish, _ = FORMS[form]
    folder = publish(write_head(target, tmp_path / "head", name, learns=False, **fields))
    found = run(monkeypatch, check_head.main, folder, target.folder)
    assert f"explains {folder}, read as fill_in and as anchor_first: its predictions" in found


@pytest.mark.parametrize("form", FORMS)
def test_a_block_drafter_without_a_layout_is_exported_with_it(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fields, publish, right = FORMS[form]
    _, ours = saved(tmp_path / "head", name, **fields)
    folder, out = publish(ours), tmp_path / "out"
    found = run(monkeypatch, export_head.main, folder, "served", out)
    assert "Set layout=fill_in for files of z-lab's" in found
    assert "check_head.py HEAD TARGET` finds the layout" in found
    assert not out.exists()
    assert run(monkeypatch, check_head.main, folder) == found
    assert run(monkeypatch, export_head.main, folder, "served", out, f"layout={right}") == ""
    assert config_of(out)["sample_from_anchor"] is (right == "anchor_first")
    assert run(monkeypatch, check_head.main, folder, f"layout={right}") == ""
    wrong = "fill_in" if right == "anchor_first" else "anchor_first"

    def drafted(drafter: Drafter) -> list[list[int]]:
        return [one.tokens for one in law_6.drafts(drafter, law_6.target())]

    before = drafted(BlockDrafter(folder, layout=right))
    assert drafted(BlockDrafter(out)) == before != drafted(BlockDrafter(folder, layout=wrong))


def test_a_layout_of_slots_is_refused_for_other_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = saved(tmp_path / "head", "medusa")
    found = run(monkeypatch, check_head.main, folder, "layout=fill_in")
    assert "layout=fill_in was given for a head of the kind medusa. Leave it out" in found
    assert run(monkeypatch, check_head.main, folder) == "", "the control"
