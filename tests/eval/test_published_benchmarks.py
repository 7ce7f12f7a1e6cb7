"""Published benchmarks are measured whole: every prompt and turn of the real files."""

import json
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.errors import UserError
from eval.config import EvalConfig
from eval.measure.benchmarks import Benchmark, load_benchmark, select_prompts
from eval.measure.records import read_records
from eval.measure.setup import settings_of
from eval.run import run
from eval.statistics.schema import read_rows
from eval.tasks.answers import Number
from eval.tasks.forms import PUBLISHED, SEVERAL_FILES, Problem
from jobs.composing import compose_job
from jobs.config import typed
from jobs.paths import resolve
from tests.support import tiny_folders as tiny
from tests.support.tiers import tiered

# benchmark= -> its file, its published prompts, and their turns
WHOLE = {
    "mt_bench": ("mt_bench.jsonl", 80, 160),
    "spec_bench": ("spec_bench.jsonl", 480, 560),
    "gsm8k": ("gsm8k_test.jsonl", 1319, 1319),
    "gsm8k_8_shot": ("gsm8k_test.jsonl", 1319, 1319),
    "mgsm": ("mgsm.jsonl", 2750, 2750),
    "humaneval": ("raw/HumanEval.jsonl", 164, 164),
    # the test split, and parts of larger benchmarks
    "mbpp": ("mbpp_test.jsonl", 500, 500),
    "hellaswag": ("hellaswag_contexts.jsonl", 3000, 3000),
    "alpaca": ("alpaca_eval.jsonl", 617, 617),
}
ALL = ("max_prompts=0", "sweep=[]", "num_draft_tokens=[4]")
GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def configured(data: Path, name: str, *more: str) -> EvalConfig:
    """Return an evaluation of a named benchmark's real file, as the command line gives it."""
    given = [f"benchmark={name}", f"benchmark.path={data / 'eval' / WHOLE[name][0]}", *more]
    composed: Any = compose_job("eval.run", EvalConfig, given)
    return typed(composed, EvalConfig)


def kept(cfg: EvalConfig, tokenizer: Path) -> Benchmark:
    """Return the prompts of an evaluation, for a target with a long context."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    return load_benchmark(
        cfg.benchmark, words, max_length=100_000, max_new_tokens=128, limit=cfg.max_prompts
    )


@pytest.mark.parametrize("name", tiered(WHOLE, ["mt_bench", "spec_bench"]))
def test_every_published_prompt_is_kept(name: str, shared_data: Path, llama_tokenizer: Path):
    """Check the counts of prompts, turns and groups; the default limit keeps fewer."""
    more = [] if name == "hellaswag" else ["benchmark.chat_template=vicuna"]
    found = kept(configured(shared_data, name, *ALL, *more), llama_tokenizer)
    _, prompts, turns = WHOLE[name]
    assert len(found.prompts) == found.counts["kept"] == found.counts["read"] == prompts
    assert sum(len(prompt.turns) for prompt in found.prompts) == turns
    assert len({prompt.id for prompt in found.prompts}) == prompts
    form = configured(shared_data, name, *more).benchmark.format
    assert PUBLISHED[form] == prompts or form in SEVERAL_FILES
    groups = Counter(prompt.category for prompt in found.prompts)
    if name == "spec_bench":
        assert groups == dict.fromkeys(GROUPS, 80)
    if name == "mgsm":
        assert len(groups) == 11 and set(groups.values()) == {250}
    if name == "mt_bench":
        assert len(groups) == 8 and set(groups.values()) == {10}
    few = kept(configured(shared_data, name, *more), llama_tokenizer)
    assert len(few.prompts) == 64 < prompts, "control: the default limit"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny target and drafter of a long context."""
    home = tmp_path_factory.mktemp("wide")
    tiny.save(home / "target", layers=2, context=12_000)
    tiny.save(home / "shallow", layers=1, context=12_000)
    return home


def measured(cfg: EvalConfig, home: Path, folder: str) -> Path:
    """Measure greedily with a tiny target, two tokens a turn; return the run folder in `home`."""
    cfg.target.path, cfg.target.device = str(home / "target"), "cpu"
    cfg.drafters, cfg.output_dir = [str(home / "shallow")], str(home / folder)
    cfg.max_new_tokens, cfg.temperatures, cfg.bootstrap_resamples = 2, [0.0], 50
    cfg.prompt_lookup_control, cfg.threads, cfg.timing_repeats = False, 1, 1
    return run(cfg)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["mt_bench", pytest.param("humaneval", marks=pytest.mark.exhaustive)]
)
def test_a_row_counts_every_published_prompt(name: str, shared_data: Path, wide: Path):
    """Decode all prompts of the real file, both turns where there are two."""
    folder = measured(configured(shared_data, name, *ALL), wide, name)
    _, prompts, turns = WHOLE[name]
    [row] = read_rows(folder / "results.jsonl")
    assert row.prompts == prompts
    mine = [one for one in read_records(folder / "records.jsonl") if one.drafter == row.drafter]
    assert len({one.prompt_id for one in mine}) == prompts and len(mine) == turns
    assert "as published" not in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("humaneval", "159 of the 164 prompts that HumanEval has as published."),
        ("hellaswag", "9,998 of the 10,003 or more prompts that HellaSwag has as published."),
    ],
)
def test_a_part_of_a_published_benchmark_is_named_in_the_report(
    name: str, words: str, shared_data: Path, wide: Path
):
    part = ("max_prompts=5", "sweep=[]", "num_draft_tokens=[4]")
    folder = measured(configured(shared_data, name, *part), wide, f"part_{name}")
    page = (folder / "report.html").read_text()
    assert words in page

    assert "records.jsonl (all generations), rounds.jsonl (every round), parts.jsonl" in page
    assert "answers.jsonl" not in page, "control: no answer was checked"
    assert "bad records skipped" not in page, "control: none was bad"


