"""Experiments of several stages, run as a user runs them, at toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from distill.config import TrainConfig
from training.config import typed
from training.job import CONF, register

ROOT = CONF.parent


def ran(*arguments: str) -> str:
    """What `python -m distill.train` printed."""
    done = subprocess.run(
        [sys.executable, "-m", "distill.train", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ([], ["mode=importance", "largest_cut=0.625"]),
        (["prune_mode=l0"], ["mode=l0", "largest_cut=0.625"]),
        (["prune_mode=l0", "prune_largest_cut=0.95"], ["mode=l0", "largest_cut=0.95"]),
    ],
)
def test_one_override_chooses_how_a_recipe_prunes(given: list[str], passed: list[str]):
    register("distill.train", TrainConfig)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = typed(compose("distill_train", ["+experiment=llama_796m", *given]), TrainConfig)
    overrides = config.stage_overrides["distill.prune"]
    assert [text for text in overrides if text.startswith(("mode=", "largest_cut="))] == passed


@pytest.mark.long
def test_a_ladder_of_depths_ends_in_one_comparison(tiny_target: Path, tmp_path: Path):
    folder = tmp_path / "run"
    ran(
        "+experiment=depth_sweep",
        f"target.path={tiny_target}",
        "target.device=cpu",
        'ladder="1,3"',
        "data.chats=[embedded:chats]",
        "data.held_out_chats=[embedded:held_out_chats]",
        "data.max_length=128",
        "loop.max_steps=2",
        "loop.tokens_per_step=512",
        "loop.micro_batch_tokens=512",
        f"output_dir={folder}",
    )
    depths = {}
    for layers in (1, 3):
        card = json.loads(
            (folder / f"distilled/drafter.num_hidden_layers={layers}/drafter/drafter_card.json").read_text()
        )
        depths[card["name"]] = card["shape"]["num_hidden_layers"]
    assert depths == {"depth_1": 1, "depth_3": 3}
    rows = [json.loads(line) for line in (folder / "eval.compare" / "comparison.jsonl").read_text().splitlines()]
    assert {row["name"] for row in rows} >= {"depth_1", "depth_3"}
    assert (folder / "eval.compare" / "comparison.html").is_file()


@pytest.mark.parametrize(
    ("experiment", "millions", "pruning", "words"),
    [
        ("llama_1b3", "1333.7 M", [], "importance: scores"),
        ("llama_796m", "796.3 M", [], "stage 2 of 2: 12 -> 5 layers"),
        (
            "llama_543m",
            "543.3 M",
            ["prune_mode=l0", "prune_largest_cut=0.95"],
            "l0: weights and masks trained on 419,430,400",
        ),
        ("llama_290m", "290.3 M", ["prune_mode=random"], "random weights"),
    ],
)
@pytest.mark.long
def test_a_recipe_says_what_it_takes_without_weights_or_data(
    tmp_path: Path, experiment: str, millions: str, pruning: list[str], words: str
):
    said = ran(f"+experiment={experiment}", *pruning, "dry_run=true", f"output_dir={tmp_path}/run")
    assert said.count(f"student: {millions}") == 2, "of the cut, and of the distillation"
    assert words in said
    assert "target: 6738.4 M parameters" in said
    assert "hours at" in said and "is not there" in said
    config = json.loads((tmp_path / "run" / "distill.train" / "drafter" / "config.json").read_text())
    assert config["head_dim"] == 128
