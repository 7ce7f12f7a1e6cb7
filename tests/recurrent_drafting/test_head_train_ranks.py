"""Killed runs of `recurrent_drafting.train` resume, and ranks train the head of one process."""

import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recurrent_drafting.train import run
from tests.support.forks import Fork, run_ranks
from tests.support.head_runs import command, configured, records


@pytest.mark.long
@pytest.mark.parametrize(
    ("cache", "loss"), [("none", "own_tokens=0.5"), ("disk", "name=continuations")]
)
def test_a_killed_run_resumes_equal_to_an_uninterrupted_one(
    cache: str, loss: str, tiny_target: Path, tmp_path: Path
):
    more = [f"states.cache={cache}", f"states.folder={tmp_path / 'states'}", f"loss.{loss}"]
    process = Fork(*command(tiny_target, tmp_path / "killed", *more))
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while (
        not list(checkpoints.glob("step_*"))
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL, "the run ended before the kill"
    assert not (tmp_path / "killed" / "drafter").exists()
    run(configured(tiny_target, tmp_path / "killed", *more, "threads=1"))
    run(configured(tiny_target, tmp_path / "straight", *more, "threads=1"))
    ours, straight = (
        load_file(tmp_path / one / "drafter" / "model.safetensors")
        for one in ("killed", "straight")
    )
    assert all(torch.equal(ours[name], straight[name]) for name in straight)


@pytest.mark.long
def test_ranks_train_the_same_head(finished: Path, tiny_target: Path, tmp_path: Path):
    same_in_ranks("ddp", finished, tiny_target, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    ["zero3", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("zero1", "zero2", "fsdp"))],
)
def test_ranks_of_every_kind_train_the_same_head(
    kind: str, finished: Path, tiny_target: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    if kind.startswith("zero"):
        request.getfixturevalue("deepspeed")
    same_in_ranks(kind, finished, tiny_target, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("fsdp", "forward_kl"),
        pytest.param("ddp", "continuations", marks=pytest.mark.exhaustive),
        pytest.param("zero3", "lk", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_distil_the_target_as_one_process_does(
    kind: str, loss: str, tiny_target: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    """Check that ranks train as one process does if the loss needs the target's outputs.

    Each rank computes the target's continuations or distributions at its own positions.
    """
    if kind.startswith("zero"):
        request.getfixturevalue("deepspeed")
    more = f"loss.name={loss}"
    run(configured(tiny_target, tmp_path / "alone", more))
    same_in_ranks(kind, tmp_path / "alone", tiny_target, tmp_path / "ranks", more)


@pytest.mark.long
def test_ranks_draft_on_policy_as_one_process_does(tiny_target: Path, tmp_path: Path):
    more = ["loss.name=forward_kl", "on_policy.share=0.5"]
    run(configured(tiny_target, tmp_path / "alone", *more))
    same_in_ranks("ddp", tmp_path / "alone", tiny_target, tmp_path / "ranks", *more)


def tokens_read(printed: str) -> int:
    """Return the tokens that the target read for the store, as a run printed them."""
    (found,) = re.findall(r"the target read ([\d,]+) tokens in", printed)
    return int(found.replace(",", ""))


@pytest.mark.long
def test_ranks_count_the_tokens_that_all_of_them_read(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Compare with one process; with rows that are stored already, it reads the others alone."""
    fill = ["states.cache=disk", "states.fill=true", "loop.max_steps=1"]
    run(configured(tiny_target, tmp_path / "alone", *fill, f"states.folder={tmp_path / 'one'}"))
    expected = tokens_read(capsys.readouterr().out)
    fill.append(f"states.folder={tmp_path / 'two'}")
    ranks = command(tiny_target, tmp_path / "ranks", *fill, "parallel=ddp", "parallel.processes=2")
    assert tokens_read(run_ranks(*ranks)) == expected
    (sums,) = (tmp_path / "two").glob("*/checksums.bin")
    unread = np.fromfile(sums, dtype=np.uint32)
    unread[::2] = 0
    unread.tofile(sums)
    run(configured(tiny_target, tmp_path / "rest", *fill))
    assert 0 < tokens_read(capsys.readouterr().out) < expected


def same_in_ranks(kind: str, alone: Path, target: Path, folder: Path, *more: str) -> None:
    run_ranks(*command(target, folder, f"parallel={kind}", "parallel.processes=2", *more))
    ours, theirs = (
        [record["loss"] for record in records(one) if "loss" in record] for one in (folder, alone)
    )
    assert ours == pytest.approx(theirs, rel=1e-5)
    weights, expected = (
        load_file(one / "drafter" / "model.safetensors") for one in (folder, alone)
    )
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-4, atol=1e-5)
