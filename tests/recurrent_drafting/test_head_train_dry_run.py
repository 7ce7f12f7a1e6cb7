"""Dry runs of `recurrent_drafting.train`, and the shell wrapper of the published recipe."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from recurrent_drafting.checkpoint import load_head, read_head_config
from recurrent_drafting.train import run
from tests.support.head_runs import ROOT, configured
from training.heads.dry_run import target_flops
from training.models.shapes import forward_flops


def test_stored_states_count_in_the_dry_runs_memory(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # 6,144 tokens, 60 % of them
    for more, expected in (
        (["states.memory_mb=3"], "3"),
        (["states.memory_mb=4000"], "1"),
    ):
        run(
            configured(
                tiny_target, tmp_path / expected, "dry_run=true", "states.cache=memory", *more
            )
        )
        printed = re.search(r"states, at most (\d+)", capsys.readouterr().out)
        assert printed is not None and int(printed[1]) <= int(expected)


def test_the_targets_operations_for_a_loss_are_counted(tiny_target: Path, tmp_path: Path):
    """Check the number of the target's operations under each kind of loss.

    Every loss needs the target's layers. Distribution losses also need the lm_head at supervised
    positions, and continuations need five complete forwards and an lm_head there.
    """
    target = AutoConfig.from_pretrained(tiny_target)
    flops = {
        name: target_flops(configured(tiny_target, tmp_path, f"loss.name={name}"), target)
        for name in ("cross_entropy", "lk", "continuations")
    }
    whole, lm_head = forward_flops(target), 2.0 * target.vocab_size * target.hidden_size
    assert flops["cross_entropy"] == whole - lm_head
    assert flops["lk"] == pytest.approx(whole - lm_head + 0.6 * lm_head)
    assert flops["continuations"] == pytest.approx(whole - lm_head + 0.6 * (5 * whole + lm_head))


def test_a_dry_run_writes_an_untrained_head_that_loads(
    finished: Path, tiny_target: Path, tmp_path: Path
):
    run(configured(tiny_target, tmp_path, "dry_run=true"))
    shapes = [
        {
            name: tensor.shape
            for name, tensor in load_file(folder / "drafter" / "model.safetensors").items()
        }
        for folder in (tmp_path, finished)
    ]
    assert shapes[0] == shapes[1]
    assert not any(parameter.any() for parameter in load_head(tmp_path / "drafter").parameters())
    assert not (tmp_path / "checkpoints").exists()
    run(configured(tiny_target, tmp_path, "loop.max_steps=1"))  # the real run replaces it
    assert any(parameter.any() for parameter in load_head(tmp_path / "drafter").parameters())


def test_a_dry_run_prints_the_size_of_states_on_disk(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = ("dry_run=true", "states.cache=disk", "loop.max_steps=0", "loop.max_epochs=3")
    run(configured(tiny_target, tmp_path / "known", *given, "assumed_tokens=5000000000"))
    printed = re.search(
        r"states: about ([\d,.]+) GB on disk in runs/states", capsys.readouterr().out
    )
    assert printed is not None
    # one epoch, float32
    states = 5e9 * 0.6 * AutoConfig.from_pretrained(tiny_target).hidden_size * 4
    assert float(printed[1].replace(",", "")) * 1e9 == pytest.approx(states, rel=0.5)
    run(configured(tiny_target, tmp_path / "unknown", *given))
    assert "states: about" not in capsys.readouterr().out, "it depends on the data"


@pytest.mark.long
def test_the_published_recipe_prints_its_cost_without_weights_or_data(tmp_path: Path):
    """Check the output of a dry run by the shell wrapper, whose default is the published recipe.

    The target's weights and the data do not exist.
    """
    wrapper = ROOT / "recurrent_drafting" / "cmd" / "train.sh"
    given = [str(wrapper), "dry_run=true", f"output_dir={tmp_path}"]
    done = subprocess.run(
        given,
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "head: 429.9 M parameters (262.1 M output, 134.2 M blocks, 33.6 M recurrence), recurrent"
        in done.stdout
    )
    assert "target: 6738.4 M parameters, 32 layers, frozen" in done.stdout
    assert "memory of each of 8 ranks (ddp)" in done.stdout
    assert (
        "248,000,000 tokens in 947 steps" in done.stdout and "hours at 2400 TFLOP/s" in done.stdout
    )
    assert "does not exist" in done.stdout
    assert (
        "[3/3] eval.compare" in done.stdout
        and "would write comparison.jsonl, comparison.html" in done.stdout
    )
    folder = tmp_path / "recurrent_drafting.train" / "drafter"
    assert read_head_config(folder).hidden_size == 4096
    stored = (folder / "model.safetensors").stat()
    assert 1.71e9 < stored.st_size < 1.73e9
    assert stored.st_blocks * 512 < 10**6, "zeros take no disk space"


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--help"], marks=pytest.mark.exhaustive),  # the test above runs its default
        ["+experiment=redrafter_quickstart", "--help"],
    ],
)
def test_the_wrapper_passes_every_argument(arguments: list[str]):
    wrapper = ROOT / "recurrent_drafting" / "cmd" / "train.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [str(wrapper), *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    named = "redrafter_quickstart" if len(arguments) > 1 else "redrafter_vicuna_7b"
    assert f"experiment={named}" in done.stdout
    assert "loss.predict_n_tokens=5" in done.stdout
