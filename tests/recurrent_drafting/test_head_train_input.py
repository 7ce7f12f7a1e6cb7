"""Data, prompts and settings that `recurrent_drafting.train` accepts, counts or refuses."""

import json
from pathlib import Path

import pytest

from decoding.errors import UserError
from recurrent_drafting.train import run
from tests.support.head_runs import ROOT, configured, records


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
