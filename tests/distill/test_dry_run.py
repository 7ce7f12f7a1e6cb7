"""Test dry runs of pruning: printed costs equal counts by hand, and the written folder loads."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import decoding.models.folder
from distill.config import PruneConfig
from distill.dry_run import importance_flops
from distill.prune.job import run
from jobs.amounts import hours, operations, size
from tests.support.pruned_folders import configured
from training.config import DataConfig, LoopConfig
from training.models.shapes import forward_flops, parameter_counts

SEVEN = (
    "target=llama_7b",
    "target.path=/nowhere/llama",
    "target.dtype=bfloat16",
    "data.max_length=4096",
)
TARGET, STUDENT = 6_738_415_616, 796_290_560


def dry_output(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *overrides: str
) -> str:
    """Return the printed output of a dry run that prunes LLaMA-7B to five layers."""
    given = [
        *SEVEN,
        "student=llama_796m",
        "student.num_hidden_layers=5",
        *overrides,
        "dry_run=true",
    ]
    config = configured(tiny_target, tmp_path / "run", *given)
    run(config)
    return capsys.readouterr().out


def test_the_cost_of_importance_is_printed(tiny_target, tmp_path, capsys):
    output = dry_output(
        tiny_target, tmp_path, capsys, "importance.choice=even", "importance.sequences=1024"
    )
    assert "target: 6738.4 M parameters, 32 layers" in output
    assert "student: 796.3 M parameters" in output
    # no products with the embedding
    flops = 2 * (TARGET - 32000 * 4096 - 4096) * 1024 * 4096
    found = re.search(
        r"scores from 4,194,304 tokens, ([\d.]+ PFLOP), ([\d.]+) hours at 100 TFLOP/s", output
    )
    assert found is not None, output
    assert found[1] == operations(flops)
    assert float(found[2]) == pytest.approx(flops / 1e14 / 3600, abs=0.006)
    assert f"memory of one process: {size(2 * TARGET)} (target {size(2 * TARGET)})" in output
    assert f"disk: {size(2 * STUDENT)} for the student's folder (bfloat16)" in output
    assert "/nowhere/llama does not exist" in output and "its tokenizer is missing" in output
    readme = (tmp_path / "run" / "student" / "README.md").read_text()
    assert "**No tokenizer here**: `/nowhere/llama` had none" in readme


def test_the_number_of_candidates_is_printed(tiny_target, tmp_path, capsys):
    """Check that a dry run prints how many candidates are compared and how many are distilled.

    If `student.layers` is set, no candidates are compared.
    """
    output = dry_output(tiny_target, tmp_path, capsys, "importance.probe_steps=50")
    assert (
        "up to 6 candidates compared on held-out text and 4 of them distilled on 12,800 tokens each"
        in output
    )
    output = dry_output(
        tiny_target,
        tmp_path / "all",
        capsys,
        "importance.probe_steps=50",
        "importance.probe_candidates=9",
    )
    assert "up to 6 candidates compared on held-out text and 6 of them distilled" in output
    output = dry_output(tiny_target, tmp_path / "as_cut", capsys)
    assert "up to 6 candidates compared on held-out text," in output
    output = dry_output(tiny_target, tmp_path / "named", capsys, "student.layers=[0,1,2,3,30]")
    assert "candidates compared" not in output


def test_flops_of_importance_are_the_sum_of_its_parts():
    """Check the sum with no, four and all six candidates distilled."""
    target, shape = (AutoConfig.for_model("llama", num_hidden_layers=layers) for layers in (32, 5))
    config = PruneConfig(
        job="distill.prune", data=DataConfig(max_length=64), between=LoopConfig(tokens_per_step=128)
    )
    settings = config.importance
    student = forward_flops(shape) * 64 * settings.probe_sequences
    a_token = 6 * parameter_counts(shape)["all"] + forward_flops(target)

    def flops(**changed: Any) -> float:
        importance = dataclasses.replace(settings, **changed)
        return importance_flops(
            dataclasses.replace(config, importance=importance), target, target, shape
        )

    alone = flops(choice="greedy")
    target_reads = forward_flops(target) * 64 * settings.probe_sequences
    assert flops(probe_steps=0) == pytest.approx(alone + target_reads + 6 * student)
    for tried in (4, 6):
        distilled = tried * (settings.probe_steps * 128 * a_token + student)
        assert flops(probe_candidates=tried) == pytest.approx(
            alone + target_reads + 6 * student + distilled
        )


def test_a_sharded_target_needs_a_share_of_the_memory(tiny_target, tmp_path, capsys):
    output = dry_output(
        tiny_target,
        tmp_path,
        capsys,
        "importance.choice=even",
        "parallel=fsdp",
        "parallel.processes=8",
    )
    head = 2 * 32000 * 4096
    assert f"memory of each of 8 ranks (fsdp): {size(2 * TARGET / 8 + head * 7 / 8)}" in output
    output = dry_output(
        tiny_target, tmp_path / "unsaid", capsys, "importance.choice=even", "parallel=fsdp"
    )
    if not torch.cuda.is_available():
        assert (
            "memory of each of 8 ranks (fsdp; set parallel.processes for another number)" in output
        )


def test_a_later_stage_also_holds_the_previous_student(tiny_target, tmp_path, capsys):
    """Check that the memory of a later stage counts the target and the student to cut."""
    output = dry_output(tiny_target, tmp_path, capsys, "importance.choice=even", "depths=[12]")
    first, second = re.findall(r"memory of one process: [\d,.]+ GB \((.*)\)", output)[::2]
    assert "stage before" not in first
    layer = (STUDENT - 2 * 32000 * 2560 - 2560) // 5
    before = 12 * layer + 2 * 32000 * 2560 + 2560
    assert f"target {size(2 * TARGET)}, student of the stage before {size(2 * before)}" in second


@pytest.mark.long
def test_the_cost_of_mask_training_is_printed(tiny_target, tmp_path, capsys):
    """Check the cost of the published schedule: 6 FLOPs per weight and token, 0.419 B tokens.

    The target's forward passes are not included, because only evaluations need them. With frozen
    weights, no gradients or optimizer states are listed.
    """
    schedule = (
        "mode=l0",
        "loop.max_steps=3200",
        "loop.tokens_per_step=131072",
        "loop.dtype=bfloat16",
    )
    output = dry_output(tiny_target, tmp_path, capsys, *schedule)
    found = re.search(
        r"l0: weights and masks trained on 419,430,400 tokens in 3,200 steps, ([\d.]+ EFLOP)",
        output,
    )
    assert found is not None, output
    assert found[1] == operations(6 * TARGET * 419_430_400) == "17.0 EFLOP"
    memory = re.search(
        r"memory of one process: ([\d,.]+) GB \(target 13\.5 GB, weights 13\.5 GB, gradients "
        r"([\d.]+)",
        output,
    )
    assert memory is not None, output
    assert float(memory[1]) > 13.5 + 16 * TARGET / 1e9
    frozen = dry_output(
        tiny_target, tmp_path / "frozen", capsys, *schedule, "l0.train_weights=false"
    )
    assert "masks, the weights frozen, trained on" in frozen
    assert "gradients" not in frozen and "optimizer" not in frozen


def test_a_dry_run_writes_a_folder_that_loads(tiny_target: Path, tmp_path: Path):
    """Check that all weights of the folder are zero, and that it has the target's tokenizer."""
    config = configured(
        tiny_target, tmp_path / "run", "student.hidden_size=16", "data.texts=[]", "dry_run=true"
    )
    folder = run(config)
    student = AutoModelForCausalLM.from_pretrained(folder)
    assert (student.config.hidden_size, student.config.num_hidden_layers) == (16, 2)
    assert not any(parameter.any() for parameter in student.parameters())
    assert AutoTokenizer.from_pretrained(folder)("def f(x):")["input_ids"]
    readme = (folder / "README.md").read_text()
    assert "untrained: a dry run's weights of zero" in readme and "No tokenizer" not in readme
    assert student.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)


