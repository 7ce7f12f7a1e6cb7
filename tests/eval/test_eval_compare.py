"""`eval.compare`: what is put side by side and what is not, on SIMULATED runs whose right answers are known and on real tiny ones."""

import base64
import dataclasses
import io
import json
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from matplotlib.image import imread
from rich.console import Console

import eval.run
from decoding.errors import UserError
from eval import metrics
from eval.compare import run
from eval.compare_plots import iso_speedup_curves, looks
from eval.compare_table import print_comparison
from eval.compare_words import best_sentence, cautions, kept_apart
from eval.comparison import chains, panels_of, pareto_front, usual_costs
from eval.config import CompareConfig
from eval.entries import entries_of
from eval.evaluations import find_runs, labels_of, read_evaluation
from eval.prediction import Costs, best_gamma, expected_tokens_iid, iso_cost_ratio
from eval.schema import read_rows
from eval.series import with_series
from eval.words import main_rows
from training.config import TrackerConfig, typed
from training.job import CONF, check_arguments, register

from . import simulated_runs, tiny

SHALLOW = {"simulated-1": simulated_runs.drafter(0.62, 1, 3_100_000, 0.4)}
DEEP = {"simulated-4": simulated_runs.drafter(0.72, 4, 9_200_000, 1.6)}
SLOW = {"simulated-6": simulated_runs.drafter(0.72, 6, 14_000_000, 4.2)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """SIMULATED: three depths, each evaluated by itself."""
    home = tmp_path_factory.mktemp("simulated")
    for number, (label, drafters) in enumerate({"one": SHALLOW, "four": DEEP, "six": SLOW}.items()):
        simulated_runs.write(home / label / "eval.run", drafters, seed=number, tokens_seen=(number + 1) * 1_000_000)
    return home


@pytest.fixture(scope="module")
def compared(runs):
    return run(configured(runs, "compared", [f"{runs}/*/eval.run"]))


def configured(home, name, folders, **changes):
    values = {"job": "eval.compare", "output_dir": str(home / f"{name}.out"), "bootstrap_resamples": 200}
    return CompareConfig(**{**values, "runs": [str(folder) for folder in folders], **changes})


def evaluations_of(*folders):
    return [read_evaluation(folder, label) for folder, label in zip(folders, labels_of(folders), strict=True)]


def panels(*folders, prompts="headline"):
    return panels_of(entries_of(evaluations_of(*folders), prompts), 200, 0)


def lines(folder):
    return [json.loads(line) for line in (folder / "comparison.jsonl").read_text().splitlines()]


def three(runs):
    return [runs / label / "eval.run" for label in ("one", "four", "six")]


# ---------------------------------------------------------------------------------------------- laws
def dominates(one, other):
    return one[0] <= other[0] and one[1] >= other[1] and one != other


def check_front(points, marks):
    """The law: none on the front is dominated, and whatever is left out is dominated by one on the front."""
    front = [point for point, marked in zip(points, marks, strict=True) if marked]
    for point, marked in zip(points, marks, strict=True):
        assert marked != any(dominates(other, point) for other in front)
        assert not marked or not any(dominates(other, point) for other in points)


def test_the_pareto_front_has_no_dominated_point_and_leaves_none_other_out():
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = [
            (int(cost), float(gain)) for cost, gain in zip(rng.integers(0, 6, 12), rng.integers(0, 6, 12), strict=True)
        ]
        marks = pareto_front(points)
        check_front(points, marks)
        for index in range(len(points)):  # control: any other marking breaks the law, unless it is of a twin
            if points.count(points[index]) == 1:
                with pytest.raises(AssertionError):
                    check_front(points, [mark != (place == index) for place, mark in enumerate(marks)])


COSTS = Costs(0.3, {n: 1 + 0.05 * (n - 1) for n in range(1, 10)}, overhead=0.08, baseline_overhead=0.03)


def closed_form(alpha, c):
    """max over k of E (1 + o_1) / (k c + V(k+1) + o), written out (reference: the throughput model, E = (1 - a^(k+1)) / (1 - a))."""
    best = 0.0
    for k in range(1, 9):
        tokens = (1 - alpha ** (k + 1)) / (1 - alpha)
        best = max(best, tokens * 1.03 / (k * c + 1 + 0.05 * k + 0.08))
    return best


@pytest.mark.parametrize("speedup", [0.8, 1.0, 1.5, 2.5])
def test_an_iso_speedup_curve_goes_through_the_closed_form(speedup):
    on_plot = 0
    for alpha in np.linspace(0.05, 0.98, 12):
        c = iso_cost_ratio(speedup, alpha, COSTS)
        if c <= 0:  # too few tokens pass for that speedup, even from a drafter that costs nothing
            assert closed_form(alpha, 0.0) <= speedup + 1e-9
            continue
        on_plot += 1
        assert closed_form(alpha, c) == pytest.approx(speedup)
        assert best_gamma([alpha], dataclasses.replace(COSTS, cost_ratio=c))[1] == pytest.approx(speedup)
        assert closed_form(alpha, 1.2 * c) < speedup < closed_form(alpha, 0.8 * c), "and through no other point"
    assert on_plot >= 3


def test_the_drawn_curves_are_those_of_the_measured_costs(runs):
    (greedy, _) = panels(*three(runs))
    costs = usual_costs(chains(greedy))
    curves = iso_speedup_curves(chains(greedy), 1.0)
    assert curves[0][0] == 1.0 and len(curves) >= 3
    for level, c_A, alpha_A in curves:
        inside = [index for index in range(0, len(c_A), 20) if 0 < c_A[index] < 1]
        assert inside
        for index in inside:
            found = best_gamma([alpha_A[index]], dataclasses.replace(costs, cost_ratio=c_A[index]))[1]
            assert found == pytest.approx(level)
    assert expected_tokens_iid(0.5, 1) == 1.5


def test_every_row_of_the_runs_stands_in_the_comparison_once(runs, compared):
    key = ("drafter", "temperature", "batch_size", "num_draft_tokens")
    read = [
        (label, *(vars(row)[name] for name in key), row.speedup, row.alpha)
        for label in ("one", "four", "six")
        for row in main_rows(read_rows(runs / label / "eval.run" / "results.jsonl"))
    ]
    found = [(line["run"], *(line[name] for name in key), line["speedup"], line["alpha"]) for line in lines(compared)]
    assert sorted(found) == sorted(read)
    assert len(set(found)) == len(found) == 12


def test_fronts_of_a_comparison_obey_the_law(compared):
    for condition in {line["condition"] for line in lines(compared)}:
        here = [line for line in lines(compared) if line["condition"] == condition]
        for cost, mark in (("drafter_parameters", "pareto_parameters"), ("training_tokens", "pareto_training_tokens")):
            assert all(line[mark] is not None for line in here)
            check_front([(line[cost], line["counted_speedup"]) for line in here], [line[mark] for line in here])


# ---------------------------------------------------------------------------------------------- one drafter over another
def test_one_speedup_over_another_is_paired_over_prompts_and_runs(tmp_path, runs):
    one, four = panels(*three(runs)[:2])[1].standings[0], panels(*three(runs)[:2])[1].standings[2]
    assert one.entry.name == "simulated-1" and four.rival.name == "simulated-1"
    assert four.shared == 20
    assert four.ratio.value == pytest.approx(four.entry.speedup.value / one.entry.speedup.value)
    assert four.ratio.low < four.ratio.value < four.ratio.high
    same = simulated_runs.write(tmp_path / "again" / "eval.run", SHALLOW, seed=0, slower=2.0)
    twin = next(
        s
        for s in panels(three(runs)[0], same)[1].standings
        if s.entry.folder == str(same) and s.entry.row.drafter == "simulated-1"
    )
    assert twin.ratio.value == pytest.approx(1.0)
    assert (twin.ratio.low, twin.ratio.high) == pytest.approx((1.0, 1.0)), (
        "a machine twice as slow is so for its baseline too"
    )
    assert twin.entry.row.tokens_per_second == pytest.approx(one.entry.row.tokens_per_second / 2), (
        "control: tokens/s are not"
    )


def test_pairing_takes_out_what_a_prompt_does_to_both_runs():
    """Prompts differ in how easy they are, alike for both drafters: shuffled prompts give a wider interval."""
    rng = np.random.default_rng(0)
    easy = rng.uniform(0.5, 2.0, 40)
    base = [np.full(40, 100.0), np.full(40, 10.0)]
    one = [np.full(40, 100.0), 5.0 / easy * rng.uniform(0.98, 1.02, 40), *base]
    other = [np.full(40, 100.0), 6.0 / easy * rng.uniform(0.98, 1.02, 40), *base]
    paired = metrics.paired_speedups(one, other)
    order = rng.permutation(40)
    unpaired = metrics.paired_speedups(one, [column[order] for column in other])
    assert paired.value == pytest.approx(1.2, rel=0.02)
    assert paired.high - paired.low < 0.2 * (unpaired.high - unpaired.low)
    duel = metrics.paired_bootstrap(*one[:2], *other[:2])
    assert dataclasses.astuple(duel) == pytest.approx(dataclasses.astuple(paired)), "against one baseline it is a duel"
    few = metrics.paired_speedups([column[:4] for column in one], [column[:4] for column in other])
    assert few.low is None and few.high is None


def test_runs_without_a_prompt_in_common_are_not_paired(runs, tmp_path):
    (tmp_path / "other").mkdir()
    for name in ("config.yaml", "manifest.json", "results.jsonl"):
        (tmp_path / "other" / name).write_text((runs / "four" / "eval.run" / name).read_text())
    records = (
        (runs / "four" / "eval.run" / "records.jsonl")
        .read_text()
        .replace('"simulated-', '"unlike-')
        .replace('"unlike-4"', '"simulated-4"')
    )
    (tmp_path / "other" / "records.jsonl").write_text(records)
    found = panels(three(runs)[0], tmp_path / "other")
    standing = next(s for s in found[1].standings if s.entry.row.drafter == "simulated-4")
    assert standing.ratio is None and standing.rival.name == "simulated-1"
    assert any(
        "do not stand on the same prompts" in text
        for text in cautions(found, evaluations_of(three(runs)[0], tmp_path / "other"))
    )


# ---------------------------------------------------------------------------------------------- what may be compared
@pytest.mark.parametrize("field", ["dtype", "threads", "hardware", "backend"])
def test_other_settings_are_kept_apart_and_named(runs, tmp_path, field):
    other = {"dtype": "bfloat16", "threads": 8, "hardware": "another simulated processor", "backend": "hf"}[field]
    folder = simulated_runs.write(tmp_path / "other" / "eval.run", DEEP, **{field: other})
    found = panels(three(runs)[0], folder)
    assert len(found) == 4
    for panel in found:
        assert len({entry.run for entry in panel.entries}) == 1
        assert all(standing.rival is None or standing.rival.run == standing.entry.run for standing in panel.standings)
    (sentence,) = kept_apart(found)
    assert f"differ in {field}:" in sentence and str(other) in sentence
    assert len({panel.label for panel in found}) == 4
    assert kept_apart(panels(*three(runs))) == [], "control: like runs are not kept apart"
    assert len(panels(*three(runs))) == 2


def test_other_weights_and_prompts_of_one_name_are_kept_apart_by_their_hashes(runs, tmp_path):
    weights = simulated_runs.write(tmp_path / "weights", DEEP, inputs={"simulated target": "a" * 64})
    prompts = simulated_runs.write(tmp_path / "prompts", DEEP, inputs={"simulated prompts": "b" * 64})
    assert [panel.label for panel in panels(three(runs)[0], weights)][2] == "greedy, target aaaaaaaa"
    assert "differ in target hash" in kept_apart(panels(three(runs)[0], weights))[0]
    assert "greedy, prompts bbbbbbbb" in [panel.label for panel in panels(three(runs)[0], prompts)]


def test_headlines_leave_loops_out_and_all_prompts_can_be_asked_for(runs):
    (greedy, _), (everything, _) = panels(three(runs)[0]), panels(three(runs)[0], prompts="all")
    entry, other = greedy.entries[0], everything.entries[0]
    assert entry.speedup.value == entry.row.headline_speedup < other.speedup.value == other.row.speedup
    assert len(entry.counted()) == entry.row.headline_prompts < len(other.counted()) == other.row.prompts


def test_neither_a_virtual_clock_nor_another_text_is_ranked(runs):
    evaluation = evaluations_of(three(runs)[0])[0]
    for changes, why in (
        ({"schedule": "pearl_virtual"}, "a virtual clock"),
        ({"schedule": "alone"}, "another model's text"),
        ({"lossless": "differs"}, "not the target's own text"),
    ):
        rows = [dataclasses.replace(row, **changes) if row.drafter_parameters else row for row in evaluation.rows]
        for panel in panels_of(entries_of([dataclasses.replace(evaluation, rows=rows)], "headline"), 50, 0):
            (standing, control) = panel.standings
            assert standing.entry.not_ranked == why and standing.on_front == {}
            assert panel.fastest == [control.entry]
            assert "prompt lookup, the control, is" in best_sentence(panel)


def test_the_control_of_one_run_is_no_rival_of_that_of_another(runs):
    for panel in panels(*three(runs)):
        rivals = [standing.rival for standing in panel.standings if standing.entry.row.drafter == "prompt_lookup"]
        assert len(rivals) == 3
        assert all(rival.row.drafter_parameters for rival in rivals)


# ---------------------------------------------------------------------------------------------- words
def test_the_best_is_named_with_what_is_sure_of_it(runs, tmp_path):
    greedy, sampled = panels(*three(runs))
    assert "simulated-1 (1 layer, 3.1 M) is the fastest: " in best_sentence(sampled)
    assert sampled.fastest[0].name == "simulated-1" and sampled.fastest[-1].name != "simulated-1"
    again = simulated_runs.write(tmp_path / "again" / "eval.run", SHALLOW, seed=9)
    assert "no clear difference: " in best_sentence(panels(three(runs)[0], again)[1])
    slow = simulated_runs.write(
        tmp_path / "slow" / "eval.run", {"simulated-6": simulated_runs.drafter(0.3, 6, 14_000_000, 4.2)}
    )
    entries = [entry for entry in entries_of(evaluations_of(slow), "headline") if entry.row.drafter_parameters]
    assert "the least slow, and slower than no drafter" in best_sentence(panels_of(entries, 50, 0)[1])


def test_a_machine_that_changed_its_pace_is_named(runs, tmp_path):
    folders = [three(runs)[0], simulated_runs.write(tmp_path / "slower" / "eval.run", DEEP, slower=1.5)]
    assert any(
        "baseline's own tokens/s differ" in text for text in cautions(panels(*folders), evaluations_of(*folders))
    )
    like = three(runs)
    assert not any("baseline's own" in text for text in cautions(panels(*like), evaluations_of(*like)))


def test_drafters_of_one_name_are_told_apart_by_their_runs(runs, tmp_path):
    again = simulated_runs.write(tmp_path / "again" / "eval.run", SHALLOW, seed=9)
    names = [entry.name for entry in panels(three(runs)[0], again)[0].entries]
    assert len(set(names)) == len(names) == 4
    assert all(name.startswith(("simulated-1 (", "prompt_lookup (")) for name in names)


def test_labels_are_what_differs_between_paths(tmp_path):
    made = [tmp_path / "sweep" / name / "eval.run" for name in ("a", "b/c")] + [tmp_path / "sweep" / "eval.run"]
    assert labels_of(made[:2]) == ["a", "b/c"]
    assert labels_of(made[:1]) == ["eval.run"]
    assert labels_of([tmp_path / "a", tmp_path / "a" / "b"]) == ["a", "a/b"]
    assert len(set(labels_of(made))) == 3


# ---------------------------------------------------------------------------------------------- series
def test_series_are_labels_or_what_cards_share(runs):
    entries = entries_of(evaluations_of(*three(runs)), "headline")
    by_label = with_series(entries, {"one": "wide", str(three(runs)[1]): "wide", "simulated-6": "deep"}, [])
    assert {(entry.row.drafter, entry.series) for entry in by_label} == {
        ("simulated-1", "wide"),
        ("simulated-4", "wide"),
        ("simulated-6", "deep"),
        ("prompt_lookup", ""),
    }
    look = looks(by_label)
    assert look["simulated-1"].colour == look["simulated-4"].colour != look["simulated-6"].colour
    assert look["simulated-1"].marker != look["simulated-4"].marker
    by_card = with_series(entries, {}, ["shape.hidden_size"])
    assert {entry.series for entry in by_card if entry.row.drafter_parameters} == {"hidden size 64"}
    apart = with_series(entries, {}, ["shape.hidden_size", "training_tokens"])
    assert len({entry.series for entry in apart if entry.row.drafter_parameters}) == 3


def test_bytes_a_step_are_equal_within_three_per_cent(tmp_path):
    width = simulated_runs.WIDTH * simulated_runs.VOCABULARY
    sizes = {"simulated-a": 9_000_000, "simulated-b": 9_200_000, "simulated-c": 9_500_000}
    folder = simulated_runs.write(
        tmp_path / "run", {name: simulated_runs.drafter(0.6, 1, size, 0.5) for name, size in sizes.items()}
    )
    entries = entries_of(evaluations_of(folder), "headline")
    read = {entry.name: entry.bytes_per_step for entry in entries}
    assert read == {**{name: 4 * (size - width) for name, size in sizes.items()}, "prompt_lookup": 0}
    series = {entry.name: entry.series for entry in with_series(entries, {}, ["bytes_per_step"])}
    assert series["simulated-a"] == series["simulated-b"] != series["simulated-c"]


@pytest.mark.parametrize(
    ("labels", "group_by", "message"),
    [
        ({"two": "wide"}, [], "labels: 'two' is no drafter, run or run folder.*simulated-1, one,"),
        ({}, ["shape.depth"], "group_by: no drafter's card has the field 'shape.depth'.*data.tokens_seen"),
    ],
)
def test_labels_and_fields_that_name_nothing_are_refused(runs, labels, group_by, message):
    entries = entries_of(evaluations_of(*three(runs)), "headline")
    with pytest.raises(UserError, match=message):
        with_series(entries, labels, group_by)


def test_a_card_of_a_drafter_that_was_trained_again_is_left_out(tmp_path):
    folder = simulated_runs.write(tmp_path / "run", SHALLOW, tokens_seen=1000)
    assert evaluations_of(folder)[0].origins["simulated-1"].training_tokens == 1000
    card = tmp_path / "run.drafters" / "simulated-1" / "drafter_card.json"
    card.write_text(card.read_text().replace("2" * 64, "3" * 64))
    (evaluation,) = evaluations_of(folder)
    assert evaluation.origins == {} and "was trained again since simulated-1 was evaluated" in evaluation.notes[0]
    card.unlink()
    (card.parent / "config.json").unlink()
    card.parent.rmdir()
    assert "is neither a folder" in evaluations_of(folder)[0].notes[0]


# ---------------------------------------------------------------------------------------------- the job
class Checker(HTMLParser):
    """Collects addresses and checks that elements nest."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.texts = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "srcset", "href", "action", "data")]
        self.texts += [value for name, value in attributes if name == "alt"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone_with_its_plots_inside(compared):
    html = (compared / "comparison.html").read_text()
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    files = sorted(path.read_bytes() for path in (compared / "plots").glob("*.png"))
    assert len(files) == 8  # depth, acceptance, two fronts; greedy and sampled
    inside = [base64.b64decode(address.removeprefix("data:image/png;base64,")) for address in checker.addresses]
    assert sorted(inside[1::2]) == files, "the light ones"
    assert not set(inside[::2]) & set(files) and len(inside) == 16, "and the dark ones"
    assert len(checker.texts) == 8 and all(checker.texts)
    assert all(imread(io.BytesIO(data)).shape[1] > 900 for data in inside)
    assert not re.search(r"https?:|@import|url\(|<script", re.sub(r'"data:[^"]*"', "", html))


def test_the_page_says_what_matters(compared):
    text = re.sub(r"<[^>]+>", " ", re.sub(r'"data:[^"]*"', "", (compared / "comparison.html").read_text()))
    best = max(
        (line for line in lines(compared) if line["temperature"] == 1.0), key=lambda line: line["counted_speedup"]
    )
    for needed in (
        "3 drafters from 3 evaluations",
        f"{best['counted_speedup']:.2f}×",
        f"{best['counted_speedup_low']:.2f} to {best['counted_speedup_high']:.2f}",
        "temperature 1, token verification",
        "Prompt lookup, the control",
        "Where each loses",
        "slower on",
        "simulated processor",
        "2 threads",
        "do not loop",
        "What was not measured",
        "3.0 M",
    ):
        assert needed in text, needed


def test_one_run_makes_a_report_too(runs):
    folder = run(configured(runs, "alone", three(runs)[:1]))
    assert len(lines(folder)) == 4
    assert {line["run"] for line in lines(folder)} == {"eval.run"}
    assert {path.name for path in (folder / "plots").iterdir()} == {
        f"{kind}_{place}.png"
        for kind in ("depth", "acceptance", "pareto")
        for place in ("greedy", "temperature_1_token_verification")
    }


def test_names_from_outside_cannot_break_the_page(tmp_path):
    folder = simulated_runs.write(tmp_path / "run", SHALLOW, target="<script>x</script>", benchmark="<b>&")
    html = (run(configured(tmp_path, "evil", [folder])) / "comparison.html").read_text()
    assert "<script" not in html and "<b>&" not in html and "&lt;script&gt;" in html


def test_a_finished_comparison_is_made_again_only_for_other_runs(tmp_path, capsys):
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
    assert len(json.loads(only)) == 1 + 2 * 4
    with (tmp_path / "a" / "eval.run" / "records.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"records.jsonl has changed since"):
        run(cfg)


def test_a_dry_run_says_what_it_would_read_and_writes_nothing(runs, tmp_path, capsys):
    found = run(configured(tmp_path, "dry", [three(runs)[0], f"{tmp_path}/*/eval.run"], dry_run=True))
    text = capsys.readouterr().out
    assert "4 rows; simulated-1, prompt_lookup; simulated prompts, greedy, temperature 1, token verification" in text
    assert "not there yet: " in text and "would write comparison.jsonl" in text
    assert not found.exists()


@pytest.mark.parametrize("width", [100, 230])
def test_the_terminal_table_fits(runs, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_comparison(panels(*three(runs)), evaluations_of(*three(runs)), console)
    text = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())
    assert max(len(line) for line in text.splitlines()) <= width
    for needed in ("simulated-4", "prompt_lookup", "is the fastest", "over the best", "slower on"):
        assert needed in text, needed


def test_weights_and_biases_holds_the_comparison_offline(runs):
    """The files of the offline run are read back: the table's rows are those of comparison.jsonl."""
    tracker = TrackerConfig(wandb="offline", group="simulated sweep")
    folder = run(configured(runs, "tracked", three(runs), tracker=tracker))
    (offline,) = folder.glob("wandb/offline-run-*")
    (log,) = offline.glob("run-*.wandb")
    deadline = time.monotonic() + 60  # wandb's own service process writes the files
    while b"charts/acceptance_greedy" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"simulated sweep" in log.read_bytes()
    (file,) = offline.glob("files/media/table/comparison_*.table.json")
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    expected = [
        {key: value for key, value in line.items() if not isinstance(value, dict | list)} for line in lines(folder)
    ]
    assert rows == expected and len(rows) == 12
    charts = {
        path.name.split("_table")[0]: json.loads(path.read_text())
        for path in offline.glob("files/media/table/charts/*.json")
    }
    assert charts.keys() == {
        f"{kind}_{place}"
        for kind in ("depth", "acceptance")
        for place in ("greedy", "temperature_1_token_verification")
    }
    greedy = [line for line in lines(folder) if line["condition"] == "greedy"]
    points = {(line["drafter_layers"], line["counted_speedup"]) for line in greedy}
    drawn = charts["depth_greedy"]
    at = [drawn["columns"].index(name) for name in ("layers", "speedup")]
    assert {tuple(row[index] for index in at) for row in drawn["data"]} == points
    assert len(list(offline.glob("files/media/images/plots/*.png"))) == len(list((folder / "plots").glob("*.png"))) == 8


def test_a_sweep_has_one_group(tmp_path):
    from eval.compare import group_of

    sweep = [simulated_runs.write(tmp_path / name, SHALLOW, config={"experiment": "simulated_sweep"}) for name in "ab"]
    alone = simulated_runs.write(tmp_path / "c", SHALLOW)
    cfg = configured(tmp_path, "grouped", sweep, experiment="mine")
    assert group_of(cfg, evaluations_of(*sweep)) == "simulated_sweep"
    assert group_of(cfg, evaluations_of(alone)) == "mine"
    cfg.tracker.group = "given"
    assert group_of(cfg, evaluations_of(*sweep)) == "given"


# ---------------------------------------------------------------------------------------------- errors
def test_what_is_no_finished_evaluation_is_refused(runs, tmp_path):
    folder = simulated_runs.write(tmp_path / "run", SHALLOW)
    manifest = json.loads((folder / "manifest.json").read_text())

    def refused(message, **changes):
        (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        with pytest.raises(UserError, match=message):
            run(configured(tmp_path, "refused", [folder]))

    refused("is a run of distill.train; expected one of eval.run", job="distill.train")
    refused("is not finished; end it with: python -m eval.run drafters", finished=False)
    results = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(results.replace('"alpha"', '"beta"'))
    refused(r"results.jsonl: not the rows of this version of eval.run \(.*beta")
    (folder / "results.jsonl").write_text(results[:-20])
    refused("results.jsonl: not the rows of this version")
    (folder / "results.jsonl").write_text("")
    refused("results.jsonl has no rows")
    (folder / "results.jsonl").write_text(results)
    records = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(records[:-1]))
    refused("records.jsonl does not hold the generations behind results.jsonl .*prompts")
    (folder / "records.jsonl").unlink()
    refused("is no finished run of eval.run: it has no records.jsonl")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest.json is damaged"):
        run(configured(tmp_path, "refused", [folder]))
    assert not (tmp_path / "refused.out").exists()


@pytest.mark.parametrize(
    ("folders", "changes", "message"),
    [
        ([], {}, "runs is empty: name finished run folders"),
        (["nowhere"], {}, "runs: .*nowhere finds no folder"),
        (["no*where"], {}, "runs: .*finds no folder .*or a glob"),
        ([""], {}, "is no finished run of eval.run: it has no config.yaml, manifest.json"),
        ([""], {"prompts": "some"}, "prompts=some is unknown, expected headline or all"),
        ([""], {"bootstrap_resamples": 0}, "bootstrap_resamples is 0, expected 1 or more"),
    ],
)
def test_bad_input_is_named(tmp_path, folders, changes, message):
    with pytest.raises(UserError, match=message):
        run(configured(tmp_path, "out", [tmp_path / folder for folder in folders], **changes))


def test_a_run_that_is_named_twice_is_read_once(runs):
    assert find_runs([str(runs / "one" / "eval.run"), f"{runs}/*/eval.run", f"{runs}/one/../one/eval.run"]) == [
        runs / label / "eval.run" for label in ("one", "four", "six")
    ]


# ---------------------------------------------------------------------------------------------- real, tiny
def test_a_stage_calls_it_by_overrides_alone():
    register("eval.compare", CompareConfig)
    overrides = [
        'runs=["ladder/*/eval.run",other]',
        "labels={one: wide,ladder/a/eval.run: deep}",
        "tracker=wandb_offline",
    ]
    check_arguments(overrides, "eval.compare", CompareConfig)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = typed(
            compose("eval_compare", [*overrides, "group_by=[shape.hidden_size]", "tracker.group=ladder"]), CompareConfig
        )
    assert cfg.runs == ["ladder/*/eval.run", "other"]
    assert cfg.labels == {"one": "wide", "ladder/a/eval.run": "deep"}
    assert (cfg.tracker.wandb, cfg.tracker.group, cfg.group_by) == ("offline", "ladder", ["shape.hidden_size"])
    assert cfg.output_dir == "runs/eval.compare/default"


def test_real_evaluations_are_compared(home, monkeypatch):
    """Two drafters cut from a tiny random target, each measured by eval.run; the stage's overrides are all it takes."""
    monkeypatch.chdir(home)
    tiny.save(home / "deeper", layers=2)
    for name in ("shallow", "deeper"):
        eval.run.run(tiny.config(home, f"ladder/{name}/eval.run", drafters=[str(home / name)]))
    folder = run(CompareConfig(job="eval.compare", output_dir="ladder/eval.compare", runs=["ladder/*/eval.run"]))
    found = lines(folder)
    assert [(line["name"], line["drafter_layers"]) for line in found if line["temperature"] == 0] == [
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
    assert shallow["training_tokens"] is None and shallow["pareto_training_tokens"] is None, "it has no card"
    assert all(line["over_rival"] > 0 and line["over_rival_low"] is None for line in found), "three prompts are too few"
    assert "needs more prompts" in (folder / "comparison.html").read_text()
