"""`recurrent_drafting.train` on a random target: its folder, resume, ranks, dry runs, bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from decoding.errors import UserError
from decoding.models.folder import hash_input
from jobs.job import CONF
from recurrent_drafting.checkpoint import load_head, read_head_config
from recurrent_drafting.config import HeadTrainConfig
from recurrent_drafting.train import run
from tests.support.configurations import configuration
from tests.support.forks import Fork, run_ranks
from tests.support.tiers import tiered
from training.heads.dry_run import target_flops
from training.models.build import load_causal_lm
from training.models.shapes import forward_flops

ROOT = CONF.parent
JOB = "recurrent_drafting.train"
SMALL = [
    "data.max_samples=40",
    "data.max_length=256",
    "held_out.max_prompts=4",
    "held_out.max_new_tokens=16",
    "loop.max_steps=6",
    "loop.tokens_per_step=1024",
    "loop.micro_batch_tokens=512",
    "loop.eval_every=3",
    "loop.checkpoint_every=2",
    "target.device=cpu",
]


def configured(target: Path, folder: Path, *overrides: str) -> HeadTrainConfig:
    given = [*SMALL, f"target.path={target}", f"output_dir={folder}", *overrides]
    return configuration(JOB, *given)


def command(target: Path, folder: Path, *overrides: str) -> list[str]:
    given = [*SMALL, f"target.path={target}", f"output_dir={folder}", "threads=1", *overrides]
    return [JOB, *given]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(configured(tiny_target, folder))
    return folder


def test_the_head_folder_is_complete_and_loads(finished: Path, tiny_target: Path):
    folder = finished / "drafter"
    head = load_head(folder)
    assert (head.config.hidden_size, head.config.vocab_size, head.config.exit_dim) == (32, 2048, 64)
    card = json.loads((folder / "drafter_card.json").read_text())
    assert card["parameters"] == head.num_parameters
    assert card["target_hash"] == hash_input(tiny_target)
    assert card["drafter_hash"] == hash_input(folder)
    assert card["loss"]["name"] == "forward_kl"
    assert card["acceptance"]["block_efficiency"] >= 1
    assert card["data"]["supervised_tokens_seen"] > 0
    readme = (folder / "README.md").read_text()
    assert (
        "python -m eval.run" in readme
        and "recurrent_drafting.cmd.generate" in readme
        and "published layout" in readme
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (tiny_target / name).read_bytes()


def test_the_run_folder_records_the_run(finished: Path):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["finished"] is True
    assert all(len(digest) == 64 for digest in manifest["inputs"].values())
    steps = [record for record in records(finished) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert {f"redrafter{i}_{what}" for i in range(5) for what in ("acceptance", "loss")} <= steps[
        0
    ].keys()
    assert steps[0]["loss"] == pytest.approx(sum(steps[0][f"redrafter{i}_loss"] for i in range(5)))
    looks = [record for record in records(finished) if "held_out_block_efficiency" in record]
    assert [record["step"] for record in looks] == [3, 6]
    assert {
        f"held_out_accuracy/redrafter{i}_top{k}" for i in range(5) for k in range(1, 6)
    } <= looks[0].keys()


def test_a_finished_run_is_skipped(
    finished: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
):
    before = (finished / "drafter" / "model.safetensors").stat().st_mtime_ns
    run(configured(tiny_target, finished))
    assert "finished before" in capsys.readouterr().out
    assert (finished / "drafter" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", tiered(["cross_entropy", "lk"], ["cross_entropy"]))
def test_training_lowers_the_loss_and_raises_accuracy(name: str, tiny_target: Path, tmp_path: Path):
    steps = [
        "loop.max_steps=20",
        "loop.eval_every=20",
        "loop.optimizer.lr=2e-2",
        f"loss.name={name}",
    ]
    run(configured(tiny_target, tmp_path, *steps, "states.cache=memory"))
    losses = [record["loss"] for record in records(tmp_path) if "loss" in record]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "head.rnn=false",
            "head.exit_dim=32",
            "head.warm_start=hidden",
            "head.zero_blocks=true",
            "loss.name=continuations",
        ],
        [
            "head.draft_vocab_size=300",
            "head.warm_start=both",
            "loss.name=lk_hybrid",
            "states.cache=disk",
            "loss.own_tokens=0.5",
        ],
    ],
)
def test_every_extension_trains_and_is_described(
    overrides: list[str], tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    brief = ("loop.max_steps=2", "loop.eval_every=2", f"states.folder={tmp_path / 'states'}")
    run(configured(tiny_target, tmp_path / "run", *overrides, *brief))
    head, said = load_head(tmp_path / "run" / "drafter"), capsys.readouterr().out
    shortlist = head.config.draft_vocab_size == 300
    assert ("only this project loads it" in said) == shortlist
    assert ("MB on disk in" in said) == shortlist
    card = json.loads((tmp_path / "run" / "drafter" / "drafter_card.json").read_text())
    assert bool(card["extensions"]) == shortlist


def test_a_store_that_is_filled_first_has_every_row_and_trains_the_same_head(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Check after one step; a store that fills while training, which lacks rows, is the control."""
    heads, unread = [], []
    for fill in ("true", "false"):
        folder, states = tmp_path / fill, tmp_path / f"states_{fill}"
        given = ("states.cache=disk", f"states.folder={states}", f"states.fill={fill}")
        run(configured(tiny_target, folder, *given, "loop.max_steps=1"))
        heads.append(load_file(folder / "drafter" / "model.safetensors"))
        (sums,) = states.glob("*/checksums.bin")
        unread.append(int((np.fromfile(sums, dtype=np.uint32) == 0).sum()))
        said = capsys.readouterr().out
        told = re.search(r"the target read [\d,]+ tokens in [\d.]+ s, before training", said)
        assert (told is not None) == (fill == "true")
    assert unread[0] == 0 < unread[1]
    assert all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())


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


