"""Batched answers to prompts: they are compared with plain decoding, counted and saved."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from decoding.errors import UserError
from decoding.loop import decode
from jobs.config import TargetConfig
from jobs.interrupts import Interrupted
from recurrent_drafting.checkpoint import save_head
from recurrent_drafting.cmd.flags import to_overrides
from recurrent_drafting.generate import JOB, run
from recurrent_drafting.head import HeadConfig, RecurrentHead
from serving import prompts as prompt_run
from serving.config import GenerateConfig
from serving.mt_bench import load_mt_bench
from serving.prompt_report import compare_outputs, print_report
from serving.prompts import PromptRun, answer_prompts, load_prompts
from serving.setup import ChatModels, choose_template, load
from tests.support import tiny_heads as tiny
from tests.support.configurations import configuration
from training.data.chat import render_prompt

TURNS = {
    "a": ["Hello there", "And then?"],
    "b": ["One two three", "Four?"],
    "c": ["Short"],
    "d": ["More", "Most"],
    "e": ["x", "y"],
}


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Write the prompts of TURNS to a file and return its path."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": name, "category": "test", "turns": turns} for name, turns in TURNS.items()]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def config_of(
    target: Path, prompts: Path, drafter: str = "prompt_lookup", **fields: object
) -> GenerateConfig:
    """Return the settings of a greedy run over prompts, in float64."""
    values = {
        "temperature": 0.0,
        "max_new_tokens": 16,
        "by_cost": False,
        "stopping": "fixed",
        "batch_size": 2,
        **fields,
    }
    shared = TargetConfig(path=str(target), dtype="float64", device="cpu")
    return GenerateConfig(
        job="recurrent_drafting.generate",
        target=shared,
        drafter={"use": drafter},
        prompts=str(prompts),
        **values,  # type: ignore[arg-type]
    )


def load_and_answer(cfg: GenerateConfig) -> tuple[ChatModels, PromptRun]:
    """Load the models, answer the prompts, and return the models and the run."""
    loaded = load(cfg)
    return loaded, answer_prompts(loaded, cfg, load_prompts(cfg), Console(file=io.StringIO()))


@pytest.fixture
def published_head(tmp_path: Path) -> Path:
    """Save a head for LLaMA's vocabulary in the published layout, without a card."""
    torch.manual_seed(3)
    folder = tmp_path / "redrafter"
    save_head(
        RecurrentHead(
            HeadConfig(vocab_size=32000, hidden_size=32, exit_dim=64, num_draft_layers=1)
        ),
        folder,
    )
    return folder


@pytest.mark.long
def test_the_published_command_uses_vicunas_template(
    base_target: Path, published_head: Path, prompt_file: Path
):
    """Check that the published command uses Vicuna's template, the only one of the published code.

    The target's tokenizer, like Vicuna's, has no chat template.
    """
    flags = ["--hf_tokenizer", base_target, "--hf_llm", base_target, "--hf_drafter", published_head]
    flags += [
        "--eval_mt_bench",
        prompt_file,
        "--beam_width=2",
        "--beam_length=3",
        "--greedy_search",
        "--use_gpu=-1",
    ]
    flags += ["--max_num_prompts=1", "--max_generation_length=4", "turns=first"]
    loaded, done = load_and_answer(configuration(JOB, *to_overrides(list(map(str, flags)))))
    assert loaded.about.endswith("; chat template vicuna, the published heads'")
    asked = [{"role": "user", "content": TURNS["a"][0]}]
    expected = render_prompt(loaded.engine.tokenizer, asked, template="vicuna")
    assert [answer.prompt_tokens for answer in done.answers] == [len(expected)]


@pytest.mark.parametrize(
    ("name", "card", "given", "template"),
    [
        ("llama", {"data": {"template": "llama2"}}, "auto", "llama2"),
        ("llama", {"data": {"template": "llama2"}}, "mistral", "mistral"),
        ("vicuna-7b-v1.3", {"data": {"template": "auto"}}, "auto", "vicuna"),
        ("vicuna-7b-v1.3", None, "auto", "vicuna"),
        ("llama", {}, "auto", ""),
    ],
)
def test_a_template_is_inferred_from_the_heads_card_or_the_targets_name(
    base_target: Path,
    published_head: Path,
    tmp_path: Path,
    name: str,
    card: dict | None,
    given: str,
    template: str,
):
    """Check that template=auto takes the template of the head's card, or of the target's name.

    A named template is used as given; without any, the run is refused. card: the head's card, or
    None for a drafter that is not a head. template: the expected one, or "" for an error.
    """
    folder = tmp_path / name
    folder.symlink_to(base_target)
    if card is not None:
        (published_head / "drafter_card.json").write_text(json.dumps({"name": "head", **card}))
    drafter = "prompt_lookup" if card is None else str(published_head)
    cfg = config_of(folder, tmp_path, drafter, template=given)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template:
        assert choose_template(cfg, tokenizer, folder)[0] == template
        return
    with pytest.raises(
        UserError, match="has no chat template. Set template= to the one .* such as template=vicuna"
    ):
        choose_template(cfg, tokenizer, folder)


