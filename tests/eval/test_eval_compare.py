"""`eval.compare`: what is put side by side and what is not, on SIMULATED runs whose right answers
are known.
"""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from decoding.errors import UserError
from eval.measure.origins import origin_of, write_origins
from eval.report.compare.comparison import panels_of
from eval.report.compare.entries import entries_of
from eval.report.compare.evaluations import labels_of
from eval.report.compare.palette import looks
from eval.report.compare.series import with_series
from eval.report.compare.table import print_comparison
from eval.report.compare.words import best_sentence, cautions, cells, kept_apart, losses, terms
from eval.statistics.schema import read_rows, write_rows

from . import simulated_runs
from .comparing import DEEP, SHALLOW, evaluations_of, panels, three


# ----------------------------------------------------------------------------- what may be compared
@pytest.mark.parametrize("field", ["dtype", "threads", "hardware", "backend"])
def test_other_settings_are_kept_apart_and_named(runs, tmp_path, field):
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
            standing.rival is None or standing.rival.run == standing.entry.run
            for standing in panel.standings
        )
    (sentence,) = kept_apart(found)
    assert f"differ in {field}:" in sentence and str(other) in sentence
    assert all(sentence.count(f"{entry.run}") == 1 for panel in found for entry in panel.entries), (
        "each run once"
    )
    assert len({panel.label for panel in found}) == 4
    assert kept_apart(panels(*three(runs))) == [], "control: like runs are not kept apart"
    assert len(panels(*three(runs))) == 2


def test_other_weights_and_prompts_of_one_name_are_kept_apart_by_their_hashes(runs, tmp_path):
    weights = simulated_runs.write(
        tmp_path / "weights", DEEP, inputs={"simulated target": "a" * 64}
    )
    prompts = simulated_runs.write(
        tmp_path / "prompts", DEEP, inputs={"simulated prompts": "b" * 64}
    )
    assert [panel.label for panel in panels(three(runs)[0], weights)][
        2
    ] == "greedy, target aaaaaaaa"
    assert "differ in target hash" in kept_apart(panels(three(runs)[0], weights))[0]
    assert "greedy, prompts bbbbbbbb" in [panel.label for panel in panels(three(runs)[0], prompts)]


def test_headlines_leave_loops_out_and_all_prompts_can_be_asked_for(runs):
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
    ):
        rows = [
            dataclasses.replace(row, **changes) if row.drafter_parameters else row
            for row in evaluation.rows
        ]
        for panel in panels_of(
            entries_of([dataclasses.replace(evaluation, rows=rows)], "headline"), 50, 0
        ):
            (standing, control) = panel.standings
            assert standing.entry.not_ranked == why and standing.on_front == {}
            assert panel.fastest == [control.entry]
            assert "prompt lookup, the control, is" in best_sentence(panel)


def test_the_control_of_one_run_is_no_rival_of_that_of_another(runs):
    for panel in panels(*three(runs)):
        rivals = [
            standing.rival
            for standing in panel.standings
            if standing.entry.row.drafter == "prompt_lookup"
        ]
        assert len(rivals) == 3
        assert all(rival.row.drafter_parameters for rival in rivals)


# -------------------------------------------------------------------------------------------- words
def test_the_best_is_named_with_what_is_sure_of_it(runs, tmp_path):
    greedy, sampled = panels(*three(runs))
    assert "simulated-1 (1 layer, 3.1 M) is the fastest: " in best_sentence(sampled)
    assert f", the best of {len(sampled.fastest)};" in best_sentence(sampled)
    assert sampled.fastest[0].name == "simulated-1" and sampled.fastest[-1].name != "simulated-1"
    again = simulated_runs.write(tmp_path / "again" / "eval.run", SHALLOW, seed=9)
    assert "no clear difference: " in best_sentence(panels(three(runs)[0], again)[1])
    slow = simulated_runs.write(
        tmp_path / "slow" / "eval.run",
        {"simulated-6": simulated_runs.drafter(0.3, 6, 14_000_000, 4.2)},
    )
    entries = [
        entry
        for entry in entries_of(evaluations_of(slow), "headline")
        if entry.row.drafter_parameters
    ]
    assert "the least slow, and slower than no drafter" in best_sentence(
        panels_of(entries, 50, 0)[1]
    )


def test_a_cap_is_told_from_a_length(runs):
    entries = entries_of(evaluations_of(*three(runs)), "headline")
    capped = [
        dataclasses.replace(entry, row=dataclasses.replace(entry.row, length_rule="cap"))
        for entry in entries
    ]
    for found, told in ((entries, False), (capped, True)):
        panel = panels_of(found, 50, 0)[0]
        assert ("at gamma <= " in best_sentence(panel)) == ("gamma <= " in losses(panel)[0]) == told


