"""Test `distill.regenerate`: its account, training on its output, dry runs and errors."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from decoding.errors import UserError
from distill.regenerate.writer import count_same_tokens
from jobs.amounts import collect_planned_seconds, hours
from tests.support.forks import succeed
from tests.support.regeneration import (
    CHATS,
    configured,
    metrics,
    regenerated,
    run,
    with_stops,
    write_chats,
)
from training.config import DataConfig
from training.data.chat import render_chat
from training.data.from_config import read_samples
from training.data.readers import read_chats

from .test_dialogues import answer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    folder = tmp_path_factory.mktemp("regenerate")
    with_stops(tiny_target, folder / "target")
    write_chats(folder / "chats.jsonl")
    return folder


# ------------------------------------------------------------------------------------- the artefact
def test_the_output_keeps_order_ids_and_requests_and_describes_answers(home: Path, tmp_path: Path):
    records = regenerated(home / "target", home / "chats.jsonl", tmp_path)
    assert [record["id"] for record in records] == [chat["id"] for chat in CHATS]
    for record, found in zip(records, CHATS, strict=True):
        asked = [text for role, text in found["conversations"] if role != "gpt"]
        assert [turn["value"] for turn in record["conversations"] if turn["from"] != "gpt"] == asked
        answers = [turn for turn in record["conversations"] if turn["from"] == "gpt"]
        assert all(
            0 < turn["tokens"] <= 16 and turn["finish"] in ("stop", "length") for turn in answers
        )
        assert not {turn["value"] for turn in answers} & {
            text for _, text in found["conversations"]
        }
    chats, counts = read_chats(tmp_path / "chats.json")
    assert (counts.read, counts.used) == (len(CHATS), len(CHATS))
    assert [chat.id for chat in chats] == [record["id"] for record in records]
    figures = metrics(tmp_path)
    every = [
        turn for record in records for turn in record["conversations"] if turn["from"] == "gpt"
    ]
    assert figures["answers"] == len(every)
    assert figures["answer_tokens"] == sum(turn["tokens"] for turn in every)
    assert figures["finish"]["length"] == sum(turn["finish"] == "length" for turn in every)
    assert figures["tokens_per_second"] > 0 and figures["block_efficiency"] == 1.0


def test_training_supervises_the_generated_answers(home: Path, tmp_path: Path):
    regenerated(home / "target", home / "chats.jsonl", tmp_path)
    data = DataConfig(chats=[str(tmp_path / "chats.json")], max_length=512)
    tokenizer = AutoTokenizer.from_pretrained(home / "target")
    samples = read_samples(tokenizer, data, "train")
    assert len(samples) == len(CHATS)
    records = json.loads((tmp_path / "chats.json").read_text())
    for sample, record in zip(samples, records, strict=True):
        text = tokenizer.decode(sample.ids[sample.mask].tolist(), skip_special_tokens=True)
        answers = [turn["value"] for turn in record["conversations"] if turn["from"] == "gpt"]
        assert "".join(text.split()) == "".join("".join(answers).split())


def test_answers_retokenized_into_the_generated_tokens_are_counted(embedded_target: Path):
    tokenizer = AutoTokenizer.from_pretrained(embedded_target)
    messages = [
        {"role": "user", "content": "def f(x):"},
        {"role": "assistant", "content": "return x + 1"},
    ]
    rendered = render_chat(tokenizer, messages)
    generated = [token for token, mask in zip(rendered.ids, rendered.mask, strict=True) if mask]
    assert count_same_tokens(rendered, [answer(0, "return x + 1", generated)]) == 1
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "return"]
    assert count_same_tokens(rendered, [answer(0, "return x + 1", letters)]) == 0, (
        "equal text in other tokens"
    )
    assert count_same_tokens(rendered, []) == 0


def test_the_account_balances_for_every_kind_of_input(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    more = [
        {"id": "deaf", "conversations": [("gpt", "nobody asked")]},
        {"id": "huge", "conversations": [("human", "word " * 400), ("gpt", "x")]},
        {**CHATS[0], "id": "again"},
        {"id": "over", "conversations": [("human", "beyond the limit")]},
    ]
    file = write_chats(
        tmp_path / "chats.jsonl",
        CHATS + more,
        lines=("{broken", '{"id": "none", "conversations": []}'),
    )
    overrides = ("data.max_bad=0.5", "data.max_samples=9", "drop_duplicates=true", "samples=2")
    records = regenerated(home / "target", file, tmp_path / "run", *overrides)
    found = metrics(tmp_path / "run")
    assert (
        found["input"]
        == 2 * 12
        == found["success"] + sum(found["skipped"].values()) + sum(found["failed"].values())
    )
    assert found["success"] == len(records) == 2 * len(CHATS)
    assert found["skipped"] == {
        "broken record, not JSON": 2,
        "broken record, no turns (conversations or messages)": 2,
        "no human turn": 2,
        "no room in the context": 2,
        "duplicate of an earlier chat": 2,
        "over data.max_samples": 2,
    }
    shown = capsys.readouterr()
    output = shown.out
    assert "chats: 24 in, 12 answered, 12 skipped, 0 failed" in output
    assert f"2 skipped: no human turn ({file}:7" in output
    assert f"{file}:11" in shown.err, "the reader lists broken lines"


def test_a_chat_ends_where_the_context_is_full(home: Path, tmp_path: Path):
    records = regenerated(
        home / "target", home / "chats.jsonl", tmp_path, "data.max_length=48", "temperature=0"
    )
    (long,) = [record for record in records if record["id"] == "long"]
    assert long["ended"] == "no room in the context"
    assert 1 <= sum(turn["from"] == "gpt" for turn in long["conversations"]) < 4
    assert long["conversations"][-1]["from"] == "gpt"
    assert metrics(tmp_path)["ended_early"]["no room in the context"] >= 1


def test_looping_answers_are_counted_or_dropped(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Check that looping answers are counted, and that drop_loops=true drops their chats.

    The target repeats one token: its layers add nothing, and all tokens have the same embedding.
    """
    target = tmp_path / "target"
    shutil.copytree(home / "target", target)
    weights = load_file(target / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    weights["model.embed_tokens.weight"].fill_(1.0)
    weights["lm_head.weight"][500] = 10.0
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    regenerated(target, home / "chats.jsonl", tmp_path / "counted", "temperature=0")
    assert metrics(tmp_path / "counted")["loop_share"] == 1.0
    assert "note: many answers loop" in capsys.readouterr().out
    with pytest.raises(
        UserError,
        match=r"no usable chat is left.*\nchats: 6 in, 0 answered, 0 skipped, 6 "
        r"failed",
    ):
        run(
            configured(
                target, home / "chats.jsonl", tmp_path / "run", "temperature=0", "drop_loops=true"
            )
        )
    assert not (tmp_path / "run" / "chats.json").exists()


# ----------------------------------------------------------------------------------------- dry runs
def test_a_dry_run_counts_and_writes_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    run(
        configured(
            home / "target",
            home / "chats.jsonl",
            folder,
            "dry_run=true",
            "assumed_tokens_per_second=100",
        )
    )
    output = capsys.readouterr().out
    assert "would answer 11 requests of 6 chats (of 6, including samples)" in output
    assert f"at most {11 * 16:,} out" in output
    assert (
        f"at 100 tokens/s (as assumed): at most {hours(11 * 16 / 100)}" in output
        and " (1.8 s), written to" in output
    )
    run(configured(home / "target", home / "chats.jsonl", folder, "dry_run=true"))
    assert "tokens/s (measured on one batch)" in capsys.readouterr().out
    away = configured(
        home / "target", home / "chats.jsonl", folder, "dry_run=true", "target=llama2_7b"
    )
    away.target.path = "models/nowhere"
    run(away)
    assert "would answer 11 requests" in capsys.readouterr().out
    assert not folder.exists()


def test_a_dry_run_reports_its_seconds_to_the_experiment(home: Path, tmp_path: Path):
    pace = "assumed_tokens_per_second=100"
    folder = tmp_path / "run"
    with collect_planned_seconds() as file:
        run(configured(home / "target", home / "chats.jsonl", folder, "dry_run=true", pace))
        assert float(file.read_text()) == 11 * 16 / 100


# ---------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.chats=[]"], r"data.chats is \[\], expected ShareGPT files"),
        (["data.chats=[nowhere.json]"], r"nowhere.json does not exist"),
        (["data.texts=[x.txt]"], r"data.texts is .*x.txt.*plain text has no requests"),
        (["target.path=nowhere"], r"nowhere does not exist"),
        (["data.max_length=1024"], r"data.max_length is 1024, but the context of .* is 512 tokens"),
        (
            ["max_new_tokens=256"],
            r"max_new_tokens is 256, expected less than data.max_length \(256\)",
        ),
        (["max_new_tokens=0"], r"max_new_tokens is 0, expected a whole number from 1"),
        (["batch_size=0"], r"batch_size is 0, expected 1 or more"),
        (["samples=2", "temperature=0"], r"samples is 2, expected 1 at temperature 0"),
        (["on_length=stop"], r"on_length is stop, expected one of end, drop, go_on"),
        (["temperature=-1"], r"temperature is -1"),
        (["top_p=0"], r"top_p is 0"),
        (
            ["parallel=zero2", "parallel.processes=2"],
            r"parallel.kind is zero2, expected single or ddp",
        ),
        (
            ["drafters=[prompt_lookup,lookahead]"],
            r"drafters names 2 \(prompt_lookup, lookahead\), expected at most one",
        ),
        (["drafters=[nothing_such]"], r"neither a folder .* nor the name of a drafter"),
        (
            ["drafters=[{use: prompt_lookup, schedule: pearl_virtual}]"],
            r"schedule=pearl_virtual, expected serial",
        ),
        (
            ["drafters=[{use: prompt_lookup, verify: token, max_draft_tokens: 9}]"],
            r"has verify=token, max_draft_tokens=9, which only eval.run supports",
        ),
        (["data.template=nothing"], "data.template is nothing, expected one of auto"),
        (["max_new_tokens=255"], r"no usable chat is left.*no room in the context"),
    ],
)
def test_invalid_values_are_refused_and_claim_no_folder(
    overrides: list[str], message: str, home: Path, tmp_path: Path
):
    with pytest.raises(UserError, match=f"(?s){message}"):
        run(configured(home / "target", home / "chats.jsonl", tmp_path / "run", *overrides))
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_corrected_command_takes_the_folder(home: Path, tmp_path: Path):
    given = (home / "target", home / "chats.jsonl", tmp_path / "run", "data.max_samples=1")
    with pytest.raises(UserError, match="batch_size is 0"):
        run(configured(*given, "batch_size=0"))
    assert regenerated(*given)


