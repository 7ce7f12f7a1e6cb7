"""Published forms of benchmarks: the prompts and solutions read from them, and refusals."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from decoding.errors import UserError
from eval.config import BenchmarkConfig, EvalConfig
from eval.measure.benchmarks import select_prompts
from eval.tasks.answers import Number, Program
from eval.tasks.forms import FORMS, Problem, read_problems
from jobs.composing import CONF, compose_job

# records in the published forms, with texts of our own -> their turns and the category
PUBLISHED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "mt_bench": (
        {"question_id": 7, "category": "writing", "turns": ["Write a poem.", "Shorter."]},
        ["Write a poem.", "Shorter."],
        "writing",
    ),
    "spec_bench": (
        {"question_id": 9, "category": "roleplay", "turns": ["You are a cat.", "And now?"]},
        ["You are a cat.", "And now?"],
        "mt_bench",
    ),
    "speed_bench": (
        {"question_id": "a1", "category": "coding", "sub_category": "C", "turns": ["Sort it."]},
        ["Sort it."],
        "coding",
    ),
    "gsm8k": (
        {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
        ["Two and two?"],
        "gsm8k",
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/900",
            "prompt": "def one():\n",
            "entry_point": "one",
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
        },
        ["def one():\n"],
        "humaneval",
    ),
    "hellaswag": (
        {"ind": 3, "ctx": "A man sits. he", "source_id": "wikihow~5", "endings": ["a"], "label": 0},
        ["A man sits. he"],
        "wikihow",
    ),
    "alpaca": (
        {"instruction": "Add them.", "input": "1, 2", "output": "3"},
        ["Add them.\n\n1, 2"],
        "alpaca",
    ),
}


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_published_record_is_read(tmp_path: Path, form: str) -> None:
    record, turns, category = PUBLISHED[form]
    [prompt] = read_problems(form, write(tmp_path / "x.jsonl", record))
    assert (prompt.turns, prompt.category) == (turns, category)
    (tmp_path / "x.json").write_text(json.dumps([record]))
    assert read_problems(form, str(tmp_path / "x.json"))[0].turns == turns
    Dataset.from_list([record]).to_parquet(str(tmp_path / "x.parquet"))
    assert read_problems(form, str(tmp_path / "x.parquet"))[0].turns == turns


def test_mbpp_is_a_task_and_its_tests(tmp_path: Path) -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    full = {"task_id": 11, "text": "Write f.", "code": "...", "test_list": tests}
    clean = {"task_id": 11, "prompt": "Write f.", "test_imports": ["import math"]}
    for record in (full | {"test_setup_code": "import math"}, clean | {"test_list": tests}):
        [prompt] = read_problems("mbpp", write(tmp_path / "x.jsonl", record))
        assert prompt.id == "11"
        assert "Write f." in prompt.turns[0] and prompt.turns[0].count("assert f(") == 2
        assert isinstance(prompt, Problem) and isinstance(prompt.check, Program)
        assert prompt.check.tests.split("\n")[-3:] == ["import math", *tests]


def test_mgsm_is_read_by_language(tmp_path: Path) -> None:
    (tmp_path / "mgsm_de.tsv").write_text('Wie "viele"?\t1,234\n', encoding="utf-8")
    (tmp_path / "mgsm_bn.tsv").write_text("কত?\t18\nআর?\t-5\n", encoding="utf-8")
    found = read_problems("mgsm", str(tmp_path))
    assert [(one.id, one.category) for one in found] == [
        ("mgsm_bn/1", "mgsm_bn"),
        ("mgsm_bn/2", "mgsm_bn"),
        ("mgsm_de/1", "mgsm_de"),
    ]
    assert found[2].turns == ['Wie "viele"?']
    checks = [one.check for one in found if isinstance(one, Problem)]
    assert [one.expected for one in checks if isinstance(one, Number)] == [18, -5, 1234]
    table = [{"question": "How many?", "answer_number": 7, "equation_solution": "3+4"}]
    Dataset.from_list(table).to_parquet(str(tmp_path / "en.parquet"))
    [prompt] = read_problems("mgsm", str(tmp_path / "en.parquet"))
    assert isinstance(prompt, Problem) and prompt.check == Number(Decimal(7))


@pytest.mark.parametrize(
    ("form", "record", "reason"),
    [
        ("gsm8k", {"question": "How many?", "answer": "many"}, "no single number"),
        ("gsm8k", {"question": "How many?"}, 'no text in "answer"'),
        ("gsm8k", {"turns": ["How many?"]}, "not lists of strings"),
        ("mgsm", {"question": "How many?", "answer_number": "7 or 8"}, "no single number"),
        ("humaneval", {"prompt": "def f():", "test": "..."}, 'no text in "entry_point"'),
        ("mbpp", {"text": "Write f.", "test_list": "assert f()"}, "not a list of strings"),
        ("mbpp", {"text": "", "test_list": ["assert f()"]}, 'no text in "text"'),
        ("mt_bench", {"prompt": "Hello"}, 'no "turns"'),
        ("spec_bench", {"category": "poetry", "turns": ["x"]}, "known: writing"),
        (
            "speed_bench",
            {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"]},
            "prepare_data.py",
        ),
        ("hellaswag", {"ctx": " "}, 'no text in "ctx"'),
        ("alpaca", {"instruction": 3}, 'no text in "instruction"'),
    ],
)
def test_a_malformed_record_is_named_by_its_line(
    tmp_path: Path, form: str, record: dict[str, Any], reason: str
) -> None:
    good = {**PUBLISHED, "mgsm": ({"question": "q", "answer_number": 1}, [], "")}
    good["mbpp"] = ({"text": "Write f.", "test_list": ["assert f()"]}, [], "")
    path = write(tmp_path / "x.jsonl", good[form][0], record)
    with pytest.raises(UserError, match=rf"{reason}.*x.jsonl:2\).*[Ee]xpected") as caught:
        read_problems(form, path)
    assert FORMS[form][1] in str(caught.value)


def test_columns_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "mgsm_en.tsv"
    path.write_text("Question without a number\n")
    with pytest.raises(UserError, match=r"a tab and a number, found columns: 1 \(.*mgsm_en.tsv:1"):
        read_problems("mgsm", str(path))
    path.write_bytes(b"")
    with pytest.raises(UserError, match="the file is empty"):
        read_problems("mgsm", str(path))


def test_an_unknown_form_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="benchmark.format 'gsm9k' is unknown.*gsm8k"):
        read_problems("gsm9k", write(tmp_path / "x.jsonl", {"question": "q"}))


def test_worked_examples_precede_each_question(tmp_path: Path) -> None:
    """Check the text, that answers are cut at a further question, and that no example is asked."""
    train = [{"question": f"Train {n}?", "answer": f"#### {n}"} for n in range(9)]
    shots = write(tmp_path / "train.jsonl", *train)
    asked = write(tmp_path / "test.jsonl", {"question": "Asked?", "answer": "#### 3"})
    options: dict[str, Any] = {
        "path": asked,
        "format": "gsm8k",
        "shots": shots,
        "num_shots": 2,
        "template": "Q: {turn}\nA:",
    }
    [prompt] = select_prompts(BenchmarkConfig(**options))
    assert prompt.turns == ["Q: Train 0?\nA: #### 0\n\nQ: Train 1?\nA: #### 1\n\nQ: Asked?\nA:"]
    assert isinstance(prompt, Problem) and isinstance(prompt.check, Number)
    assert prompt.check.accepts("It is 3.\n\nQ: Next?\nA: 4")
    [alone] = select_prompts(BenchmarkConfig(path=asked, format="gsm8k"))
    assert isinstance(alone, Problem) and isinstance(alone.check, Number)
    assert not alone.check.accepts("It is 3.\n\nQ: Next?\nA: 4"), "control: no frame, no cut"
    for changed, message in (
        ({"num_shots": 10}, "holds 9 solved problems"),
        ({"num_shots": 0}, "num_shots is 0"),
        ({"path": shots}, "holds the prompt '.*train.jsonl:1'.*another part"),
    ):
        with pytest.raises(UserError, match=message):
            select_prompts(BenchmarkConfig(**{**options, **changed}))
    with pytest.raises(UserError, match="holds 0 solved problems of format auto"):
        select_prompts(BenchmarkConfig(**{**options, "format": "auto", "path": shots}))


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "benchmark").glob("*.yaml")))
def test_every_named_benchmark_composes(name: str) -> None:
    cfg = compose_job("eval.run", EvalConfig, [f"benchmark={name}", "benchmark.path=x"]).benchmark
    assert cfg.format in ("auto", *FORMS) and cfg.path == "x"


def test_an_unknown_benchmark_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"gsm9k.*gsm8k, gsm8k_8_shot"):
        compose_job("eval.run", EvalConfig, ["benchmark=gsm9k"])


@pytest.mark.parametrize(
    ("form", "file", "count", "checks"),
    [
        ("mt_bench", "mt_bench.jsonl", 80, None),
        ("spec_bench", "spec_bench.jsonl", 480, None),
        ("gsm8k", "gsm8k_test.jsonl", 1319, Number),
        ("mgsm", "mgsm.jsonl", 2750, Number),
        ("humaneval", "raw/HumanEval.jsonl", 164, Program),
        ("humaneval", "humaneval.jsonl", 164, None),
        ("mbpp", "mbpp_test.jsonl", 500, None),
        ("hellaswag", "hellaswag_contexts.jsonl", 3000, None),
        ("alpaca", "alpaca_eval.jsonl", 617, None),
    ],
)
def test_published_files_are_read_whole(
    shared_data: Path, form: str, file: str, count: int, checks: type | None
) -> None:
    found = read_problems(form, str(shared_data / "eval" / file), max_bad=0)
    assert len(found) == count
    kinds = {type(one.check) for one in found if isinstance(one, Problem)}
    assert kinds == ({checks} if checks else set())
    if form == "spec_bench":
        groups = [one.category for one in found]
        assert {group: groups.count(group) for group in groups} == dict.fromkeys(
            ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 80
        )
    if form == "mt_bench":
        assert {len(one.turns) for one in found} == {2}
    if form == "mgsm":
        assert len({one.category for one in found}) == 11
    if checks is Number:  # published solutions pass their own check
        for one in found:
            assert isinstance(one, Problem) and isinstance(one.check, Number)
            assert one.check.accepts(one.solution), one.id
