"""Acceptances that a plan reads: from its file, from trainings and from evaluations."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from decoding.models.folder import hash_input
from eval.plan.curves import collect, merge, read_curves, write_curves
from eval.plan.rows import MEASURED
from eval.report.plots import Plot
from eval.run import run as evaluate
from eval.statistics.schema import read_rows
from tests.support import tiny_folders as tiny
from tests.support.plans import again, curve, rows_in


@pytest.mark.long
def test_acceptances_of_another_target_are_refused_where_they_are_named(home: Path, tmp_path: Path):
    file = tmp_path / "others.jsonl"
    write_curves(file, [curve(home, "chain", 1, 0.7, target="another", target_hash="0")])
    with pytest.raises(UserError, match="holds no acceptance of .*only of another"):
        again(home, tmp_path, curves=[str(file)])
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(UserError, match="holds no acceptance of .*but is empty"):
        again(home, tmp_path, curves=[str(empty)])
    rows = rows_in(again(home, tmp_path, acceptance=str(file)))  # a file of several targets
    assert {row.acceptance for row in rows} == {""}


def test_a_broken_line_of_acceptances_stops_the_plan(home: Path, tmp_path: Path):
    file = tmp_path / "acceptance.jsonl"
    write_curves(file, [curve(home, "chain", 1, 0.7)])
    file.write_text(file.read_text() + '{"target": "torn')
    with pytest.raises(UserError, match="acceptance.jsonl, line 2: "):
        again(home, tmp_path, acceptance=str(file))


def test_runs_are_added_to_the_file_of_acceptances(home: Path, tmp_path: Path):
    """Use the finished training of the fixtures, whose target is another."""
    finished = Path(__file__).parents[2] / "fixtures" / "distill.train" / "finished"
    file = tmp_path / "acceptance.jsonl"
    for _ in range(2):  # the second time adds nothing
        again(home, tmp_path, acceptance=str(file), runs=[str(finished)])
        found = read_curves(file)
        assert [(one.kind, one.layers, one.temperature) for one in found] == [
            ("chain", 1, 1.0),
            ("chain", 1, 0.0),
        ]
        assert [one.source for one in found] == ["training", "training"]


ONE_PART = {"temperatures": [0.0], "sweep": [], "sweep_prompts": 0, "num_draft_tokens": [2]}


def write_shallow(home: Path, folder: Path) -> dict[str, Any]:
    """Write prompts, the target of `home` and its drafter `shallow`; return the drafter's card."""
    shutil.copytree(home / "target", folder / "target")
    tiny.prompts(folder / "prompts.jsonl")
    shallow = tiny.save(folder / "shallow", layers=1)
    card = {
        "name": "shallow",
        "target": str(home / "target"),
        "target_hash": hash_input(home / "target"),
        "drafter_hash": hash_input(shallow),
        "shape": {"num_hidden_layers": 1, "hidden_size": 32},
        "data": {"tokens_seen": 4096},
    }
    (shallow / "drafter_card.json").write_text(json.dumps(card))
    return card


def test_an_evaluation_gives_the_acceptance_that_it_measured(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Plot, "png", b"")
    card = write_shallow(home, tmp_path)
    shallow, asked = tmp_path / "shallow", ONE_PART
    evaluate(tiny.config(tmp_path, "evaluated", timing_repeats=1, **asked))
    rows = read_rows(tmp_path / "evaluated" / "results.jsonl")
    (row,) = (row for row in rows if row.drafter == "shallow")
    (found,) = collect([str(tmp_path / "evaluated")])[0]  # lookup has no card
    assert found.alpha_by_depth == row.alpha_by_depth
    assert found.tested_by_depth == row.tested_by_depth
    assert (found.kind, found.layers, found.hidden_size) == ("chain", 1, 32)
    assert (found.draft_shape, found.training_tokens) == ("chain", 4096)
    folder = again(home, tmp_path, runs=[str(tmp_path / "evaluated")],
                   acceptance=str(tmp_path / "acceptance.jsonl"))  # fmt: skip
    one = rows_in(folder)[0]
    assert (one.acceptance, one.alpha_by_depth[0]) == (MEASURED, row.alpha_by_depth[0])
    origins = tmp_path / "evaluated" / "drafters.json"
    origins.write_text(origins.read_text().replace(card["target_hash"], "other"))
    (elsewhere,) = collect([str(tmp_path / "evaluated")])[0]
    assert elsewhere.target_hash == found.target_hash, "the evaluation's target, not the card's"
    (shallow / "drafter_card.json").write_text(json.dumps({**card, "drafter_hash": "other"}))
    evaluate(tiny.config(tmp_path, "other card", timing_repeats=1, **asked))
    assert collect([str(tmp_path / "other card")])[0] == [], "a control: the card is of others"


