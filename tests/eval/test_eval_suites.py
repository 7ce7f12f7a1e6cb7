"""PEARL's published suites on a tiny pair of models: stages, prompts, frames and reports."""

import json

import pytest

from eval.config import EvalConfig
from eval.measure.benchmarks import load_benchmark
from eval.measure.records import read_records
from eval.statistics.schema import read_rows
from jobs.composing import compose_job
from jobs.config import typed
from jobs.paths import resolve
from jobs.stages import compose_stage
from tests.support import tiny_folders as tiny
from tests.support.forks import succeed


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return a folder with a tiny target and drafter that have room for eight worked examples."""
    folder = tmp_path_factory.mktemp("wide")
    tiny.save(folder / "target", layers=3, context=4096)
    tiny.save(folder / "shallow", layers=1, context=4096)
    return folder


def write_prompts(path, count):
    """Write prompts with solutions, named after the file."""
    tiny.prompts(path, count=count)
    lines = path.read_text().replace("Question", path.stem).replace('"p', f'"{path.stem}/')
    solved = [json.loads(line) | {"reference": ["#### 1"]} for line in lines.splitlines()]
    path.write_text("".join(json.dumps(one) + "\n" for one in solved))


def suite(home, folder, *more):
    """Run one of PEARL's experiments on the tiny models, and assert that it succeeds."""
    given = [
        f"target.path={home / 'target'}",
        "target.dtype=float64",
        "target.device=cpu",
        f"draft_model={home / 'shallow'}",
    ]
    given += [
        f"benchmark_folder={folder}",
        "sweep=[]",
        "num_draft_tokens=[2]",
        "max_prompts=2",
        "sweep_prompts=0",
    ]
    given += [
        "max_new_tokens=4",
        "timing_repeats=1",
        "bootstrap_resamples=50",
        f"output_dir={folder / 'out'}",
        "threads=1",
    ]
    succeed("eval.run", *given, *more)


@pytest.mark.long
def test_pearls_comparison_runs_every_benchmark_on_any_pair_of_models(wide, tmp_path):
    """Check that stages of the called job take its overrides, and that only GSM8K has a frame."""
    for name in ("humaneval", "gsm8k_test"):
        write_prompts(tmp_path / f"{name}.jsonl", 3)
    drafters = (
        "drafters=[{use: ${draft_model}, schedule: alone, name: small}, {use: "
        "${draft_model}, schedule: pearl_virtual}]"
    )
    stages = "stages=['eval.run:humaneval','eval.run:gsm8k']"
    suite(wide, tmp_path, "+experiment=pearl_comparison", stages, drafters, "samples=2")
    rows = {
        name: read_rows(tmp_path / "out" / name / "results.jsonl")
        for name in ("humaneval", "gsm8k")
    }
    assert [found[0].benchmark for found in rows.values()] == ["HumanEval", "GSM8K, 8-shot"]
    lengths = [
        read_records(tmp_path / "out" / name / "records.jsonl")[0].prompt_tokens for name in rows
    ]
    examples = [json.loads(line) for line in resolve("embedded:gsm8k_shots").open()]
    before = "".join(f"Q: {one['question']}\nA: {one['answer']}\n\n" for one in examples)
    longer = len("gsm8k_test") - len("humaneval")
    assert lengths[1] == lengths[0] + longer + len(f"{before}Q: \nA:"), "GSM8K alone has a frame"
    pages = [(tmp_path / "out" / name / "report.html").read_text() for name in rows]
    words = "8 worked examples of embedded:gsm8k_shots before each; answers end at"
    assert [words in page for page in pages] == [False, True]
    assert {row.answers_checked > 0 for row in rows["gsm8k"]} == {True}


@pytest.mark.long
def test_pearls_ablation_runs_both_variants_on_both_clocks(home, tmp_path):
    tiny.prompts(tmp_path / "humaneval.jsonl", count=3)
    suite(
        home,
        tmp_path,
        "+experiment=pearl_ablation",
        "stages=['eval.run:humaneval']",
        "temperatures=[0.0]",
    )
    rows = read_rows(tmp_path / "out" / "humaneval" / "results.jsonl")
    found = {row.schedule for row in rows}
    assert {
        f"pearl_{clock}{part}"
        for clock in ("virtual", "wall")
        for part in ("", "_wo_pre", "_wo_post")
    } <= found
    assert {row.lossless for row in rows} == {"equal"}


@pytest.mark.long
def test_pearls_case_study_marks_drafted_tokens(home, tmp_path):
    tiny.prompts(tmp_path / "mt_bench.jsonl", count=3)
    suite(home, tmp_path, "+experiment=pearl_case_study")
    html = (tmp_path / "out" / "report.html").read_text()
    assert "Who wrote what" in html
    assert {row.drafter for row in read_rows(tmp_path / "out" / "results.jsonl")} >= {
        "sd",
        "pearl",
        "pearl+",
    }


@pytest.mark.long
def test_a_suite_measures_published_prompts_and_sweeps_on_similar_ones(home, tmp_path):
    """Check that all of HumanEval is measured, with a sweep on prompts of MBPP."""
    for name, count in (("humaneval", 4), ("mbpp_test", 9)):
        write_prompts(tmp_path / f"{name}.jsonl", count)
    suite(
        home,
        tmp_path,
        "+experiment=pearl_comparison",
        "stages=['eval.run:humaneval']",
        "drafters=[{use: ${draft_model}, schedule: pearl_virtual}]",
        "temperatures=[0.0]",
        "prompt_lookup_control=false",
        "num_draft_tokens=[]",
        "sweep=[2]",
        "sweep_prompts=2",
        "max_prompts=0",
        "max_new_tokens=2",
    )
    records = read_records(tmp_path / "out" / "humaneval" / "records.jsonl")
    measured, others = (
        {r.prompt_id for r in records if r.part == part} for part in ("main", "sweep")
    )
    assert len(measured) == 4 and len(others) == 2
    assert {one.partition("/")[0] for one in others} == {"mbpp_test"}


@pytest.mark.parametrize("name", ["pearl_comparison", "pearl_ablation"])
def test_a_suite_takes_the_first_hundred_problems_of_gsm8k_and_sweeps_on_others(name, tmp_path):
    write_prompts(tmp_path / "gsm8k_test.jsonl", 103)
    given = [f"+experiment={name}", "target.path=x", f"benchmark_folder={tmp_path}"]
    composed = compose_job("eval.run", EvalConfig, given)
    [member] = compose_stage("eval.run:gsm8k", typed(composed, EvalConfig), composed).members
    cfg = typed(member, EvalConfig)
    found = load_benchmark(
        cfg.benchmark,
        tiny.tokenizer(),
        max_length=4096,
        max_new_tokens=cfg.max_new_tokens,
        limit=cfg.max_prompts,
    )
    measured, others = ([one.id for one in part] for part in (found.prompts, found.for_sweep))
    assert measured == [f"gsm8k_test/{number}" for number in range(100)]
    assert others == [f"gsm8k_test/{number}" for number in (100, 101, 102)]
    assert {one.turns[0].count("\nA: ") for one in found.prompts + found.for_sweep} == {8}
