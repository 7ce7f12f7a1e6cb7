"""Measured costs of a plan: resuming, other machines, and all shapes and kinds of drafters."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from decoding.costs.contention import UndisturbedClock
from decoding.errors import UserError
from eval.plan import costs as plan_costs
from eval.plan.candidates import candidates
from eval.plan.costs import FILE, MeasuredCosts, open_target
from eval.plan.job import PAGE, run
from heads.registry import KINDS
from jobs.config import TargetConfig
from jobs.run_files import journal_bytes, read_journal_lines
from tests.support.plans import again, config, rows_in
from training.models.build import target_config


@pytest.mark.long
def test_an_interrupted_plan_continues_with_the_next_drafter(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[int] = []
    measure = plan_costs.measure_costs

    def counted(*given: Any, **settings: Any) -> Any:
        if len(calls) == 2:
            calls.append(0)
            raise KeyboardInterrupt
        calls.append(1)
        return measure(*given, **settings)

    monkeypatch.setattr(plan_costs, "measure_costs", counted)
    asked = config(home, "", output_dir=str(tmp_path / "stopped"))
    with pytest.raises(KeyboardInterrupt):
        run(asked)
    before = (tmp_path / "stopped" / FILE).read_bytes()
    assert before.count(b"\n") == 2
    assert [path.name for path in (tmp_path / "stopped").glob("*.partial")] == []
    run(asked)
    assert sum(calls) == 4, "two before, two after"
    assert (tmp_path / "stopped" / FILE).read_bytes().startswith(before)
    rows = rows_in(tmp_path / "stopped")
    run(dataclasses.replace(asked, speedups=[1.1], heads=["eagle3"]))
    assert sum(calls) == 4, "other speedups and fewer drafters need no measurement"
    assert [one.cost_ratio for one in rows_in(tmp_path / "stopped")] == [
        row.cost_ratio for row in rows if row.drafter != "medusa"
    ]


def test_a_damaged_line_is_measured_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    folder = tmp_path / "damaged"
    shutil.copytree(home / "planned", folder)
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"seconds": ', b'"seconds": 1')
    (folder / FILE).write_bytes(b"".join(lines))
    run(config(home, "", output_dir=str(folder)))
    assert "line 2: its checksum does not match" in capsys.readouterr().out
    assert len(read_journal_lines(folder / FILE, MeasuredCosts.read).records) == 4


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the folder", "in costs="])
def test_unreliable_costs_are_measured_anew_on_request(
    elsewhere: bool, home: Path, tmp_path: Path, capsys: Any
):
    """Check which lines are kept; without remeasure=true all of them are (a control)."""
    measured = read_journal_lines(home / "planned" / FILE, MeasuredCosts.read).records
    doubts = ["", "others ran", "", "others ran"]
    lines = [dataclasses.asdict(one) for one in measured]
    for line, doubt in zip(lines, doubts, strict=True):
        line["costs"]["unreliable"] = doubt
    folder = tmp_path / "planned"
    folder.mkdir()
    given = tmp_path / "given.jsonl" if elsewhere else folder / FILE
    given.write_bytes(journal_bytes(lines))
    asked = config(home, "", output_dir=str(folder), costs=str(given) if elsewhere else "")

    def known() -> list[MeasuredCosts]:
        return read_journal_lines(folder / FILE, MeasuredCosts.read).records

    run(asked)
    assert "nothing is measured again" in capsys.readouterr().out
    before = given.read_bytes()
    run(dataclasses.replace(asked, remeasure=True))
    assert "plan: 2 of 2, eagle3: " in capsys.readouterr().err
    kept = [] if elsewhere else [one for one, doubt in zip(measured, doubts) if not doubt]
    assert [one.drafter for one in known()] == [
        one.drafter for one in [*kept, measured[1], measured[3]]
    ]
    assert all(one.costs.unreliable != "others ran" for one in known())
    assert not elsewhere or given.read_bytes() == before, "another plan's file stays as it is"


@pytest.mark.parametrize(("share", "windows"), [(0.5, 1), (1.0, 3)], ids=["busy", "a control"])
def test_a_busy_machine_does_not_lengthen_a_plan(
    share: float, windows: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check the windows of each drafter where one takes longer than twice `cost_seconds`."""
    measured: list[float] = []

    def found(clock: UndisturbedClock) -> float:
        measured.append(share)
        return share

    monkeypatch.setattr(UndisturbedClock, "share", found)
    monkeypatch.setattr(plan_costs, "MOST_WINDOWS", 7)  # as the product has it
    asked = config(home, "", output_dir=str(tmp_path / "plan"), heads=[], cost_seconds=1e-6)
    rows = rows_in(run(asked))
    assert len(measured) == windows * len(rows)
    busy = [row for row in rows if "only 50 % of the time" in row.unreliable]
    assert len(busy) == (len(rows) if share < 1 else 0)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("hardware", {"cpu": "another", "gpus": [], "threads": 1}, "hardware.cpu is 'another'"),
        ("target", {"hidden_size": 64}, "target.hidden_size is 64"),
        ("batch_size", 8, "batch_size is 8 there and 1 here"),
    ],
)
def test_costs_of_another_machine_or_target_are_refused(
    key: str, value: Any, named: str, home: Path, tmp_path: Path
):
    measured = read_journal_lines(home / "planned" / FILE, MeasuredCosts.read).records
    lines = [dataclasses.asdict(one) for one in measured]
    for line in lines:
        old = line["conditions"][key]
        line["conditions"][key] = {**old, **value} if isinstance(value, dict) else value
    file = tmp_path / FILE
    file.write_bytes(journal_bytes(lines))
    with pytest.raises(UserError, match="was measured under other conditions") as raised:
        again(home, tmp_path, costs=str(file))
    assert named in str(raised.value)


