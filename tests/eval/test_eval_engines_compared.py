"""The tables of engines in a comparison: several runs side by side."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from eval.compare import run
from eval.report.engines import engine_warnings, print_engines
from eval.report.engines_compared import compared_engine_tables, compared_engine_warnings
from eval.report.page import engines_page
from eval.report.terminal import print_comparison
from eval.report.text import NONE
from eval.statistics.comparison.entries import entries_of
from eval.statistics.comparison.evaluations import read_evaluation
from eval.statistics.comparison.panels import panels_of
from eval.statistics.engine_row import EngineRow
from eval.statistics.schema import read_rows, write_rows
from tests.support import simulated_records, simulated_runs
from tests.support.simulated_comparisons import SHALLOW, configured
from tests.support.simulated_engines import GAINS, engine_row

CONDITIONS = [(1, 0.0), (1, 1.0), (8, 0.0), (8, 1.0)]


def write_run(home, label: str, dtype: str, **changes: object):
    """Write a SIMULATED run whose engines have a drafter `shallow`; Hugging Face's at batch 1."""
    folder = simulated_runs.write(home / label, SHALLOW, dtype=dtype)
    rows = [
        engine_row(engine, drafter, dtype, *condition)
        for condition in CONDITIONS
        for engine in GAINS
        for drafter in ("", "shallow")
        if not (engine == "hf" and drafter and condition[0] > 1)
    ]
    rows = [EngineRow(**{**vars(row), **changes}) for row in rows]
    write_rows(folder / "results.jsonl", [*read_rows(folder / "results.jsonl"), *rows])
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Return runs of two dtypes on two benchmarks."""
    home = tmp_path_factory.mktemp("engines_compared")
    return [
        write_run(home, f"{benchmark}_{dtype}", dtype, benchmark=benchmark)
        for benchmark in ("mt_bench", "spec_bench")
        for dtype in ("float32", "bfloat16")
    ]


def tables_of(folders):
    return compared_engine_tables([read_evaluation(one, one.name) for one in folders])


def test_one_table_has_the_gain_of_a_drafter_in_every_engine(four):
    gains, speeds = tables_of(four)
    assert gains.columns == ["setting", "drafter", *GAINS]
    settings = [cells[0] for cells in gains.rows]
    assert len(settings) == len(set(settings)) == 16
    assert settings[0] == "float32, mt_bench, batch 1, greedy"
    assert settings[-1] == "bfloat16, spec_bench, batch 8, temperature 1"
    assert [cell.split()[0] for cell in gains.rows[0][2:]] == [
        *("1.25x", "0.90x", "1.10x", "0.80x", "1.02x")
    ]
    assert gains.rows[2][3] == NONE  # Hugging Face drafts for one prompt at a time
    plain = {cells[0]: cells[2:] for cells in speeds.rows if cells[1].startswith("none")}
    assert set(plain["float32, mt_bench, batch 8, greedy"]) == {"800.0"}
    assert len(speeds.rows) == 32


def test_runs_with_equal_settings_are_named_apart(tmp_path):
    same = [write_run(tmp_path, label, "float32") for label in ("monday", "friday")]
    settings = [cells[0] for cells in tables_of(same)[0].rows]
    assert settings[0] == "float32, benchmark, batch 1, greedy, monday"
    assert len(set(settings)) == 8


def test_settings_show_other_fields_only_where_runs_differ_in_them(tmp_path):
    runs = [
        write_run(tmp_path, f"threads{threads}", "float32", threads=threads) for threads in (1, 2)
    ]
    settings = [cells[0] for cells in tables_of(runs)[0].rows]
    assert settings[0] == "float32, benchmark, batch 1, greedy, threads 1"


def test_a_gain_with_wrong_output_or_acceptance_has_a_star_and_a_warning(tmp_path):
    folder = write_run(tmp_path, "run", "float32", agreement="differs", agreement_detail="differs")
    gains, _ = tables_of([folder])
    assert gains.rows[0][2].endswith("*") and set(gains.marks) == {"bad"}
    [first, *_] = compared_engine_warnings([read_evaluation(folder, "label")])
    assert first.startswith("label: ACCEPTANCE DIFFERS: ours, none")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, True),
        ({"drafter_layers": 1}, False),
        ({"device": "cuda"}, False),
        ({"backend": "vllm 0.33.0"}, False),
        ({"method": "eagle3"}, False),
    ],
)
def test_blocks_of_several_layers_in_vllm_for_cpus_have_a_warning(changes, named):
    """Check the warning beside an acceptance that agrees, and as the reason of one that differs."""
    given = {"backend": "vllm 0.32.0", "method": "dflash", "drafter_layers": 2, **changes}
    row = dataclasses.replace(engine_row("vllm", "mine", "float32", 1, 0.0), **given)
    place = "vllm, mine, Greedy: "
    words = "vLLM 0.32.0 for CPUs normalizes the text's keys of all 2 layers of this head with the"
    starts = [f"MAY ACCEPT LESS: {place}{words}"] * named
    found = engine_warnings([row])
    assert len(found) == len(starts) and all(map(str.startswith, found, starts))
    row = dataclasses.replace(row, agreement="differs", agreement_detail="differs")
    [warning] = engine_warnings([row])
    reason = words if named else "The engine may read the drafter's folder wrongly."
    assert warning.startswith(f"ACCEPTANCE DIFFERS: {place}it differs in ours. {reason}")


def test_runs_without_engines_have_no_such_table(tmp_path):
    assert tables_of([simulated_runs.write(tmp_path / "run", SHALLOW)]) == []


@pytest.mark.parametrize("width", [100, 160])
def test_the_table_is_whole_in_a_terminal(four, width):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    evaluations = [read_evaluation(one, one.name) for one in four]
    panels = panels_of(entries_of(evaluations, "all"), 50, 0)
    print_comparison(panels, evaluations, console, compared_engine_tables(evaluations))
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    gains = shown[shown.index("A drafter's gain") : shown.index("Tokens/s")]
    for word in ("openvino", "llama_cpp", "[1.20, 1.30]", "spec_bench,"):
        assert word in gains
    assert "shallow," in gains


def test_the_report_and_its_rows(four, tmp_path):
    folder = run(configured(tmp_path, "compared", four))
    page = (folder / "comparison.html").read_text()
    assert "<h2>Engines</h2>" in page and "A drafter&#39;s gain in every engine" in page
    rows = [json.loads(line) for line in (folder / "comparison.jsonl").read_text().splitlines()]
    assert {row["engine"] for row in rows} == {"ours"}  # other engines' rows are in the runs


# ---------------------------------------------------------------------------------------- versions
OTHERS = "hf 1.0, vllm 1.0, llama_cpp 1.0, openvino 1.0"


def test_a_run_names_the_versions_of_its_engines_on_terminal_and_page():
    rows = [engine_row(engine, "", "float32", 1, 0.0) for engine in GAINS]
    out = io.StringIO()
    versions = {"shallow-draft": "0.1", "torch": "2.0", "transformers": "5.0", "wandb": "1.0"}
    print_engines(rows, [], versions, Console(file=out))
    line = f"Versions: ours 0.1 (native fused, torch 2.0, transformers 5.0), {OTHERS}"
    assert line in out.getvalue().splitlines()
    made = dataclasses.replace(simulated_records.PROVENANCE, versions=versions)
    assert f'<p class="note">{line}</p>' in engines_page(rows, [], made)
    out.truncate(0)
    print_engines(rows[2:3], [], versions, Console(file=out))  # without rows of our own loop
    assert "Versions: ours 0.1 (torch 2.0, transformers 5.0), vllm 1.0\n" in out.getvalue()


def test_a_comparison_names_versions_once_and_apart_where_runs_differ(four, tmp_path, capsys):
    line = f"Versions: ours (native fused, torch 0, transformers 0), {OTHERS}"
    folder = run(configured(tmp_path, "same", four))
    assert capsys.readouterr().out.splitlines().count(line) == 1
    assert (folder / "comparison.html").read_text().count(f'<p class="note">{line}</p>') == 1
    newer = write_run(tmp_path, "newer", "float32", benchmark="mt_bench")
    manifest = json.loads((newer / "manifest.json").read_text())
    manifest["versions"]["torch"] = "1"
    (newer / "manifest.json").write_text(json.dumps(manifest))
    run(configured(tmp_path, "differing", [four[0], newer]))
    shown = [one for one in capsys.readouterr().out.splitlines() if "Versions: " in one]
    assert len(shown) == 2
    assert shown[0].endswith(f"mt_bench_float32: {line}")
    assert shown[1].endswith(f"newer: {line.replace('torch 0', 'torch 1')}")