def test_a_drafter_of_another_tokenizer_is_refused(home: Path, tmp_path: Path, chat24m: Path):
    with pytest.raises(UserError, match="their tokenizers differ"):
        run(
            configured(
                home / "target", home / "chats.jsonl", tmp_path / "run", f"drafters=[{chat24m}]"
            )
        )
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_file_of_broken_records_is_refused_with_their_places(home: Path, tmp_path: Path):
    file = write_chats(tmp_path / "chats.jsonl", CHATS[:1], lines=("{broken",))
    with pytest.raises(UserError, match=rf"1 skipped: not JSON \({file}:2\).*data.max_bad"):
        run(configured(home / "target", file, tmp_path / "run"))


# ------------------------------------------------------------------------------------------ a stage
def run_command(*arguments: str) -> str:
    return succeed("distill.train", *arguments)


@pytest.mark.long
def test_an_experiment_trains_on_regenerated_answers(home: Path, tmp_path: Path):
    toy = [
        f"target.path={home / 'target'}",
        "target.device=cpu",
        f"data.chats=[{home / 'chats.jsonl'}]",
        "data.max_length=320",
        "loop.max_steps=2",
        "loop.tokens_per_step=640",
        "loop.micro_batch_tokens=640",
        "loop.eval_every=0",
        "held_out.max_prompts=2",
        "held_out.max_new_tokens=8",
        "held_out.costs=none",
        "loss.cache_mb=0",
        "stages=[distill.regenerate,distill.train]",
        f"output_dir={tmp_path / 'run'}",
    ]
    output = run_command("+experiment=quickstart_regenerated", *toy, "dry_run=true")
    assert "would answer 11 requests" in output and "chats.json does not exist yet" in output
    shutil.rmtree(tmp_path / "run")
    run_command("+experiment=quickstart_regenerated", *toy)
    card = json.loads(
        (tmp_path / "run" / "distill.train" / "drafter" / "drafter_card.json").read_text()
    )
    assert card["data"]["sources"] == [str(tmp_path / "run" / "distill.regenerate" / "chats.json")]