def test_a_configuration_alone_is_planned_with_random_weights(home: Path, tmp_path: Path):
    folder = tmp_path / "config"
    folder.mkdir()
    shutil.copy(home / "target" / "config.json", folder)
    target = TargetConfig(path=str(folder), device="cpu", execution="eager")
    heads = ["recurrent", "dflash", "early_exit"]
    done = run(config(tmp_path, "random", target=target, depths=[1], widths=[0, 16], heads=heads))
    rows = rows_in(done)
    assert [row.drafter for row in rows] == ["1 layer, width 32", "1 layer, width 16", *heads]
    assert rows[1].parameters < rows[0].parameters
    assert "random weights" in (done / PAGE).read_text()


@pytest.mark.long
def test_all_shapes_of_drafts_are_planned(home: Path, tmp_path: Path, capsys: Any):
    """Plan pruned models as chains, trees and PARD, and the trees of heads that grow them."""
    heads = ["eagle3", "early_exit"]
    asked = config(home, "", output_dir=str(tmp_path / "shapes"), depths=[1], heads=heads,
                   shapes=["chain", "tree", "parallel"], tree_nodes=[8])  # fmt: skip
    rows = {row.drafter: row for row in rows_in(run(asked))}
    model = "1 layer, width 32"
    assert list(rows) == [
        *(model, f"{model} tree of 8", f"{model} parallel"),
        *("eagle3", "eagle3 tree of 8", "early_exit"),
    ]
    assert "early_exit tree of 8 is left out: it drafts a chain." in capsys.readouterr().out
    for name in ("eagle3", model):
        assert rows[f"{name} tree of 8"].nodes == {1: 4, 2: 8, 3: 8}
        assert rows[name].nodes == {1: 1, 2: 2, 3: 3}
        assert rows[f"{name} tree of 8"].weights == rows[name].weights
        assert rows[f"{name} tree of 8"].training_flop == rows[name].training_flop
    parallel = rows[f"{model} parallel"]
    assert (parallel.kind, parallel.draft_shape, parallel.nodes) == (
        "parallel",
        "chain",
        rows[model].nodes,
    )
    assert parallel.one_pass and not rows[model].one_pass
    assert parallel.training_flop > rows[model].training_flop, "it reads mask tokens too"
    assert parallel.weights != rows[model].weights


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_head_drafts_a_chain_with_random_weights(
    name: str, home: Path, tmp_path: Path
):
    asked = config(home, "", depths=[], heads=[name])
    target = target_config(asked.target)
    (one,) = candidates(asked, target)
    one.write(tmp_path / "head")
    drafter = one.load(tmp_path / "head", open_target(asked, target))
    assert drafter.capabilities.shape == "chain"
    assert one.flops_a_token > 0