def test_another_target_under_the_same_path_is_refused_on_resume(tiny_target: Path, tmp_path: Path):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    run(configured(target, tmp_path / "run", "loop.max_steps=1"))
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"finished": true', '"finished": false'))
    (target / "generation_config.json").write_text("{}")
    with pytest.raises(
        UserError, match="was started with another target: .* A head only works with its target"
    ):
        run(configured(target, tmp_path / "run", "loop.max_steps=1"))


def test_a_head_continues_only_from_a_folder_of_the_same_target(
    finished: Path, tiny_target: Path, tmp_path: Path
):
    run(
        configured(
            tiny_target, tmp_path / "on", f"head.path={finished / 'drafter'}", "loop.max_steps=1"
        )
    )
    first = records(tmp_path / "on")[0]["loss"]
    assert first < records(finished)[0]["loss"], "it starts where the other run ended"
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    (other / "generation_config.json").write_text("{}")
    with pytest.raises(UserError, match="expects a target with hash .* train the head again"):
        run(configured(other, tmp_path / "no", f"head.path={finished / 'drafter'}"))


def test_broken_sharegpt_records_are_counted_and_named(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    good = json.loads((ROOT / "assets" / "chats.json").read_text())[:40]
    bad = [{"id": "x"}, {"conversations": [{"from": "martian", "value": "hello"}]}]
    (tmp_path / "chats.json").write_text(json.dumps([*good[:20], *bad, *good[20:]]))
    chats = [f"data.chats=[{tmp_path / 'chats.json'}]", "loop.max_steps=1"]
    with pytest.raises(
        UserError, match=r"chats: 40 of 42 used; .*; more than 1\.0% are bad"
    ) as error:
        run(configured(tiny_target, tmp_path / "strict", *chats))
    assert "no turns (conversations or messages)" in str(
        error.value
    ) and "unknown role 'martian'" in str(error.value)
    assert "chats.json:1, record 21)" in str(error.value) and "chats.json:1, record 22)" in str(
        error.value
    )
    run(configured(tiny_target, tmp_path / "lenient", *chats, "data.max_bad=0.2"))
    assert (tmp_path / "lenient" / "drafter" / "model.safetensors").is_file()
    shown = capsys.readouterr()
    assert (
        "note: chats: 40 of 42 used; 1 skipped: no turns" in shown.err
        and "unknown role 'martian'" in shown.err
    )
    assert (
        "train chats: 40 of 42 used" in shown.out
        and "1 dropped: unknown role 'martian'" in shown.out
    )


def test_alpaca_evals_form_serves_as_evaluation_set(tiny_target: Path, tmp_path: Path):
    rows = [
        {"instruction": f"Say {i}", "output": f"The number {i} is a number.", "dataset": "d"}
        for i in range(12)
    ]
    path = tmp_path / "alpaca_eval.json"
    path.write_text(json.dumps(rows))
    given = [f"data.held_out_chats=[{path}]", f"held_out.prompts={path}", "loop.max_steps=1"]
    run(configured(tiny_target, tmp_path / "run", *given))
    assert "held_out_accuracy/redrafter0_top1" in records(tmp_path / "run")[-1]


def test_a_head_given_as_a_language_model_is_named_as_a_head(finished: Path, tmp_path: Path):
    head = finished / "drafter"
    with pytest.raises(
        UserError, match="is not a known language model.* a recurrent head. Draft with it as"
    ):
        run(configured(head, tmp_path / "run"))
    with pytest.raises(UserError, match="is not a known language model"):
        load_causal_lm(head, torch.float32)
    assert not (tmp_path / "run").exists()


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


def test_prompts_without_room_for_an_answer_are_counted(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    texts = ["Say one", "word " * 400, "Say two", "word " * 500]
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"instruction": text, "output": "x"} for text in texts]))
    run(configured(tiny_target, tmp_path / "run", f"held_out.prompts={path}", "loop.max_steps=1"))
    assert (
        f"held-out prompts: 2 of {path} left out, longer than 240 tokens" in capsys.readouterr().out
    )
    assert "held_out_block_efficiency" in records(tmp_path / "run")[-1], (
        "the two others are decoded"
    )


