"""Test the job of parallel drafting: its mask token, its folder, its resume and its settings."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decoding import load
from decoding.drafters.parallel import ParallelChain
from decoding.errors import UserError
from decoding.models.text.mask_token import choose_mask_token
from distill.train import run
from tests.distill.test_train import command, configured
from tests.support.forks import Fork
from tests.support.tiny_folders import tokenizer

KEY = "parallel_drafting.mask_token"


# the mask token


def test_the_mask_token_is_one_that_no_text_has() -> None:
    words = tokenizer()
    size = len(words)
    assert choose_mask_token(KEY, None, words, size + 8, ()) == size
    assert choose_mask_token(KEY, 50, words, size, ()) == 50
    with pytest.raises(UserError, match="has no unused or reserved token"):
        choose_mask_token(KEY, None, words, size, ())
    words.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>", "<|reserved_1|>"]})
    assert choose_mask_token(KEY, None, words, size + 2, ()) == size + 1
    assert choose_mask_token(KEY, None, words, size + 2, (size + 1,)) == size


@pytest.mark.parametrize("asked", [-1, 1, 2, 3, 102])
def test_ids_with_a_role_are_refused(asked: int) -> None:
    with pytest.raises(UserError, match=rf"mask_token is {asked}, expected an id from 0 to 100"):
        choose_mask_token(KEY, asked, tokenizer(), 101, (3,))


# the job

SMALL = ("parallel_drafting.tokens=3", "threads=1")


@pytest.fixture(scope="module")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    run(configured(tiny_target, folder, *SMALL))
    return folder


def test_the_folder_drafts_in_parallel(finished: Path, tiny_target: Path) -> None:
    config = json.loads((finished / "drafter" / "config.json").read_text())
    assert (config["pard_token"], config["num_parallel_tokens"]) == (6, 3)
    assert config["architectures"] == ["LlamaForCausalLM"]
    card = json.loads((finished / "drafter" / "drafter_card.json").read_text())
    assert card["parallel_drafting"] == {"tokens": 3, "mask_token": 6}
    assert card["acceptance"]["selected_by"] == "block_efficiency"
    readme = (finished / "drafter" / "README.md").read_text()
    assert '"num_speculative_tokens": 3, "parallel_drafting": true' in readme
    assert "It drafts 3 tokens in one forward" in readme
    drafter: Any = load(tiny_target, finished / "drafter").drafter
    assert (type(drafter), drafter.tokens, drafter.mask_token) == (ParallelChain, 3, 6)
    records = [json.loads(line) for line in (finished / "metrics.jsonl").open()]
    assert {"acceptance", "depth1_acceptance", "depth2_acceptance"} <= records[0].keys()
    (held_out, *_) = [record for record in records if "held_out_block_efficiency" in record]
    assert 1 <= held_out["held_out_block_efficiency"] <= 4


@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_drafter(
    finished: Path, tiny_target: Path, tmp_path: Path
) -> None:
    process = Fork(*command(tiny_target, tmp_path, *SMALL))
    deadline = time.monotonic() + 120
    while (
        not list((tmp_path / "checkpoints").glob("step_*"))
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL, "the run ended before the kill"
    run(configured(tiny_target, tmp_path, *SMALL))
    ours, straight = (
        load_file(folder / "drafter" / "model.safetensors") for folder in (tmp_path, finished)
    )
    assert all(torch.equal(ours[name], straight[name]) for name in straight)


def test_an_export_has_the_mask_token(finished: Path, tiny_target: Path) -> None:
    (newest, *_) = sorted((finished / "checkpoints").glob("step_*"), reverse=True)
    folder = run(configured(tiny_target, finished, f"checkpoint={newest}"))
    assert json.loads((folder / "config.json").read_text())["pard_token"] == 6


def test_a_plain_training_removes_the_mask_token(
    finished: Path, tiny_target: Path, tmp_path: Path
) -> None:
    start = f"student.path={finished / 'drafter'}"
    run(configured(tiny_target, tmp_path, "student.init=folder", start, "loop.max_steps=1"))
    assert "pard_token" not in json.loads((tmp_path / "drafter" / "config.json").read_text())


def test_costs_are_those_of_one_forward(tiny_target: Path, tmp_path: Path) -> None:
    measured = ("held_out.costs=measured", "held_out.cost_seconds=1", "loop.max_steps=1")
    run(configured(tiny_target, tmp_path, *SMALL, *measured))
    facts = json.loads((tmp_path / "held_out_costs.json").read_text())["measured_for"]
    assert (facts["draft_tokens"], facts["drafter"]["parallel_tokens"]) == (3, 3)
    card = json.loads((tmp_path / "drafter" / "drafter_card.json").read_text())
    assert card["acceptance"]["selected_by"] == "predicted_speedup"


def test_a_dry_run_records_the_mask_token(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(configured(tiny_target, tmp_path, *SMALL, "dry_run=true"))
    assert "adds up to 1.2 mask tokens for each supervised token" in capsys.readouterr().out
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert (config["pard_token"], config["num_parallel_tokens"]) == (6, 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel_drafting.tokens=1"], "tokens is 1, expected 0 for drafts token by token, or 2"),
        (["parallel_drafting.tokens=256"], r"or 2 to 255 \(data.max_length - 1\)"),
        (
            ["parallel_drafting.tokens=3", "teacher.cache=sampled"],
            "tokens is 3, expected 0 with teacher.cache=sampled",
        ),
        (["parallel_drafting.retain=0"], "retain is 0.0, expected more than 0, at most 1"),
        (["parallel_drafting.retain_min=2"], "retain_min is 2.0, expected more than 0, at most 1"),
        ([*SMALL, "parallel_drafting.mask_token=2"], "mask_token is 2, expected an id from 0 to"),
        ([*SMALL, "parallel_drafting.mask_token=3000"], "mask_token is 3000, expected an id"),
        ([*SMALL, "parallel_drafting.mask_token=4"], "mask_token is 4, but sample 0 .* data has"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(
    overrides: list[str], words: str, tiny_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        run(configured(tiny_target, tmp_path, *overrides))