def test_a_dry_run_reads_no_weights(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that a dry run does not even hash weights, and that card and manifest record this."""

    def read(path: Path) -> str:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(decoding.models.folder, "sha256", read)
    folder = run(configured(tiny_target, tmp_path / "run", "dry_run=true"))
    card = json.loads((folder / "drafter_card.json").read_text())
    assert card["target_hash"] is card["drafter_hash"] is None
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert set(manifest["inputs"].values()) == {"not read (dry run)"}
    with pytest.raises(AssertionError, match="was read"):  # control: a real run reads them
        run(configured(tiny_target, tmp_path / "real"))


def test_sizes_operations_and_hours_are_rounded():
    assert [size(count) for count in (13.48e9, 96.4e6, 320_000)] == ["13.5 GB", "96 MB", "0.3 MB"]
    assert [operations(count) for count in (3.65e19, 1.5e17, 5.6e12, 4e10, 1.8e7)] == [
        "36.5 EFLOP",
        "150.0 PFLOP",
        "5.6 TFLOP",
        "40.0 GFLOP",
        "18.0 MFLOP",
    ]
    assert [hours(seconds) for seconds in (365_112, 1500, 87, 1.6)] == [
        "101.42 hours",
        "0.42 hours",
        "0.024 hours (87 s)",
        "0.00044 hours (1.6 s)",
    ]


def test_loading_a_large_16_bit_target_in_32_bits_is_noted(tiny_target, tmp_path, capsys):
    output = dry_output(tiny_target, tmp_path, capsys, "target.dtype=float32")
    assert (
        f"stored in float16 and loaded in float32, {size(4 * TARGET)}: target.dtype=bfloat16 takes "
        f"half" in output
    )
    assert "takes half" not in dry_output(tiny_target, tmp_path / "half", capsys), "control"
