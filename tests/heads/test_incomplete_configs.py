"""Published folders whose config.json lacks what no tensor shows: a layout, or the layers."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.interfaces import Drafter
from heads.block.drafter import BlockDrafter
from heads.eagle.drafter import EagleDrafter
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

LENGTH = 128  # at least that of the target's texts


class Trained(NamedTuple):
    """A target with a tokenizer, and texts of it as the script writes them."""

    folder: Path
    model: Any
    samples: list[Sample]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return law 6's target with more layers, and a tokenizer of characters."""
    folder, words = tmp_path_factory.mktemp("incomplete") / "target", tiny_folders.tokenizer()
    torch.manual_seed(1)
    sizes = law_6.target().config.to_dict() | {"vocab_size": len(words), "num_hidden_layers": 7}
    LlamaForCausalLM(LlamaConfig(**sizes | {"max_position_embeddings": 256})).save_pretrained(
        folder
    )
    words.save_pretrained(folder)
    samples = check_head.write_texts(folder)
    return Trained(folder, freeze(load_causal_lm(folder, torch.float32)), samples)


def write_head(target: Trained, out: Path, name: str, lessons: int = 3, **fields: Any) -> Path:
    """Write the head of a row in our layout, after lessons of 20 steps on the target's texts."""
    row = replace(ROWS[name], shape=lambda sizes: replace(ROWS[name].shape(sizes), **fields))
    head, shape = law_6.head_of(row, target.model), row.shape(target.model.config)
    for _ in range(lessons):
        law_6.learn(row, head, law_6.states_of(row, target.model), target.samples, length=LENGTH)
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


def drafted(drafter: Drafter, model: Any) -> list[list[int]]:
    """Return the drafts for law 6's prompts."""
    return [one.tokens for one in law_6.drafts(drafter, model)]


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
    ours = write_head(target, tmp_path / "head", name, 3 if fields else 8, taps=(2, 3), **fields)
    folder = publish(ours)
    assert run(monkeypatch, check_head.main, folder, target.folder) == ""
    printed = capsys.readouterr().out
    assert "does not name the layout of its blocks" in printed
    assert f"the layout of blocks that fits is {right}: give layout={right}" in printed
    found = run(monkeypatch, check_head.main, folder, target.folder, f"layout={wrong}")
    assert "read in the wrong layout: " in found and f"blocks have the layout {right}." in found


@pytest.mark.parametrize("form", FORMS)
def test_no_layout_fits_an_untrained_block_drafter(
    form: str, target: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fields, publish, _ = FORMS[form]
    folder = publish(write_head(target, tmp_path / "head", name, lessons=0, **fields))
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
    model = law_6.target()
    before = drafted(BlockDrafter(folder, layout=right), model)
    assert drafted(BlockDrafter(out), model) == before
    assert drafted(BlockDrafter(folder, layout=wrong), model) != before, "the control"


def test_a_layout_of_slots_is_refused_for_other_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = saved(tmp_path / "head", "medusa")
    found = run(monkeypatch, check_head.main, folder, "layout=fill_in")
    assert "layout=fill_in was given for a head of the kind medusa. Leave it out" in found
    assert run(monkeypatch, check_head.main, folder) == "", "the control"


# --------------------------------------------------------------------------------- EAGLE's layers

PUBLISHED: dict[str, Any] = {"fc_norm": False, "norm_output": False}
LAYERS = ("taps", "taps_convention", "eagle_aux_hidden_state_layer_ids", "eagle_config")


def test_layers_that_an_eagle_head_does_not_name_are_the_published_default(
    target: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check the way from a file of the original repository to our layout, and equal drafts."""
    folder, out = write_head(target, tmp_path / "head", "eagle3", **PUBLISHED), tmp_path / "out"
    named = config_of(folder)["taps"]
    without(folder, *LAYERS)
    found = run(monkeypatch, check_head.main, folder)
    assert "names no layers, and the published default depends on the target's number" in found
    assert run(monkeypatch, export_head.main, folder, "served", out) == found
    assert run(monkeypatch, check_head.main, folder, target.folder) == ""
    printed = capsys.readouterr().out
    assert f"the target's hidden states {', '.join(map(str, named))}" in printed
    assert "vLLM 0.32 finds no layers in " in printed
    assert run(monkeypatch, export_head.main, folder, "served", out, target.folder) == ""
    assert config_of(out)["taps"] == named == [2, 3, 4]
    before = drafted(EagleDrafter(folder, shape="chain"), target.model)
    assert drafted(EagleDrafter(out, shape="chain"), target.model) == before
    values = config_of(without(out, *LAYERS)) | {"taps": [3, 4, 5]}
    (out / "config.json").write_text(json.dumps(values))
    assert drafted(EagleDrafter(out, shape="chain"), target.model) != before, "the control"


@pytest.mark.long
def test_other_layers_than_the_default_that_an_eagle_head_does_not_name_are_found(
    target: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taps = {"taps": (1, 2, 3), **PUBLISHED}
    folder = without(write_head(target, tmp_path / "head", "eagle3", **taps), *LAYERS)
    found = run(monkeypatch, check_head.main, folder, target.folder)
    assert "is read in the wrong layout" in found and "taps are read one layer earlier" in found


def test_layers_on_the_card_of_an_eagle_head_are_those_of_its_training(
    target: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_head(target, tmp_path / "head", "eagle3", lessons=0, **PUBLISHED)
    without(folder, *LAYERS)
    (folder / "drafter_card.json").write_text(json.dumps({"shape": {"taps": [2, 3, 4]}}))
    assert run(monkeypatch, export_head.main, folder, "modelopt", tmp_path / "a") == ""
    layers = config_of(tmp_path / "a")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == [1, 2, 3]
    (folder / "drafter_card.json").write_text(json.dumps({"shape": {"taps": [1, 2, 3]}}))
    to_b = ("specforge", tmp_path / "b", target.folder)
    found = run(monkeypatch, export_head.main, folder, *to_b)
    assert "taps is [2, 3, 4], but the head was trained with [1, 2, 3]" in found