def test_only_the_own_drafter_of_a_folder_gives_its_acceptance(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Evaluate the two entries of the quickstart, and other ways to draft with these weights."""
    monkeypatch.setattr(Plot, "png", b"")
    card = write_shallow(home, tmp_path)
    shallow = str(tmp_path / "shallow")
    lookup = {"use": "chain_with_lookup", "folder": shallow, "name": "lookup", "min_match": 1}
    others = [
        {"use": shallow, "lookup": 1, "name": "option"},
        {"use": shallow, "stopping": "confidence", "name": "ended"},
        *({"use": f"{name}_tree", "folder": shallow} for name in ("static", "ranked")),
    ]
    asked: dict[str, Any] = {**ONE_PART, "timing_repeats": 1, "prompt_lookup_control": False}
    asked |= {"drafters": [shallow, lookup, *others], "max_prompts": 3}
    evaluate(tiny.config(tmp_path, "first", **asked))
    rows = {row.drafter: row for row in read_rows(tmp_path / "first" / "results.jsonl")}
    tested = rows["shallow"].tested_by_depth
    found, notes = collect([str(tmp_path / "first")])
    assert notes == []
    assert [(one.drafter_class.rpartition(".")[2], one.stopping) for one in found] == [
        ("ChainDrafter", "fixed"),
        ("ChainDrafter", "confidence"),
        ("RankedTree", "fixed"),
    ]
    assert merge(found) == found, "none replaces another"
    shutil.copytree(tmp_path / "first", tmp_path / "last")
    results, origins = tmp_path / "last" / "results.jsonl", tmp_path / "last" / "drafters.json"
    own, before = (json.loads(line) for line in results.read_text().splitlines()[:2])
    assert (own["drafter"], before["drafter"]) == ("shallow", "lookup")
    before["accepted_by_depth"] = [0] * len(tested)
    written = json.loads(origins.read_text())
    for order in ((own, before), (before, own)):
        results.write_text("".join(json.dumps(row) + "\n" for row in order))
        (one,) = merge(collect([str(tmp_path / "last")])[0])
        assert one == found[0] and one.tested_by_depth == tested
    results.write_text("".join(json.dumps(row) + "\n" for row in (own, before)))
    wrong = {**written["lookup"], "drafter_class": written["shallow"]["drafter_class"]}
    origins.write_text(json.dumps({**written, "lookup": wrong}))
    (one,) = merge(collect([str(tmp_path / "last")])[0])
    assert one.alpha_by_depth == [0.0] * len(tested), "a control: as a chain it would replace it"

    written["shallow"]["card"] = {**card, "parallel_drafting": True}
    origins.write_text(json.dumps(written))
    assert collect([str(tmp_path / "last")]) == ([], []), "a PARD model that drafted as a chain"
    written["shallow"]["drafter_class"] = "decoding.drafters.parallel.ParallelChain"
    origins.write_text(json.dumps(written))
    (one,) = collect([str(tmp_path / "last")])[0]
    assert one.kind == "parallel", "a control: it drafted in one forward"
    del written["shallow"]["drafter_class"]
    origins.write_text(json.dumps(written))
    found, (note,) = collect([str(tmp_path / "last")])
    assert found == []
    assert "drafters.json does not name the class of shallow" in note and "Evaluate again" in note
