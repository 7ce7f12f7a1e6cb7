"""Presets: YAML files that select a kind of head and its values, here and in folders of users."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import heads.train
from decoding.engine import generate, load
from decoding.errors import UserError
from heads.block.checkpoint import load_head
from heads.registry import KINDS, find_kind, kind_of
from heads.train import find_kind_name, schema_for
from jobs.composing import CONF, compose_job, keep_search_path
from jobs.config import typed
from jobs.job import check_arguments
from jobs.saved_config import upgrade_config
from jobs.stages import Stage, compose_stage
from tests.heads.test_heads_train import SMALL, configured
from training.heads.kind import HeadKind

NEW = """# @package _global_
kind: block
head: {name: mine, layout: anchor_first, in_block_mask: causal, correction: gru, rank: 8,
  gru_size: 6, num_layers: 1, conv_taps: 2, confidence: true}
loss: {predict_n_tokens: 3, drafts_per_row: 16}
"""
# begins with another preset
NARROW = """# @package _global_
defaults: [dspark, _self_]
head: {name: narrow, rank: 64}
"""


def folder_with(folder: Path, text: str, name: str = "mine") -> str:
    """Write a preset to a folder and return the override that lets Hydra search there."""
    (folder / "head").mkdir(parents=True, exist_ok=True)
    (folder / "head" / f"{name}.yaml").write_text(text)
    return f"hydra.searchpath=[file://{folder}]"


def composed(*overrides: str) -> Any:
    schema = schema_for(overrides)
    return typed(compose_job("heads.train", schema, overrides), schema)


def test_a_yaml_file_of_a_user_trains_and_drafts_losslessly(tiny_target: Path, tmp_path: Path):
    """Check a combination of switches that no preset has."""
    found = folder_with(tmp_path / "conf", NEW)
    given = [*SMALL, found, f"target.path={tiny_target}", f"output_dir={tmp_path / 'run'}"]
    folder = heads.train.run(composed("head=mine", *given))
    shape = load_head(folder).config
    assert (shape.correction, shape.layout, shape.num_drafts) == ("gru", "anchor_first", 3)
    assert shape.confidence and shape.causal and shape.conv_taps == 2
    drafter = {"use": str(folder), "by_cost": False}
    plain, drafted = (
        generate(load(tiny_target, choice), "def add(a, b):", max_new_tokens=24, stopping="fixed")
        for choice in (None, drafter)
    )
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 0


def test_a_preset_may_begin_with_another_one(tmp_path: Path):
    config = composed("head=mine", folder_with(tmp_path, NARROW), "target.path=x")
    assert (config.kind, config.head.name, config.head.rank) == ("block", "narrow", 64)
    assert config.head.correction == "markov" and config.loss.predict_n_tokens == 7
    text = "# @package _global_\ndefaults: [eagle1]\n"
    config = composed("head=mine", folder_with(tmp_path, text), "target.path=x")
    assert config.kind == "eagle1" and config.loss.state_weight == 1


def test_folders_of_the_search_path_come_after_conf(tmp_path: Path):
    """Check the order of Hydra, and each form of a folder's name."""
    other = folder_with(tmp_path, "kind: eagle3\n", "dflash")
    assert find_kind_name(["head=dflash", other]) == "block"
    folder_with(tmp_path, "kind: eagle3\n")
    for one in (f"[file://{tmp_path}]", f"[{tmp_path}]", f"[pkg://heads,'{tmp_path}']"):
        assert find_kind_name(["head=mine", f"hydra.searchpath={one}"]) == "eagle3"
    assert find_kind_name(["head=mine"]) == "recurrent", "control: the file is not found"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: blok\n", "mine.yaml: kind is blok, expected one of recurrent, medusa, .*block"),
        ("head: {name: mine}\n", "mine.yaml: kind is None, expected one of"),
        ("defaults: [mine, none_such]\n", "mine.yaml: kind is None, expected one of"),
        ("defaults: [/target: embedded]\n", "mine.yaml: kind is None, expected one of"),
    ],
)
def test_a_preset_without_a_known_kind_is_refused(text: str, words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        find_kind_name(["head=mine", folder_with(tmp_path, text)])


def test_a_broken_file_is_left_to_composing(tmp_path: Path):
    found = folder_with(tmp_path, "kind: [\n")
    assert find_kind_name(["head=mine", found]) == "recurrent"
    with pytest.raises(UserError, match="mine.yaml"):
        composed("head=mine", found)


def test_a_loss_of_the_command_line_or_of_an_experiment_replaces_that_of_a_preset():
    for given in (["loss=lk", "head=dspark"], ["head=dspark", "loss=lk"]):
        loss = composed(*given, "target.path=x").loss
        assert (loss.name, loss.decay) == ("lk", 0.7788) and not any(loss.parts.values())
    schema = schema_for([])
    made = compose_job("heads.train", schema, ["target.path=x", "output_dir=/run"])
    made.stage_overrides = {"heads.train:one": ["head=dspark"]}
    (member,) = compose_stage("heads.train:one", typed(made, schema), made).members
    loss = typed(member, schema_for(["head=dspark"])).loss
    assert (loss.name, loss.decay, loss.parts["tv"]) == ("forward_kl", 0.7788, 0)
    assert composed("head=dspark", "target.path=x").loss.parts["tv"] == 1.8, "control"


def stage_of_presets(names: str, searched: list[str]) -> Stage:
    """Compose a stage that trains presets, of an experiment with a search path."""
    given = ["target.path=x", "output_dir=/run", "loss.predict_n_tokens=2", "loop.max_steps=77"]
    made = compose_job("heads.train", schema_for(given), given)
    keep_search_path(made, searched)
    made.stage_overrides = {"heads.train:heads": ["-m", f"head={names}"]}
    return compose_stage("heads.train:heads", typed(made, schema_for(given)), made)


def test_a_stage_trains_presets_of_the_search_path(tmp_path: Path):
    """Check their values, those of the preset that one begins with, and the experiment's."""
    folder = tmp_path / "it's, [mine]"
    folder_with(folder, NEW)
    folder_with(folder, NARROW, "narrow")
    members = stage_of_presets("mine,narrow", [f"file://{folder}"]).members
    found = [(one.kind, one.head.name, one.loss.predict_n_tokens) for one in members]
    assert found == [("block", "mine", 3), ("block", "narrow", 7)]
    assert members[1].loss.decay == 0.7788
    assert {one.loop.max_steps for one in members} == {77}
    with pytest.raises(UserError, match="stage heads.train:heads: head=mine: there is no"):
        stage_of_presets("mine", [])


def test_an_experiment_of_the_search_path_may_choose_one_of_its_presets(tmp_path: Path):
    found = folder_with(tmp_path, NEW)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "ours.yaml").write_text(
        "# @package _global_\ndefaults: [{override /head: mine}]\njob: heads.train\n"
    )
    given = ["+experiment=ours", "target.path=x", found]
    check_arguments(given, "heads.train", schema_for(given))
    assert composed(*given).head.name == "mine"
    with pytest.raises(UserError, match="experiment 'ours' is unknown, expected one of .*smoke"):
        check_arguments(given[:1], "heads.train", schema_for(given[:1]))
    with pytest.raises(UserError, match="experiment 'none' is unknown, expected one of .*ours"):
        check_arguments(["+experiment=none", found], "heads.train", schema_for([found]))