def test_on_what_terms_drafters_meet_is_said(runs, tmp_path):
    """Equal training and equal cost within 3 %, or who has how much, or that it is not known."""
    for panel in panels(*three(runs)):
        training, cost = terms(panel)
        assert training == (
            "Not at equal training: 1.0 M tokens (simulated-1); 2.0 M tokens (simulated-4); 3.0 M "
            "tokens (simulated-6)."
        )
        assert cost.startswith(
            "Not at equal cost: 12.1 MB a draft step (simulated-1); 36.5 MB a draft step"
        )
    sizes = {"simulated-a": 9_000_000, "simulated-b": 9_200_000}
    drafters = {
        name: simulated_runs.drafter(0.6, layers, size, 0.5)
        for layers, (name, size) in enumerate(sizes.items(), 1)
    }
    alike = simulated_runs.write(tmp_path / "alike", drafters, tokens_seen=5_000_000)
    assert terms(panels(alike)[0]) == [
        "Equal training: every drafter saw 5.0 M tokens, within 3%.",
        "Equal cost: every drafter reads 35.7 MB a draft step, within 3%.",
    ]
    untold = simulated_runs.write(tmp_path / "untold", DEEP)
    assert "not known of simulated-4" in terms(panels(three(runs)[0], untold)[0])[0]
    assert terms(panels(three(runs)[0])[0]) == [], "one drafter meets nobody"


def test_a_machine_that_changed_its_pace_is_named(runs, tmp_path):
    folders = [
        three(runs)[0],
        simulated_runs.write(tmp_path / "slower" / "eval.run", DEEP, slower=1.5),
    ]
    assert any(
        "baseline's own tokens/s differ" in text
        for text in cautions(panels(*folders), evaluations_of(*folders))
    )
    like = three(runs)
    assert not any(
        "baseline's own" in text for text in cautions(panels(*like), evaluations_of(*like))
    )


def test_drafters_of_one_name_are_told_apart_by_their_runs(runs, tmp_path):
    again = simulated_runs.write(tmp_path / "again" / "eval.run", SHALLOW, seed=9)
    names = [entry.name for entry in panels(three(runs)[0], again)[0].entries]
    assert len(set(names)) == len(names) == 4
    assert all(name.startswith(("simulated-1 (", "prompt_lookup (")) for name in names)


def test_labels_are_what_differs_between_paths(tmp_path):
    made = [tmp_path / "sweep" / name / "eval.run" for name in ("a", "b/c")] + [
        tmp_path / "sweep" / "eval.run"
    ]
    assert labels_of(made[:2]) == ["a", "b/c"]
    assert labels_of(made[:1]) == ["eval.run"]
    assert labels_of([tmp_path / "a", tmp_path / "a" / "b"]) == ["a", "a/b"]
    assert len(set(labels_of(made))) == 3


# ------------------------------------------------------------------------------------------- series
def test_series_are_labels_or_what_cards_share(runs):
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
        ({"two": "wide"}, [], "labels: 'two' is no drafter, run or run folder.*simulated-1, one,"),
        (
            {},
            ["shape.depth"],
            "group_by: 'shape.depth' is known of none of these drafters; expected one of "
            "bytes_per_step, training_tokens, .*data.tokens_seen",
        ),
    ],
)
def test_labels_and_fields_that_name_nothing_are_refused(runs, labels, group_by, message):
    entries = entries_of(evaluations_of(*three(runs)), "headline")
    with pytest.raises(UserError, match=message):
        with_series(entries, labels, group_by)


def test_what_cards_say_is_kept_with_the_results(tmp_path, monkeypatch):
    """However paths are told, and whatever becomes of the drafter's folder."""
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
        UserError, match=r"known of none of these drafters; their folders had no drafter_card\.json"
    ):
        with_series(entries_of([evaluation], "headline"), {}, ["training_tokens"])


def test_a_card_of_other_weights_is_left_out(tmp_path):
    simulated_runs.write(tmp_path / "run", SHALLOW, tokens_seen=1000)
    home = tmp_path / "run.drafters" / "simulated-1"
    assert origin_of(home, "2" * 64, "float32").training_tokens == 1000
    other = origin_of(home, "3" * 64, "float32")
    assert other.training_tokens is None and "is of other weights" in other.note and other.embedding
    write_origins(tmp_path / "run", {"simulated-1": other})
    assert "simulated-1: the card in" in evaluations_of(tmp_path / "run")[0].notes[0]


# ------------------------------------------------------------------------------ what drafts nothing
def test_a_drafter_that_drafts_nothing_is_said_to(tmp_path, capsys):
    """Its speed is plain decoding's: it lies on no front, is joined to no point, and the words say
    so.
    """
    folder = simulated_runs.write(tmp_path / "run", {**SHALLOW, **DEEP})
    for panel in panels(folder):
        assert not any(entry.idle for entry in panel.entries) and not _said(
            panel, evaluations_of(folder)
        ), "control"
    rows = [
        dataclasses.replace(row, drafted=0.01) if row.drafter == "simulated-4" else row
        for row in read_rows(folder / "results.jsonl")
    ]
    write_rows(folder / "results.jsonl", rows)
    for panel in panels(folder):
        for one in panel.standings:
            idle = one.entry.row.drafter == "simulated-4"
            assert idle == one.entry.idle == cells(one)["drafter"].endswith("[drafts nothing]")
            assert not (idle and one.on_front)
        assert _said(panel, evaluations_of(folder)) == ["simulated-4"]
    print_comparison(panels(folder), evaluations_of(folder))
    assert capsys.readouterr().out.count("[drafts") == len(panels(folder)), (
        "as words, in a cell or folded"
    )


def _said(panel, evaluations):
    found = [
        re.search(r": ([\w-]+) drafts nothing: .* stopping=fixed", sentence)
        for sentence in cautions([panel], evaluations)
    ]
    return [match[1] for match in found if match]
