"""`eval.compare` as a job: page, tables, Weights & Biases, errors, and tiny real evaluations."""

import dataclasses
import io
import json
import re
import time
from html.parser import HTMLParser

import pytest
from matplotlib.image import imread
from rich.console import Console

import eval.run
from decoding.errors import UserError
from eval.compare import run
from eval.config import CompareConfig
from eval.report.comparison_tables import comparison_warnings
from eval.report.terminal import print_comparison
from eval.statistics.comparison.evaluations import find_runs
from eval.statistics.schema import read_rows, write_rows
from jobs.config import TrackerConfig
from jobs.job import check_arguments
from tests.support import simulated_runs
from tests.support import tiny_folders as tiny
from tests.support.configurations import configuration
from tests.support.simulated_comparisons import (
    DEEP,
    SHALLOW,
    configured,
    evaluations_of,
    lines,
    panels,
    three,
)

# ------------------------------------------------------------------------------------------ the job
VOID = {"meta", "path", "use", "line", "rect", "circle", "br", "wbr", "image"}


class Checker(HTMLParser):
    """A parser that collects addresses and checks that elements are nested correctly."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.addresses += [
            value
            for name, value in attributes
            if name in ("src", "srcset", "href", "action", "data")
        ]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_self_contained_with_its_plots(compared):
    html = (compared / "comparison.html").read_text()
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    files = list((compared / "plots").glob("*.png"))
    assert len(files) == 10  # depth, two of acceptance, two fronts; greedy and sampled
    assert all(imread(file).shape[1] > 900 for file in files)
    assert len(re.findall(r'<svg viewBox="[^"]+" role="img" aria-label="[^"]+">', html)) == 10
    assert all(address.startswith("#") for address in checker.addresses)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not re.search(r"https?:|@import|url\((?!#)|<script", without_namespaces)


def test_the_page_shows_the_results(compared):
    text = re.sub(
        r"<[^>]+>", " ", re.sub(r'"data:[^"]*"', "", (compared / "comparison.html").read_text())
    )
    best = max(
        (line for line in lines(compared) if line["temperature"] == 1.0),
        key=lambda line: line["counted_speedup"],
    )
    for needed in (
        "3 drafters from 3 evaluations",
        f"{best['counted_speedup']:.2f}×",
        f"{best['counted_speedup_low']:.2f} to {best['counted_speedup_high']:.2f}",
        "temperature 1, token verification",
        "Prompt lookup, the control",
        "Where each drafter loses",
        "slower prompts",
        "bytes/step",
        "by depth",
        "trained on",
        "simulated processor",
        "2 threads",
        "does not loop",
        "What was not measured",
        "3.0 M",
    ):
        assert needed in text, needed


@pytest.mark.long
@pytest.mark.usefixtures("drawn")
def test_a_single_run_makes_a_report(runs):
    folder = run(configured(runs, "alone", three(runs)[:1]))
    assert len(lines(folder)) == 4
    assert {line["run"] for line in lines(folder)} == {"eval.run"}
    assert {path.name for path in (folder / "plots").iterdir()} == {
        f"{kind}_{place}.png"
        for kind in ("depth", "depths", "acceptance", "pareto")
        for place in ("greedy", "temperature_1_token_verification")
    }


@pytest.mark.usefixtures("drawn")
def test_names_from_outside_cannot_break_the_page(tmp_path):
    folder = simulated_runs.write(
        tmp_path / "run", SHALLOW, target="<script>x</script>", benchmark="<b>&"
    )
    html = (run(configured(tmp_path, "evil", [folder])) / "comparison.html").read_text()
    assert "<script" not in html and "<b>&" not in html and "&lt;script&gt;" in html


@pytest.mark.long
def test_a_finished_comparison_is_repeated_only_for_other_runs(tmp_path, capsys):
    simulated_runs.write(tmp_path / "a" / "eval.run", SHALLOW)
    cfg = configured(tmp_path, "again", [f"{tmp_path}/*/eval.run"])
    page = run(cfg) / "comparison.html"
    made = page.stat().st_mtime_ns
    run(cfg)
    assert page.stat().st_mtime_ns == made and "nothing is made again" in capsys.readouterr().out
    simulated_runs.write(tmp_path / "b" / "eval.run", DEEP)
    found = run(cfg)
    assert {line["run"] for line in lines(found)} == {"a", "b"}, "the glob finds one more"
    (only,) = (found / "metrics.jsonl").read_text().splitlines()
    assert len(json.loads(only)) == 1 + 2 * 2 * 4, "speedup and tokens/s"
    with (tmp_path / "a" / "eval.run" / "records.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"records.jsonl has changed since"):
        run(cfg)


def test_a_dry_run_lists_the_runs_and_writes_nothing(runs, tmp_path, capsys):
    found = run(
        configured(tmp_path, "dry", [three(runs)[0], f"{tmp_path}/*/eval.run"], dry_run=True)
    )
    text = capsys.readouterr().out
    assert (
        "4 rows; simulated-1, prompt_lookup; simulated prompts, greedy, temperature 1, token "
        "verification" in text
    )
    assert "not there yet: " in text and "would write comparison.jsonl" in text
    assert not found.exists()


@pytest.mark.parametrize("width", [100, 230])
def test_the_terminal_table_fits(runs, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_comparison(panels(*three(runs)), evaluations_of(*three(runs)), console)
    text = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())
    assert max(len(line) for line in text.splitlines()) <= width
    for needed in ("simulated-4", "prompt_lookup", "best", "slower"):
        assert needed in text, needed


@pytest.mark.long
@pytest.mark.usefixtures("drawn")
def test_weights_and_biases_holds_the_comparison_offline(runs):
    """Check that the offline run has the charts, and a table with the rows of comparison.jsonl."""
    tracker = TrackerConfig(wandb="offline", group="simulated sweep")
    folder = run(configured(runs, "tracked", three(runs), tracker=tracker))
    (offline,) = folder.glob("wandb/offline-run-*")
    (log,) = offline.glob("run-*.wandb")
    deadline = time.monotonic() + 60  # wandb's service process writes the files
    while b"charts/acceptance_greedy" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"simulated sweep" in log.read_bytes()
    (file,) = offline.glob("files/media/table/comparison_*.table.json")
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    expected = [
        {key: value for key, value in line.items() if not isinstance(value, dict | list)}
        for line in lines(folder)
    ]
    assert rows == expected and len(rows) == 12
    charts = {
        path.name.split("_table")[0]: json.loads(path.read_text())
        for path in offline.glob("files/media/table/charts/*.json")
    }
    assert charts.keys() == {
        f"{kind}_{place}"
        for kind in ("depth", "throughput", "acceptance")
        for place in ("greedy", "temperature_1_token_verification")
    }
    greedy = [line for line in lines(folder) if line["condition"] == "greedy"]
    for chart, column, field in (
        ("depth", "speedup", "counted_speedup"),
        ("throughput", "tokens_per_second", "tokens_per_second"),
    ):
        points = {(line["drafter_layers"], line[field]) for line in greedy}
        drawn = charts[f"{chart}_greedy"]
        at = [drawn["columns"].index(name) for name in ("layers", column)]
        assert {tuple(row[index] for index in at) for row in drawn["data"]} == points
    assert (
        len(list(offline.glob("files/media/images/plots/*.png")))
        == len(list((folder / "plots").glob("*.png")))
        == 10
    )


def test_a_sweep_has_one_group(tmp_path):
    from eval.compare import group_of

    sweep = [
        simulated_runs.write(tmp_path / name, SHALLOW, config={"experiment": "simulated_sweep"})
        for name in "ab"
    ]
    alone = simulated_runs.write(tmp_path / "c", SHALLOW)
    cfg = configured(tmp_path, "grouped", sweep, experiment="mine")
    assert group_of(cfg, evaluations_of(*sweep)) == "simulated_sweep"
    assert group_of(cfg, evaluations_of(alone)) == "mine"
    cfg.tracker.group = "given"
    assert group_of(cfg, evaluations_of(*sweep)) == "given"


# ------------------------------------------------------------------------------------------- errors
def test_unfinished_and_damaged_evaluations_are_refused(runs, tmp_path):
    folder = simulated_runs.write(tmp_path / "run", SHALLOW)
    manifest = json.loads((folder / "manifest.json").read_text())

    def refused(message, **changes):
        (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        with pytest.raises(UserError, match=message):
            run(configured(tmp_path, "refused", [folder]))

    refused("is a run of distill.train, expected a run of eval.run", job="distill.train")
    refused("is not finished. Resume it with: python -m eval.run drafters", finished=False)
    results = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(results.replace('"alpha"', '"beta"'))
    refused(r"results.jsonl does not hold rows of this version of eval.run \(.*beta")
    (folder / "results.jsonl").write_text(results[:-20])
    refused("results.jsonl does not hold rows of this version")
    (folder / "results.jsonl").write_text("")
    refused("results.jsonl has no rows")
    (folder / "results.jsonl").write_text(results)
    records = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(records[:-1]))
    refused("records.jsonl does not hold the generations behind results.jsonl .*prompts")
    (folder / "records.jsonl").unlink()
    refused("is not a finished run of eval.run: it has no records.jsonl")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest.json is damaged"):
        run(configured(tmp_path, "refused", [folder]))
    assert not (tmp_path / "refused.out").exists()


@pytest.mark.parametrize(
    ("folders", "changes", "message"),
    [
        ([], {}, "runs is empty. Name finished run folders"),
        (["nowhere"], {}, "runs: '.*nowhere' matches no folder"),
        (["no*where"], {}, "runs: .*matches no folder .*or a glob"),
        ([""], {}, "is not a finished run of eval.run: it has no config.yaml, manifest.json"),
        ([""], {"prompts": "some"}, "prompts=some is unknown, expected headline or all"),
        ([""], {"bootstrap_resamples": 0}, "bootstrap_resamples is 0, expected 1 or more"),
    ],
)
def test_bad_input_is_named(tmp_path, folders, changes, message):
    with pytest.raises(UserError, match=message):
        run(configured(tmp_path, "out", [tmp_path / folder for folder in folders], **changes))


def test_a_run_named_twice_is_read_once(runs):
    assert find_runs(
        [str(runs / "one" / "eval.run"), f"{runs}/*/eval.run", f"{runs}/one/../one/eval.run"]
    ) == [runs / label / "eval.run" for label in ("one", "four", "six")]


# --------------------------------------------------------------------------------------- real, tiny
def test_a_stage_configures_it_by_overrides_alone():
    overrides = [
        'runs=["ladder/*/eval.run",other]',
        "labels={one: wide,ladder/a/eval.run: deep}",
        "tracker=wandb_offline",
    ]
    check_arguments(overrides, "eval.compare", CompareConfig)
    more = ["group_by=[shape.hidden_size]", "tracker.group=ladder"]
    cfg = configuration("eval.compare", *overrides, *more)
    assert cfg.runs == ["ladder/*/eval.run", "other"]
    assert cfg.labels == {"one": "wide", "ladder/a/eval.run": "deep"}
    assert (cfg.tracker.wandb, cfg.tracker.group, cfg.group_by) == (
        "offline",
        "ladder",
        ["shape.hidden_size"],
    )
    assert cfg.output_dir == "runs/eval.compare/default"


def test_real_evaluations_are_compared(home, monkeypatch):
    """Check the comparison of two drafters, evaluated with a tiny random target.

    Its only settings are those that an experiment gives its stage.
    """
    monkeypatch.chdir(home)
    tiny.save(home / "deeper", layers=2)
    for name in ("shallow", "deeper"):
        eval.run.run(tiny.config(home, f"ladder/{name}/eval.run", drafters=[str(home / name)]))
    folder = run(
        CompareConfig(
            job="eval.compare", output_dir="ladder/eval.compare", runs=["ladder/*/eval.run"]
        )
    )
    found = lines(folder)
    assert [
        (line["name"], line["drafter_layers"]) for line in found if line["temperature"] == 0
    ] == [
        ("deeper", 2),
        ("prompt_lookup (deeper)", 0),
        ("shallow", 1),
        ("prompt_lookup (shallow)", 0),
    ]
    config = json.loads((home / "shallow" / "config.json").read_text())
    shallow = next(line for line in found if line["name"] == "shallow")
    assert shallow["bytes_per_step"] == 8 * (
        shallow["drafter_parameters"] - config["vocab_size"] * config["hidden_size"]
    )
    assert shallow["training_tokens"] is None and shallow["pareto_training_tokens"] is None, (
        "it has no card"
    )
    assert all(line["over_rival"] > 0 and line["over_rival_low"] is None for line in found), (
        "three prompts are too few"
    )
    assert "needs more prompts" in (folder / "comparison.html").read_text()


def test_a_busy_machine_is_named_before_the_results(runs, tmp_path):
    """Check that a warning that other processes took CPU time precedes the tables.

    Undisturbed evaluations give no warning.
    """
    folder = simulated_runs.write(tmp_path / "busy" / "eval.run", SHALLOW)
    rows = [dataclasses.replace(row, cpu_share=0.4) for row in read_rows(folder / "results.jsonl")]
    write_rows(folder / "results.jsonl", rows)
    console = Console(file=io.StringIO())
    print_comparison(panels(folder), evaluations_of(folder), console)
    text = console.file.getvalue()
    assert text.index("Other processes used this machine") < text.index("simulated-1")
    assert comparison_warnings(evaluations_of(folder))
    assert not comparison_warnings(evaluations_of(*three(runs)))
