"""`recurrent_drafting.train` on a random target: its folders, losses, stores and later runs."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decoding.errors import UserError
from decoding.models.folder import hash_input
from recurrent_drafting.checkpoint import load_head
from recurrent_drafting.train import run
from tests.support.head_runs import configured, records
from tests.support.tiers import tiered
from training.models.build import load_causal_lm


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
    by_depth = ("sampled_acceptance", "argmax_match", "recall_top4", "recall_top8")
    assert {f"held_out_{name}/{k}" for name in by_depth for k in range(1, 6)} <= looks[0].keys()
    assert {"held_out_greedy_acceptance/1", "held_out_simulated_tau"} <= looks[0].keys()


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
    head, printed = load_head(tmp_path / "run" / "drafter"), capsys.readouterr()
    said = printed.out
    assert "step 2: held-out acceptance" in said + printed.err
    shortlist = head.config.draft_vocab_size == 300
    assert ("only this project loads it" in said) == shortlist
    assert ("MB on disk in" in said) == shortlist
    assert ("of the target's probability at" in said) == shortlist
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


def test_a_head_continues_on_its_target_and_with_a_note_on_another(
    finished: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert "on which its training continues" not in capsys.readouterr().out
    given = [f"head.path={finished / 'drafter'}", "loop.max_steps=1"]
    run(configured(other, tmp_path / "again", *given))
    assert "on which its training continues" in " ".join(capsys.readouterr().out.split())


def test_a_head_given_as_a_language_model_is_named_as_a_head(finished: Path, tmp_path: Path):
    head = finished / "drafter"
    with pytest.raises(
        UserError, match="is not a known language model.* a recurrent head. Draft with it as"
    ):
        run(configured(head, tmp_path / "run"))
    with pytest.raises(UserError, match="is not a known language model"):
        load_causal_lm(head, torch.float32)
    assert not (tmp_path / "run").exists()