def test_a_sweep_is_over_presets_of_one_kind():
    assert find_kind_name(["-m", "head=dflash,dspark,domino"]) == "block"
    with pytest.raises(
        UserError, match=r"several kinds of heads, medusa \(medusa\), dflash \(block"
    ):
        find_kind_name(["-m", "head=medusa,dflash"])


@pytest.mark.long
def test_a_command_passes_its_search_path_to_sweeps_and_stages(tiny_target: Path, tmp_path: Path):
    """Check a sweep over an experiment with a stage: three processes, one after another."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "ours.yaml").write_text(
        "# @package _global_\njob: heads.train\nstages: ['heads.train:one']\n"
        "stage_overrides: {'heads.train:one': [head=mine]}\n"
    )
    given = ["-m", "+experiment=ours", folder_with(tmp_path, NEW), "seed=5", "dry_run=true"]
    given += [*SMALL, f"target.path={tiny_target}", f"output_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "heads.train", *given]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (saved,) = tmp_path.glob("run/*/one/config.yaml")
    config = yaml.safe_load(saved.read_text())
    assert (config["seed"], config["head"]["name"]) == (5, "mine")
    card = json.loads((saved.parent / "drafter" / "drafter_card.json").read_text())
    assert card["name"] == "mine"


def test_block_presets_differ_in_their_files_alone():
    """Check the table of presets, and that a run that was saved by an older name continues."""
    blocks = [name for name in KINDS if find_kind(name) == "block"]
    assert {"dflash", "dspark", "domino", "dflash2", "jetspec", "specdiff"} <= {*blocks}
    files = {(CONF / "head" / f"{name}.yaml").read_text() for name in blocks}
    assert len(files) == len(blocks)
    config = configured("heads.train", "head=dflash", "target.path=x")
    saved: Any = OmegaConf.to_container(OmegaConf.structured(config))
    for name in blocks:
        assert upgrade_config(saved | {"kind": name}) == upgrade_config(saved)
        kind: HeadKind = kind_of(name)
        assert kind is kind_of("block") and kind.name == "block"
    other = {"job": "distill.train", "kind": "dflash"}
    assert upgrade_config(other)["kind"] == "dflash", "control"


PUBLISHED = {
    "medusa": {"head.num_layers": 1, "head.start": "lm_head", "loss.decay": 0.8, "top_k": 10},
    "eagle1": {
        "head.fc_norm": False,
        "head.norm_output": False,
        "loss.train_depths": 1,
        "loss.state_weight": 1.0,
        "loss.token_weight": 0.1,
        "loss.state_noise": 0.2,
    },
    "eagle3": {"loss.predict_n_tokens": 7, "loss.decay": 0.8, "head.fc_norm": True},
    "p_eagle": {"loss.depth_share": 0.7, "loss.least_depth_share": 0.2, "loss.decay": 1.0},
    "parallelspec": {"head.masks_by_depth": True, "loss.depth_share": 1.0},
    "dflash": {"head.num_taps": 5, "loss.depth_weights": "d_pace", "loss.d_pace_alpha": 0.5},
    "dspark": {
        "head.rank": 256,
        "head.confidence": True,
        "loss.decay": 0.7788,
        "loss.name": "mixture",
        "loss.parts.cross_entropy": 0.1,
        "loss.parts.tv": 1.8,
    },
    "domino": {
        "head.rank": 256,
        "head.gru_size": 1024,
        "loss.base_weight": 1.0,
        "head.layout": "anchor_first",
        "loss.depth_weights": "decay",
        "loss.decay": 0.7788,
    },
    "dflash2": {
        "loss.depth_weights": "decay",
        "loss.decay": 0.7788,
        "head.rank": 256,
        "head.candidates": 16,
        "head.conv_taps": 2,
        "head.conv_group": 16,
    },
    "jetspec": {"head.in_block_mask": "causal", "loss.name": "forward_kl", "loss.decay": 1.0},
    "specdiff": {"head.taps": [0], "head.in_block_mask": "bidirectional", "head.layout": "fill_in"},
    "sdsat": {"loss.predict_n_tokens": 6},  # five slots
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_published_values(name: str):
    config = OmegaConf.structured(configured("heads.train", f"head={name}", "target.path=x"))
    assert {key: OmegaConf.select(config, key) for key in PUBLISHED[name]} == PUBLISHED[name]