def test_control_a_template_of_the_tokenizers_own_is_taken(tiny_target: Path, tmp_path: Path):
    folder = tmp_path / "vicuna"
    folder.symlink_to(tiny_target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert choose_template(config_of(folder, tmp_path), tokenizer, folder) == ("auto", "")


def report_text(cfg: GenerateConfig, loaded: ChatModels, done: PromptRun) -> str:
    """Return the report of a run as it is printed."""
    stream = io.StringIO()
    print_report(cfg, loaded, done, Console(file=stream, width=200))
    return stream.getvalue()


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_every_turn_of_every_prompt_gets_the_targets_answer(
    batch_size: int, tiny_target: Path, prompt_file: Path
):
    cfg = config_of(tiny_target, prompt_file, drafter=str(tiny_target), batch_size=batch_size)
    loaded, done = load_and_answer(cfg)
    assert [
        (one.prompt.id, one.turn)
        for one in sorted(done.answers, key=lambda one: (one.prompt.id, one.turn))
    ] == [(name, turn + 1) for name, turns in TURNS.items() for turn in range(len(turns))]
    assert len({one.batch for one in done.answers}) == -(-5 // batch_size)
    assert all(
        one.plain is not None and one.plain.tokens == one.drafted.tokens for one in done.answers
    )
    assert any(one.drafted.block_efficiency > 3 for one in done.answers)
    first, second = (
        next(one for one in done.answers if (one.prompt.id, one.turn) == ("a", turn))
        for turn in (1, 2)
    )
    history = [("user", "Hello there"), ("assistant", first.text), ("user", "And then?")]
    ids = render_prompt(
        loaded.engine.tokenizer, [{"role": role, "content": text} for role, text in history]
    )
    assert second.prompt_tokens == len(ids)
    assert (
        decode(loaded.engine.target, None, [ids], loaded.settings)[0].tokens
        == second.drafted.tokens
    )
    text = report_text(cfg, loaded, done)
    last = 5 % batch_size or min(batch_size, 5)
    smaller = "" if last == batch_size else f" (the last one {last})"
    assert f"9 answers, batch {batch_size}{smaller} " in text
    assert "outputs: all 9 equal plain decoding's, token by token" in text
    assert "speedup" in text and "block efficiency (tau)" in text


def test_answers_are_written_to_a_file_with_their_counts(
    tiny_target: Path, prompt_file: Path, tmp_path: Path
):
    file = tmp_path / "out" / "answers.jsonl"
    cfg = config_of(tiny_target, prompt_file, output=str(file), turns="first", max_prompts=3)
    run(cfg)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["id"] for record in records] == ["a", "b", "c"]
    for record in records:
        assert (
            record["turn"] == 1
            and record["differs_at"] is None
            and record["finish"] in ("stop", "length")
        )
        assert 0 < len(record["tokens"]) <= 16 and record["tau"] >= 1 and record["speedup"] > 0


def test_an_interrupted_run_keeps_its_answers(
    tiny_target: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that a run stopped in its third batch keeps the answers of the first two.

    A new run may not write to the same file.
    """
    calls = iter(range(100))

    def stopped(*given: Any, **more: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return both(*given, **more)

    both = prompt_run._decode_both
    monkeypatch.setattr(prompt_run, "_decode_both", stopped)
    file = tmp_path / "answers.jsonl"
    cfg = config_of(tiny_target, prompt_file, output=str(file), turns="first")
    with pytest.raises(Interrupted, match=f"the answers so far are in {file}"):
        run(cfg)
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == [
        "a",
        "b",
        "c",
        "d",
    ]
    with pytest.raises(UserError, match=f"output={file} exists already. Use another file"):
        run(cfg)


def test_a_dry_run_prints_the_plan(
    tiny_target: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cfg = config_of(tiny_target, prompt_file, dry_run=True, drafter="prompt_lookup")
    run(cfg)
    output = capsys.readouterr().out
    assert (
        "would answer 5 prompts from" in output
        and "9 turns, each with up to 16 tokens (144 in all, each again" in output
    )
    assert (
        f"target {tiny_target}, drafter prompt_lookup; up to 4 drafted tokens a round, 10 beams"
        in output
    )
    with pytest.raises(UserError, match="no-such-folder"):
        run(replace(cfg, target=TargetConfig(path="no-such-folder")))
    with pytest.raises(UserError, match="'no-such-head' is neither a folder"):
        run(replace(cfg, drafter={"use": "no-such-head"}))
    save_head(tiny.head(dtype=torch.float32), tmp_path / "head")
    with pytest.raises(UserError, match="hidden_size is .* in the target and .* in the head"):
        run(replace(cfg, drafter={"use": str(tmp_path / "head")}))


def test_the_report_of_plain_decoding_and_of_sampling(tiny_target: Path, prompt_file: Path):
    cfg = config_of(tiny_target, prompt_file, drafter="none", max_prompts=2)
    loaded, done = load_and_answer(cfg)
    assert all(one.plain is None for one in done.answers)
    text = report_text(cfg, loaded, done)
    assert "not measured" in text and "outputs:" not in text
    cfg = config_of(tiny_target, prompt_file, temperature=1.0, max_prompts=2)
    assert "so they are not compared token by token" in report_text(cfg, *load_and_answer(cfg))
    cfg = config_of(tiny_target, prompt_file, temperature=1.0, verify="coupled", max_prompts=2)
    assert "all 4 equal plain decoding's" in report_text(cfg, *load_and_answer(cfg))


def test_control_an_output_that_differs_is_an_error_after_the_report(
    tiny_target: Path, prompt_file: Path
):
    cfg = config_of(tiny_target, prompt_file, max_prompts=1)
    loaded, done = load_and_answer(cfg)
    wrong = PromptRun([replace(one, differs_at=3, gap=0.5) for one in done.answers])
    with pytest.raises(
        UserError,
        match="the drafted output is not the target's: outputs: 0 of 2 equal .* token 4",
    ):
        report_text(cfg, loaded, wrong)
    tied = [replace(one, differs_at=3, gap=1e-6) for one in done.answers]
    words, broken = compare_outputs(loaded, tied)
    assert "which is rounding" in words and not broken


def test_prompts_that_are_too_long_are_counted_and_listed(tiny_target: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    turns = {"long": ["la " * 600], "fits": ["Hello"], "grows": ["Hello", "la " * 600]}
    file.write_text(
        "\n".join(json.dumps({"id": name, "turns": texts}) for name, texts in turns.items())
    )
    cfg = config_of(tiny_target, file)
    loaded, done = load_and_answer(cfg)
    assert [(one.prompt.id, one.turn) for one in done.answers] == [("fits", 1), ("grows", 1)]
    text = report_text(cfg, loaded, done)
    assert (
        "left out: 2 longer than the target's context of 512 tokens (long, turn 1; grows, turn 2)"
        in text
    )
    with pytest.raises(
        UserError,
        match=r"none of the 3 prompts was answered: .*over max_prompt_tokens=2 "
        r"\(--max_prompt_length\) \(fits, turn 1.*Shorten the",
    ):
        load_and_answer(replace(cfg, max_prompt_tokens=2))


def test_fastchats_questions_and_sharegpt_files_are_read(tiny_target: Path, tmp_path: Path):
    file = tmp_path / "question.jsonl"
    file.write_text(
        json.dumps({"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]})
    )
    (prompt,) = load_prompts(config_of(tiny_target, file))
    assert (prompt.id, prompt.turns) == ("81", ["Write.", "Again."])
    file.write_text(
        json.dumps(
            {
                "id": "s",
                "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
            }
        )
    )
    (prompt,) = load_prompts(config_of(tiny_target, file))
    assert prompt.turns == ["Hi"]
    file.write_text('{"turns": []}\n{"turns": [""]}')
    with pytest.raises(
        UserError, match="turns is not a list of strings .*a turn is empty"
    ) as error:
        load_prompts(config_of(tiny_target, file))
    assert "question.jsonl:2" in str(error.value)


def test_the_error_without_mt_bench_gives_ways_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError,
        match=r"neither in the cache of `datasets` .*--eval_mt_bench=FILE.jsonl\), or run",
    ):
        load_mt_bench()


@pytest.mark.long
def test_mt_bench_runs_on_a_trained_model(chat24m: Path, shared_data: Path):
    cfg = config_of(
        chat24m,
        shared_data / "eval" / "mt_bench.jsonl",
        max_prompts=3,
        batch_size=2,
        max_new_tokens=12,
    )
    loaded, done = load_and_answer(cfg)
    assert len(done.answers) == 6
    assert "all 6 equal plain decoding's" in report_text(cfg, loaded, done)
