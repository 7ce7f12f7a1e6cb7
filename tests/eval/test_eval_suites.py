"""PEARL's published suites on a tiny pair of models: stages, prompts, frames and reports."""

import pytest

from eval.measure.records import read_records
from eval.statistics.schema import read_rows
from tests.support import tiny_folders as tiny
from tests.support.forks import succeed


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
def test_pearls_comparison_runs_every_benchmark_on_any_pair_of_models(home, tmp_path):
    """Check that stages of the called job take its overrides, and that only GSM8K has a frame."""
    for name in ("humaneval", "gsm8k_test"):
        tiny.prompts(tmp_path / f"{name}.jsonl", count=3)
    drafters = (
        "drafters=[{use: ${draft_model}, schedule: alone, name: small}, {use: "
        "${draft_model}, schedule: pearl_virtual}]"
    )
    stages = "stages=['eval.run:humaneval','eval.run:gsm8k']"
    suite(home, tmp_path, "+experiment=pearl_comparison", stages, drafters, "samples=2")
    rows = {
        name: read_rows(tmp_path / "out" / name / "results.jsonl")
        for name in ("humaneval", "gsm8k")
    }
    assert [found[0].benchmark for found in rows.values()] == ["HumanEval", "GSM8K"]
    lengths = [
        read_records(tmp_path / "out" / name / "records.jsonl")[0].prompt_tokens for name in rows
    ]
    assert lengths[1] == lengths[0] + len("Q: \nA:"), "only GSM8K's prompts have a frame"


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
    """Check that all of HumanEval is measured, with a sweep on prompts of MBPP.

    Of GSM8K, the first hundred prompts are measured, with a sweep on later ones.
    """
    for name, count in (("humaneval", 4), ("gsm8k_test", 103), ("mbpp_test", 9)):
        lines = tiny.prompts(tmp_path / f"{name}.jsonl", count=count).read_text()
        (tmp_path / f"{name}.jsonl").write_text(
            lines.replace("Question", name).replace('"p', f'"{name}/')
        )
    suite(
        home,
        tmp_path,
        "+experiment=pearl_comparison",
        "stages=['eval.run:humaneval','eval.run:gsm8k']",
        "drafters=[{use: ${draft_model}, schedule: pearl_virtual}]",
        "temperatures=[0.0]",
        "prompt_lookup_control=false",
        "num_draft_tokens=[]",
        "sweep=[2]",
        "sweep_prompts=2",
        "max_prompts=0",
        "max_new_tokens=2",
    )
    for name, count, swept in (("humaneval", 4, "mbpp_test"), ("gsm8k", 100, "gsm8k_test")):
        records = read_records(tmp_path / "out" / name / "records.jsonl")
        measured, others = (
            {r.prompt_id for r in records if r.part == part} for part in ("main", "sweep")
        )
        assert len(measured) == count and len(others) == 2 and not measured & others
        assert {one.partition("/")[0] for one in others} == {swept}
    assert others <= {f"gsm8k_test/{number}" for number in (100, 101, 102)}
