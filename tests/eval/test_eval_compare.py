"""`eval.compare`: grouping, ranking, tables and series, on SIMULATED runs with known results."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from decoding.errors import UserError
from eval.measure.origins import origin_of, write_origins
from eval.report.comparison_plots import depth, styles_of_entries
from eval.report.comparison_tables import differences_table, entry_cells, panel_losses
from eval.report.page import Provenance, comparison_page
from eval.report.terminal import print_comparison
from eval.statistics.comparison.entries import entries_of
from eval.statistics.comparison.evaluations import labels_of
from eval.statistics.comparison.panels import panels_of
from eval.statistics.comparison.series import with_series
from eval.statistics.schema import read_rows, write_rows
from tests.support import simulated_runs
from tests.support.simulated_comparisons import DEEP, SHALLOW, evaluations_of, panels, three
from tests.support.tiers import tiered


# ------------------------------------------------------------------------------------------- panels
@pytest.mark.parametrize(
    "field", tiered(["dtype", "threads", "hardware", "backend"], ["dtype", "hardware"])
)
def test_different_settings_are_separated_and_named(runs, tmp_path, field):
    other = {
        "dtype": "bfloat16",
        "threads": 8,
        "hardware": "another simulated processor",
        "backend": "hf",
    }[field]
    folder = simulated_runs.write(tmp_path / "other" / "eval.run", DEEP, **{field: other})
    found = panels(three(runs)[0], folder)
    assert len(found) == 4
    for panel in found:
        assert len({entry.run for entry in panel.entries}) == 1
        assert all(
            compared.rival is None or compared.rival.run == compared.entry.run
            for compared in panel.compared
        )
    (differing,) = [cells for cells in differences_table(found, []).rows if cells[0] == field]
    assert differing[1] == "speeds are not compared" and str(other) in differing[2]
    assert all(differing[2].count(entry.run) == 1 for panel in found for entry in panel.entries), (
        "each run is named once"
    )
    assert len({panel.label for panel in found}) == 4
    assert differences_table(panels(*three(runs)), []).rows == [], (
        "control: equal runs are not separated"
    )
    assert len(panels(*three(runs))) == 2


def test_weights_and_prompts_of_one_name_are_separated_by_hash(runs, tmp_path):
    weights = simulated_runs.write(
        tmp_path / "weights", DEEP, inputs={"simulated target": "a" * 64}
    )
    prompts = simulated_runs.write(
        tmp_path / "prompts", DEEP, inputs={"simulated prompts": "b" * 64}
    )
    assert [panel.label for panel in panels(three(runs)[0], weights)][
        2
    ] == "greedy, target aaaaaaaa"
    assert differences_table(panels(three(runs)[0], weights), []).rows[0][0] == "target hash"
    assert "greedy, prompts bbbbbbbb" in [panel.label for panel in panels(three(runs)[0], prompts)]


def test_other_worked_examples_are_another_workload(tmp_path):
    """Compare runs of one name and one file of prompts, after other worked examples."""
    ours, theirs, again = (
        simulated_runs.write(
            tmp_path / name, drafters, benchmark="GSM8K, 8-shot", examples_hash=letter * 64
        )
        for name, drafters, letter in (
            *(("ours", DEEP, "a"), ("theirs", SHALLOW, "b")),
            ("again", DEEP, "b"),
        )
    )
    apart = panels(ours, theirs)
    labels = [panel.label for panel in apart if panel.workload.temperature == 0]
    assert labels == ["greedy, examples aaaaaaaa", "greedy, examples bbbbbbbb"]
    assert all(len({entry.run for entry in panel.entries}) == 1 for panel in apart)
    together = panels(theirs, again)
    assert len(together) == len(apart) / 2, "a control: the same examples"
    assert {entry.run for entry in together[0].entries} == {"theirs", "again"}
    earlier = simulated_runs.write(tmp_path / "earlier", DEEP, benchmark="GSM8K, 8-shot")
    assert "greedy, examples not recorded" in [panel.label for panel in panels(theirs, earlier)]


def test_headlines_exclude_loops_unless_all_prompts_are_requested(runs):
    (greedy, _), (everything, _) = panels(three(runs)[0]), panels(three(runs)[0], prompts="all")
    entry, other = greedy.entries[0], everything.entries[0]
    assert (
        entry.speedup.value == entry.row.headline_speedup < other.speedup.value == other.row.speedup
    )
    assert (
        len(entry.counted())
        == entry.row.headline_prompts
        < len(other.counted())
        == other.row.prompts
    )


def test_neither_a_virtual_clock_nor_another_text_is_ranked(runs):
    evaluation = evaluations_of(three(runs)[0])[0]
    for changes, why in (
        ({"schedule": "pearl_virtual"}, "a virtual clock"),
        ({"schedule": "alone"}, "another model's text"),
        ({"lossless": "differs"}, "not the target's own text"),
        ({"lossless": "lossy"}, "lossy"),
    ):
        rows = [
            dataclasses.replace(row, **changes) if row.drafter_parameters else row
            for row in evaluation.rows
        ]
        for panel in panels_of(
            entries_of([dataclasses.replace(evaluation, rows=rows)], "headline"), 50, 0
        ):
            (compared, control) = panel.compared
            assert compared.entry.not_ranked == why and compared.on_front == {}
            assert panel.fastest == [control.entry]
            assert entry_cells(compared)["drafter"].endswith(f"[{why}]")


def test_controls_of_different_runs_are_no_rivals(runs):
    for panel in panels(*three(runs)):
        rivals = [
            compared.rival
            for compared in panel.compared
            if compared.entry.row.drafter == "prompt_lookup"
        ]
        assert len(rivals) == 3
        assert all(rival.row.drafter_parameters for rival in rivals)


# ---------------------------------------------------------------------------------- tables and page
def page_of(found):
    return comparison_page(found, [[] for _ in found], [], Provenance("", "", ""))


def test_the_best_is_shown_with_its_interval_and_its_number_of_rivals(runs):
    _, sampled = panels(*three(runs))
    best = sampled.fastest[0]
    assert best.name == "simulated-1" and sampled.fastest[-1].name != "simulated-1"
    html = page_of([sampled])
    assert "Best of 3 drafters: simulated-1 (1 layer, 3.1 M)" in html
    assert f"{best.speedup.low:.2f} to {best.speedup.high:.2f}" in html
    cells = {one.entry.name: entry_cells(one) for one in sampled.compared}
    (compared,) = [one for one in sampled.compared if one.entry is best]
    ratio = compared.ratio
    assert cells["simulated-1"]["over the best"] == (
        f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
    )
    assert cells["simulated-1"]["best other"] == compared.rival.name
    assert cells["simulated-1"]["shared prompts"] == str(compared.shared)


def test_the_plot_of_depths_names_intervals_only_if_some_are_drawn(runs):
    entries = entries_of(evaluations_of(*three(runs)), "headline")
    nothing = {"headline_speedup_low": None, "headline_speedup_high": None}
    without = [
        dataclasses.replace(entry, row=dataclasses.replace(entry.row, **nothing))
        for entry in entries
    ]
    for found, words in ((entries, " length, with 95 % intervals. "), (without, " length. Hollow")):
        panel = panels_of(found, 50, 0)[0]
        assert words in depth(panel, styles_of_entries(found)).caption


def test_a_cap_is_distinguished_from_a_length(runs):
    entries = entries_of(evaluations_of(*three(runs)), "headline")
    capped = [
        dataclasses.replace(entry, row=dataclasses.replace(entry.row, length_rule="cap"))
        for entry in entries
    ]
    for found, gamma in ((entries, "4"), (capped, "<= 4")):
        panel = panels_of(found, 50, 0)[0]
        table = panel_losses(panel)
        assert {cells[table.columns.index("gamma")] for cells in table.rows} == {gamma}
        assert ("gamma &lt;= 4, alpha" in page_of([panel])) == (gamma == "<= 4")


def test_the_table_shows_training_and_cost_of_drafters(runs, tmp_path):
    for panel in panels(*three(runs)):
        cells = {one.entry.name: entry_cells(one) for one in panel.compared}
        models = [cells[f"simulated-{layers}"] for layers in (1, 4, 6)]
        assert [one["trained on"] for one in models] == ["1.0 M", "2.0 M", "3.0 M"]
        assert [one["bytes/step"] for one in models][:2] == ["12.1 MB", "36.5 MB"]
    unknown = simulated_runs.write(tmp_path / "unknown", DEEP)
    assert entry_cells(panels(unknown)[0].compared[0])["trained on"] == "–"


def test_a_changed_pace_of_the_machine_is_named(runs, tmp_path):
    folders = [
        three(runs)[0],
        simulated_runs.write(tmp_path / "slower" / "eval.run", DEEP, slower=1.5),
    ]
    table = differences_table(panels(*folders), evaluations_of(*folders))
    assert any("only ratios to it are compared" in cells for cells in table.rows)
    like = three(runs)
    assert differences_table(panels(*like), evaluations_of(*like)).rows == []


def test_drafters_of_one_name_are_distinguished_by_their_runs(runs, tmp_path):
    again = simulated_runs.write(tmp_path / "again" / "eval.run", SHALLOW, seed=9)
    names = [entry.name for entry in panels(three(runs)[0], again)[0].entries]
    assert len(set(names)) == len(names) == 4
    assert all(name.startswith(("simulated-1 (", "prompt_lookup (")) for name in names)


def test_labels_are_the_parts_of_paths_that_differ(tmp_path):
    made = [tmp_path / "sweep" / name / "eval.run" for name in ("a", "b/c")] + [
        tmp_path / "sweep" / "eval.run"
    ]
    assert labels_of(made[:2]) == ["a", "b/c"]
    assert labels_of(made[:1]) == ["eval.run"]
    assert labels_of([tmp_path / "a", tmp_path / "a" / "b"]) == ["a", "a/b"]
    assert len(set(labels_of(made))) == 3


# ------------------------------------------------------------------------------------------- series
def test_series_come_from_labels_or_shared_card_values(runs):
    entries = entries_of(evaluations_of(*three(runs)), "headline")
    by_label = with_series(
        entries, {"one": "wide", str(three(runs)[1]): "wide", "simulated-6": "deep"}, []
    )
    assert {(entry.row.drafter, entry.series) for entry in by_label} == {
        ("simulated-1", "wide"),
        ("simulated-4", "wide"),
        ("simulated-6", "deep"),
        ("prompt_lookup", ""),
    }
    look = styles_of_entries(by_label)
    assert look["simulated-1"].colour == look["simulated-4"].colour != look["simulated-6"].colour
    assert look["simulated-1"].marker != look["simulated-4"].marker
    by_card = with_series(entries, {}, ["shape.hidden_size"])
    assert {entry.series for entry in by_card if entry.row.drafter_parameters} == {"hidden size 64"}
    apart = with_series(entries, {}, ["shape.hidden_size", "training_tokens"])
    assert len({entry.series for entry in apart if entry.row.drafter_parameters}) == 3


def test_bytes_per_step_are_equal_within_three_per_cent(tmp_path):
    width = simulated_runs.WIDTH * simulated_runs.VOCABULARY
    sizes = {"simulated-a": 9_000_000, "simulated-b": 9_200_000, "simulated-c": 9_500_000}
    folder = simulated_runs.write(
        tmp_path / "run",
        {name: simulated_runs.drafter(0.6, 1, size, 0.5) for name, size in sizes.items()},
    )
    entries = entries_of(evaluations_of(folder), "headline")
    read = {entry.name: entry.bytes_per_step for entry in entries}
    assert read == {
        **{name: 4 * (size - width) for name, size in sizes.items()},
        "prompt_lookup": 0,
    }
    series = {entry.name: entry.series for entry in with_series(entries, {}, ["bytes_per_step"])}
    assert series["simulated-a"] == series["simulated-b"] != series["simulated-c"]


@pytest.mark.parametrize(
    ("labels", "group_by", "message"),
    [
        (
            {"two": "wide"},
            [],
            "labels: 'two' is not a drafter, run or run folder.*simulated-1, one,",
        ),
        (
            {},
            ["shape.depth"],
            "group_by: no drafter of this comparison has 'shape.depth'; expected one of "
            "bytes_per_step, training_tokens, .*data.tokens_seen",
        ),
    ],
)
def test_unknown_labels_and_fields_are_refused(runs, labels, group_by, message):
    entries = entries_of(evaluations_of(*three(runs)), "headline")
    with pytest.raises(UserError, match=message):
        with_series(entries, labels, group_by)


def test_cards_are_kept_with_the_results(tmp_path, monkeypatch):
    """Check that cards are read from the results, even after the drafter's folder is gone.

    Another working folder changes nothing. A damaged drafters.json is refused, and a missing one is
    noted.
    """
    folder = simulated_runs.write(tmp_path / "run", SHALLOW, tokens_seen=1000)
    shutil.rmtree(tmp_path / "run.drafters")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (evaluation,) = evaluations_of(Path("../run"))
    assert evaluation.origins["simulated-1"].training_tokens == 1000 and not evaluation.notes
    (folder / "drafters.json").write_text('{"simulated-1": 3}')
    with pytest.raises(UserError, match=r"drafters\.json is damaged.*Evaluate again"):
        evaluations_of(folder)
    (folder / "drafters.json").unlink()
    (evaluation,) = evaluations_of(folder)
    assert evaluation.origins == {} and "has no drafters.json" in evaluation.notes[0]
    with pytest.raises(
        UserError,
        match=r"no drafter of this comparison has .*; their folders had no drafter_card\.json",
    ):
        with_series(entries_of([evaluation], "headline"), {}, ["training_tokens"])


def test_a_card_of_other_weights_is_ignored(tmp_path):
    simulated_runs.write(tmp_path / "run", SHALLOW, tokens_seen=1000)
    home = tmp_path / "run.drafters" / "simulated-1"
    assert origin_of(home, "2" * 64, "float32").training_tokens == 1000
    other = origin_of(home, "3" * 64, "float32")
    assert other.training_tokens is None and "is of other weights" in other.note and other.embedding
    write_origins(tmp_path / "run", {"simulated-1": other})
    assert "simulated-1: the card in" in evaluations_of(tmp_path / "run")[0].notes[0]


# --------------------------------------------------------------------------------- drafting nothing
def test_a_drafter_that_drafts_nothing_is_named(tmp_path, capsys):
    """Check that a drafter that drafts nothing is marked and kept off the fronts.

    It is as fast as plain decoding.
    """
    folder = simulated_runs.write(tmp_path / "run", {**SHALLOW, **DEEP})
    for panel in panels(folder):
        assert not any(entry.idle for entry in panel.entries), "control"
    rows = [
        dataclasses.replace(row, drafted=0.01) if row.drafter == "simulated-4" else row
        for row in read_rows(folder / "results.jsonl")
    ]
    write_rows(folder / "results.jsonl", rows)
    for panel in panels(folder):
        for one in panel.compared:
            idle = one.entry.row.drafter == "simulated-4"
            name = entry_cells(one)["drafter"]
            assert idle == one.entry.idle == name.endswith("[drafts nothing]")
            assert not (idle and one.on_front)
    print_comparison(panels(folder), evaluations_of(folder))
    assert capsys.readouterr().out.count("simulated-4 [drafts") == 3 * len(panels(folder))
