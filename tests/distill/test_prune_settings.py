"""Settings of `distill.prune`: refused values and targets, warnings, and what is saved."""

from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from decoding.errors import UserError
from distill.prune.job import intermediate_depths, run
from tests.support.pruned_folders import NARROW, configured


def test_a_real_run_saves_no_published_configuration(tiny_target: Path, tmp_path: Path):
    """Check that the saved target.config is empty.

    Only a dry run without the target's folder uses it.
    """
    given = (*NARROW, "mode=random", "+target.config={model_type: llama, hidden_size: 4096}")
    run(configured(tiny_target, tmp_path / "run", *given))
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").target.config == {}


def test_no_stage_removes_more_than_the_largest_cut():
    assert intermediate_depths(32, 3, 0.625) == [12, 5]
    assert intermediate_depths(32, 5, 0.625) == [12]
    assert intermediate_depths(32, 1, 0.625) == [12, 5, 2]
    assert intermediate_depths(32, 1, 1.0) == intermediate_depths(32, 12, 0.625) == []
    for share in (0.3, 0.5, 0.9):
        depths = [80, *intermediate_depths(80, 2, share), 2]
        assert all(
            before > after >= min(before - 1, before * (1 - share))
            for before, after in pairwise(depths)
        )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["student.num_hidden_layers=5"],
            "num_hidden_layers is 5, expected at most the target's 4",
        ),
        (["student.hidden_size=64"], "hidden_size is 64, expected at most the target's 32"),
        (
            ["student.hidden_size=-16"],
            "hidden_size is -16, expected 0 for the target's 32, or 1 to 1,048,576",
        ),
        (["mode=random", "student.head_dim=5"], "head_dim is 5, expected an even number"),
        (
            ["student.num_attention_heads=4", "student.num_key_value_heads=1"],
            "is 4, expected at most the target's 2",
        ),
        (
            ["student.num_attention_heads=3", "student.num_key_value_heads=2"],
            r"num_attention_heads is 3, expected a multiple of num_key_value_heads \(2\)",
        ),
        (
            ["student.hidden_size=18"],
            r"hidden_size is 18, expected a multiple of the 4 query heads.*Use 16, for example",
        ),
        (["mode=magic"], "mode is magic, expected one of importance, l0, random"),
        (["importance.choice=best"], "importance.choice is best, expected one of probe"),
        (["importance.probe_candidates=0"], "importance.probe_candidates is 0, expected 1 or more"),
        (["l0.beta=half", "mode=l0"], "l0.beta is half, expected one of code, paper"),
        (
            ["mode=l0", "loop.max_steps=200"],
            "warmup_steps is 320, expected less than loop.max_steps=200",
        ),
        (
            ["mode=l0", "student.intermediate_size=2"],
            "95.8% of the units.*95.0% at most.*Use a wider shape",
        ),
        (
            ["depths=[2]"],
            r"depths is \[2\], expected decreasing numbers of layers between the target's 4 and "
            r"the student's 2",
        ),
        (["data.max_samples=2", "data.max_length=512"], "too little calibration text"),
        (
            ["data.max_length=99999"],
            r"data\.max_length is 99999, .*context of .* is \d+ tokens.*Lower data\.max_length",
        ),
        (["data=text"], r"the train split is empty: set data\.chats=\[CHATS"),
        (
            ["data.max_samples=2", "data.max_length=512", "mode=l0", "loop.max_steps=400"],
            "too little calibration text",
        ),
        (["data.mixing=loss"], "data.mixing is loss, but data.domains is empty"),
        (["masks=/nowhere/masks.safetensors"], "/nowhere/masks.safetensors does not exist"),
        (
            ["masks=/nowhere", "depths=[3]"],
            "expected no file together with depths, because a file holds one cut",
        ),
        (
            ["cache_mb=5", "parallel=fsdp", "parallel.processes=2"],
            "cache_mb is 5, expected 0 .*with zero3 and fsdp",
        ),
        (["student.layers=[0,9]"], "from 0 to 3"),
    ],
)
def test_invalid_values_are_refused(
    tiny_target: Path, tmp_path: Path, overrides: list[str], words: str
):
    with pytest.raises(UserError, match=words):
        run(configured(tiny_target, tmp_path / "run", *overrides))


def test_unsupported_targets_are_refused(tiny_target: Path, tmp_path: Path):
    """Check that a target of another family or with a sliding window is refused."""
    for kind, more, words in (
        ("gpt2", "", "family 'gpt2', expected one of llama, mistral, qwen2, qwen3"),
        (
            "mistral",
            ", sliding_window: 4096",
            "the target: mistral has a sliding attention window of 4096 tokens",
        ),
    ):
        given = (
            "target.path=/nowhere",
            f"+target.config={{model_type: {kind}{more}}}",
            "dry_run=true",
        )
        with pytest.raises(UserError, match=words):
            run(configured(tiny_target, tmp_path / "run", *given))


def test_unaligned_widths_are_printed_as_warnings(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run(configured(tiny_target, tmp_path / "run", "mode=random", "student.intermediate_size=40"))
    output = capsys.readouterr().out
    assert (
        "warning: student.intermediate_size is 40, not a multiple of 64: 64 is often as fast"
        in output
    )