def test_a_page_names_bad_records_and_the_file_of_checked_answers(wide: Path, tmp_path: Path):
    path = tmp_path / "test.jsonl"
    lines = [json.dumps({"question": f"{n}?", "answer": f"#### {n}"}) for n in range(200)]
    path.write_text("\n".join(['{"question": "none?"}', *lines, "{"]))
    other = tmp_path / "train.jsonl"
    others = [json.dumps({"question": f"{n}, then?", "answer": f"#### {n}"}) for n in range(150)]
    other.write_text("\n".join([*others, "[]"]))
    given = ["benchmark=gsm8k", f"benchmark.path={path}", "max_prompts=2", "sweep=[1]"]
    given += [f"benchmark.sweep_path={other}", "sweep_prompts=1", "num_draft_tokens=[2]"]
    solved = tmp_path / "solved.jsonl"
    solved.write_text(json.dumps({"question": "One?", "answer": "#### 1"}) + "\n")
    given += [f"benchmark.shots={solved}", "benchmark.num_shots=1"]
    composed: Any = compose_job("eval.run", EvalConfig, given)
    folder = measured(typed(composed, EvalConfig), wide, "bad")
    page = (folder / "report.html").read_text()
    assert "test.jsonl: 200 read, 2 bad records skipped, 0 other category" in page
    assert "2 kept, 1 bad sweep records skipped" in page
    counts = json.loads((folder / "manifest.json").read_text())["metrics"]["prompts"]
    assert (counts["bad_records_skipped"], counts["bad_sweep_records_skipped"]) == (2, 1)
    rows = read_rows(folder / "results.jsonl")
    assert {row.examples_hash for row in rows} == {sha256(b"One? #### 1\n\n").hexdigest()}
    assert "parts.jsonl (part times), answers.jsonl (each answer&#39;s check)" in page


def test_gsm8k_with_eight_shots_has_the_published_form(shared_data: Path, tmp_path: Path):
    """Read the real file after our examples and after a user's: frame, end and checked answers."""
    cfg = configured(shared_data, "gsm8k_8_shot", *ALL)
    found = select_prompts(cfg.benchmark)
    assert len(found) == PUBLISHED["gsm8k"]
    ours = [json.loads(line) for line in resolve(cfg.benchmark.shots).open()]
    assert len(ours) == 8 and not {one["question"] for one in ours} & {
        json.loads(line)["turns"][0] for line in resolve(cfg.benchmark.path).open()
    }
    before = "".join(f"Q: {one['question']}\nA: {one['answer']}\n\n" for one in ours)
    for prompt in found:
        [text] = prompt.turns
        assert text.startswith(before + "Q: ") and text.endswith("\nA:")
        assert text.count("\n\nQ: ") == 8, "no example contains the string that ends an answer"
        assert isinstance(prompt, Problem) and isinstance(prompt.check, Number)
        right = prompt.check.expected
        stated = f"That makes 5 + 1 = 6. The answer is {right:,}."
        assert prompt.check.accepts(f"{stated}\n\nQ: And two more?\nA: The answer is 0.5.")
        assert not prompt.check.accepts(stated.replace("is ", "is 9")), "control: another number"
        alone = replace(prompt.check, until="")
        assert not alone.accepts(f"{stated}\n\nQ: More?\nA: The answer is 0.5."), "control: no cut"
    assert settings_of(cfg, (), None).stop_strings == ("\n\nQ:",)
    chats = configured(shared_data, "gsm8k", *ALL)
    assert settings_of(chats, (), None).stop_strings == (), "control: no frame, no stop string"
    # a file of examples in the paper's form is read as it is
    theirs = [
        {"question": f"{n} and 1?", "answer": f"{n} + 1 = {n + 1}. The answer is {n + 1}."}
        for n in range(8)
    ]
    file = tmp_path / "theirs.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in theirs))
    cfg = configured(shared_data, "gsm8k_8_shot", *ALL, f"benchmark.shots={file}")
    first, *_ = select_prompts(cfg.benchmark)
    assert first.turns[0].startswith("Q: 0 and 1?\nA: 0 + 1 = 1. The answer is 1.\n\nQ: 1 and 1?")
    file.write_text(file.read_text().replace("The answer is", "Perhaps"))
    with pytest.raises(UserError, match="no single number"):
        select_prompts(cfg.benchmark)
