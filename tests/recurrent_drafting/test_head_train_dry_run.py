"""Dry runs of `recurrent_drafting.train`, and the shell wrapper of the published recipe."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from heads.registry import kind_of
from jobs.config import TargetConfig
from recurrent_drafting.checkpoint import load_head, read_head_config
from recurrent_drafting.train import run
from tests.support.head_runs import ROOT, configured
from training.data.packing import PackedData, Sample
from training.features.stores import states_on_disk
from training.heads.dry_run import position_share, reading_flops, states_layout, target_flops
from training.heads.positions import count_kept
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


def number(pattern: str, printed: str) -> float:
    found = re.search(pattern, printed)
    assert found is not None, printed
    return float(found[1].replace(",", ""))


def test_a_dry_run_prints_the_price_of_each_store(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = AutoConfig.from_pretrained(tiny_target)
    given = ["dry_run=true", "states.cache=disk", "loop.max_steps=0", "loop.max_epochs=3"]
    given += ["states.memory_mb=120000000", "assumed_tflops=0.001", "parallel=single"]
    config = configured(tiny_target, tmp_path / "known", *given, "assumed_tokens=5000000000000")
    run(config)
    printed = capsys.readouterr().out
    states = 5e12 * 0.6 * target.hidden_size * 4  # one pass, float32
    once = 5e12 * reading_flops(config, target) / 1e9 / 3600  # hours
    assert number(r"\* disk: ([\d,.]+) GB in runs/states \(", printed) == pytest.approx(
        states / 1e9, rel=1e-3
    )
    assert number(r"memory: 120,000.0 GB of ([\d,.]+) GB in memory", printed) == pytest.approx(
        states / 1e9, rel=1e-3
    )
    left_out = 1 - 120e12 / states
    for name, passes in (("none", 3), ("memory", 1 + 2 * left_out), ("disk", 1)):
        hours = number(rf"  [* ] {name}: .*; the target reads ([\d,.]+) hours", printed)
        assert hours == pytest.approx(passes * once, rel=1e-3)
    assert "too little" in printed, "no disk has that"


def test_a_dry_run_without_a_number_of_tokens_prints_the_price_of_a_million(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = ("dry_run=true", "loop.max_steps=0", "loop.max_epochs=3")
    run(configured(tiny_target, tmp_path / "unknown", *given))
    printed = capsys.readouterr().out
    megabytes = 0.6 * AutoConfig.from_pretrained(tiny_target).hidden_size * 4
    assert number(r"states: ([\d.]+) MB for each million tokens", printed) == pytest.approx(
        megabytes, abs=0.6
    )
    run(configured(tiny_target, tmp_path / "one", "dry_run=true", "loop.max_steps=4"))
    assert "at most: less is stored where chats come twice" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["recurrent", "eagle3"])
def test_the_predicted_bytes_are_those_that_a_store_takes(
    name: str, tiny_target: Path, tmp_path: Path
):
    """Check documents whose supervised tokens are their last ones, of the assumed share."""
    kind = kind_of(name)
    config = kind.config(
        **{key: getattr(kind.config(), key) for key in ("head", "loss", "states")},
        job="heads.train",
        target=TargetConfig(str(tiny_target)),
    )
    target = AutoConfig.from_pretrained(tiny_target)
    layout = states_layout(config, kind, kind.shape(config, target), target)
    samples = [
        Sample(np.arange(length, dtype=np.int32), np.arange(length) >= length * 2 // 5)
        for length in (50, 100, 400)
    ]
    data = PackedData(samples, 512, 1, 0)

    def count(mask: np.ndarray) -> int:
        return count_kept(mask, layout.heads, layout.uses_teacher, layout.context)

    states_on_disk(tmp_path, "hash", data, layout, count, show=False)
    (file,) = tmp_path.glob("*/states.bin")
    share = position_share(config, layout)
    assert (share == 1) is (name == "eagle3")
    assert file.stat().st_size == pytest.approx(data.tokens * share * layout.bytes, rel=0.06)


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