def test_zero_supervised_positions_are_an_error(tiny_target: Path, tmp_path: Path):
    short = [
        {"conversations": [{"from": "human", "value": "x " * 300}, {"from": "gpt", "value": "y"}]}
    ]
    (tmp_path / "chats.json").write_text(json.dumps(short * 3))
    with pytest.raises(
        UserError,
        match="the train split is empty: zero supervised tokens in 3 texts and chats of data",
    ):
        run(configured(tiny_target, tmp_path / "run", f"data.chats=[{tmp_path / 'chats.json'}]"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "loss.name=continuation",
            "loss.name is continuation, expected one of .*; the nearest is continuations",
        ),
        ("loss.predict_n_tokens=1", "loss.predict_n_tokens is 1, expected 2 or more"),
        ("loss.own_tokens=2", "loss.own_tokens is 2.0, expected a share from 0 to 1"),
        ("loss.temperature=0", "loss.temperature is 0.0, expected more than 0"),
        ("states.cache=tape", "states.cache is tape, expected one of none, memory, disk"),
        ("states.fill=true", "states.fill is True, expected false without states.cache=disk"),
        ("top_k=0", "top_k is 0, expected 1 to 2048"),
        ("head.warm_start=cold", "head.warm_start is cold"),
        ("data.max_length=4096", "data.max_length is 4096, but the context of .* is 512 tokens"),
    ],
)
def test_invalid_values_are_named(override: str, words: str, tiny_target: Path, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        run(configured(tiny_target, tmp_path, override))


def test_a_sharded_target_computes_no_continuations(tiny_target: Path, tmp_path: Path):
    shares = ["parallel=fsdp", "parallel.processes=2", "loss.name=continuations"]
    with pytest.raises(
        UserError,
        match="loss.name is continuations, expected one of .* with parallel.kind=fsdp",
    ):
        run(configured(tiny_target, tmp_path, *shares))


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
