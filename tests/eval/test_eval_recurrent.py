"""A recurrent head as a row, named by its folder or by `use: recurrent`."""

import json
import shutil

import pytest
import torch

from decoding.drafters.registry import head_of
from decoding.drafters.with_lookup import LookupFirst
from decoding.errors import UserError
from decoding.models.folder import hash_input
from decoding.models.native import linear
from decoding.models.native.linear import can_pack
from eval.compare import run as compare
from eval.report.text import drafter_label
from eval.run import run
from eval.statistics.schema import read_rows
from jobs.config import TargetConfig
from jobs.drafter_use import DrafterUse
from jobs.drafters import build, check_entries, describe, uses
from recurrent_drafting.checkpoint import save_head
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import HeadConfig, RecurrentHead
from tests.support import tiny_folders as tiny
from tests.support.simulated_comparisons import configured, evaluations_of
from tests.support.tiny_folders import config

BLOCKS, WIDTH = 2, 3


def write_head(folder, vocab_size=None, hidden_size=32):
    """Write an untrained head in the published layout, without tokenizer files, and return it."""
    torch.manual_seed(0)
    head = RecurrentHead(
        HeadConfig(vocab_size or len(tiny.tokenizer()), hidden_size, 2 * hidden_size, BLOCKS)
    )
    save_head(head, folder)
    return head


@pytest.fixture(scope="module")
def parameters(home):
    return write_head(home / "head").num_parameters


@pytest.fixture(scope="module")
def evaluated(home, parameters):
    """Evaluate a head and `shallow`, and return the run's folder.

    The head drafts with a fixed size or one from costs, and with top-k or sampled children.
    """
    head = str(home / "head")
    entries = [
        {"use": head, "by_cost": False},
        {
            "use": "recurrent",
            "folder": head,
            "beam_width": WIDTH,
            "by_cost": False,
            "children": "sampled",
            "name": "drawn",
        },
        {
            "use": "recurrent",
            "folder": head,
            "beam_width": WIDTH,
            "name": "by_cost",
            "dtype": "bfloat16",
        },
        str(home / "shallow"),
    ]
    return run(config(home, "recurrent", drafters=entries))


@pytest.mark.long
def test_rows_of_a_head_describe_it(evaluated, parameters):
    rows = [row for row in read_rows(evaluated / "results.jsonl") if row.part == "main"]
    ours = [row for row in rows if row.drafter in ("head", "drawn", "by_cost")]
    assert {(row.drafter, row.temperature) for row in ours} == {
        (name, temperature) for name in ("head", "drawn", "by_cost") for temperature in (0.0, 1.0)
    }
    for row in ours:
        assert (row.drafter_layers, row.drafter_parameters) == (BLOCKS, parameters)
        assert row.lossless == ("by rule" if row.temperature else "equal")
        assert row.t_draft_ms > 0
        assert row.tau >= 1
        assert row.stopping == "fixed"
        assert (row.drafter_dtype, row.dtype) == (
            "bfloat16" if row.drafter == "by_cost" else "float64",
            "float64",
        )
        assert (", bf16)" in drafter_label(row)) == (row.drafter == "by_cost")


def test_the_folder_of_a_head_decides_its_keys(home, parameters, tmp_path):
    """Check that a folder takes the keys of the drafter that it holds, and refuses others.

    A folder that a stage has yet to write takes the keys of all drafters.
    """
    for folder in (str(home / "head"), str(tmp_path / "not there yet")):
        check_entries([{"use": folder, "by_cost": True, "beam_width": 2}])
        with pytest.raises(
            UserError, match="has the key 'by_costs', which .*; the nearest is 'by_cost'"
        ):
            check_entries([{"use": folder, "by_costs": True}])
    with pytest.raises(UserError, match="has the key 'by_cost', which ChainDrafter does not take"):
        check_entries([{"use": str(home / "shallow"), "by_cost": True}])


def test_a_comparison_reads_rows_of_heads(home, evaluated, parameters):
    origin = evaluations_of(evaluated)[0].origins["head"]
    (row,) = [
        row
        for row in read_rows(evaluated / "results.jsonl")
        if row.drafter == "head" and row.part == "main"
    ][:1]
    assert origin.bytes_per_step(row) == parameters * 8, "a head has no embedding to leave out"
    assert evaluations_of(evaluated)[0].origins["by_cost"].bytes_per_step(row) == parameters * 2
    folder = compare(configured(home, "recurrent_compared", [evaluated]))
    assert {"head", "drawn", "by_cost", "shallow"} <= {
        json.loads(line)["drafter"]
        for line in (folder / "comparison.jsonl").read_text().splitlines()
    }


def test_a_folder_is_recognized_as_a_head(home, parameters):
    assert head_of(home / "head") == "recurrent"
    assert head_of(home / "shallow") == head_of(home / "prompts.jsonl") == ""
    target = TargetConfig(
        path=str(home / "target"), dtype="float64", device="cpu", execution="eager"
    )
    named = describe([str(home / "head")], target, control=False)
    asked = describe([{"use": "recurrent", "folder": str(home / "head")}], target, control=False)
    assert named == {"head": {**asked["recurrent"], "name": "head"}}
    assert named["head"]["dtype"] == "float64"
    assert named["head"]["execution"] == "eager"
    assert "backend" not in named["head"], "a head is not a language model"
    with pytest.raises(
        UserError,
        match="recurrent has the key 'width', which RecurrentDrafter does not take; the nearest",
    ):
        describe(
            [{"use": "recurrent", "folder": str(home / "head"), "width": 3}], target, control=False
        )
    (before,) = made(
        {"use": "recurrent", "folder": str(home / "head"), "beam_width": 3, "lookup": 3}, home
    ).values()
    assert isinstance(before, LookupFirst) and isinstance(before.drafter, RecurrentDrafter)
    assert (before.min_match, before.drafter.beam_width, before.num_parameters) == (
        3,
        3,
        parameters,
    )


@pytest.mark.parametrize("native", [True, False])
def test_a_head_takes_fewer_bits_than_a_target_in_float32(home, parameters, native, monkeypatch):
    monkeypatch.setattr(
        linear, "_cpuinfo", lambda: "flags : avx2 avx512_bf16" if native else "flags : avx2"
    )
    native = native and can_pack(torch.device("cpu"), torch.bfloat16)

    def dtype(target_dtype, **given):
        target = TargetConfig(path=str(home / "target"), dtype=target_dtype, device="cpu")
        entry = {"use": str(home / "head"), **given}
        return describe([entry], target, control=False)["head"]["dtype"]

    assert dtype("float32") == ("bfloat16" if native else "float32")
    assert [dtype(one) for one in ("bfloat16", "float16", "float64")] == [
        "bfloat16",
        "float16",
        "float64",
    ]
    assert dtype("float32", dtype="float16") == "float16", "the requested head"
    plain = describe(
        [str(home / "shallow")],
        TargetConfig(path=str(home / "target"), device="cpu"),
        control=False,
    )
    assert plain["shallow"]["dtype"] == "float32", (
        "a language model differs from its target in size alone"
    )


def made(entry, home):
    mappings = describe(
        [entry], TargetConfig(path=str(home / "target"), device="cpu"), control=False
    )
    return build(mappings, uses(mappings, DrafterUse()), home / "target")


def test_a_head_of_another_target_is_refused(home, parameters, tmp_path):
    write_head(tmp_path / "wide", hidden_size=48)
    with pytest.raises(UserError, match="hidden_size is 32 in the target and 48 in the head"):
        made(str(tmp_path / "wide"), home)
    write_head(tmp_path / "wordy", vocab_size=500)
    with pytest.raises(UserError, match=r"vocab_size is \d+ in the target and 500 in the head"):
        made(str(tmp_path / "wordy"), home)
    carded = tmp_path / "carded"
    shutil.copytree(home / "head", carded)
    card = carded / "drafter_card.json"
    card.write_text(json.dumps({"name": "mine", "target_hash": hash_input(home / "target")}))
    assert made(str(carded), home)["carded"].beam_width == 8
    card.write_text(json.dumps({"name": "mine", "target_hash": hash_input(home / "shallow")}))
    with pytest.raises(UserError, match="expects a target with hash .*, found .* Use the target"):
        made(str(carded), home)


def test_a_damaged_head_is_refused(home, parameters, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(home / "head", broken)
    values = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**values, "rnn": False}))
    with pytest.raises(
        UserError, match="config.json describes .*rnn=false.*: rnn_u.bias is unknown"
    ):
        made(str(broken), home)
    with pytest.raises(
        UserError, match="model_type is 'llama', expected 'recurrent_drafting_drafter'"
    ):
        made({"use": "recurrent", "folder": str(home / "shallow")}, home)
