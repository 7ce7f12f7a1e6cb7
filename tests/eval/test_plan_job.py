"""`eval.plan` as a job: measured costs, its rows and page, resuming, and what it refuses."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from decoding.costs.prediction import best_gamma, predicted_speedup
from decoding.errors import UserError
from decoding.models.folder import hash_input
from eval.measure import parts
from eval.plan import costs as plan_costs
from eval.plan.candidates import candidates
from eval.plan.config import PlanConfig
from eval.plan.costs import FILE, MeasuredCosts, open_target
from eval.plan.curves import Curve, collect, merge, read_curves, write_curves
from eval.plan.job import PAGE, ROWS, run
from eval.plan.plots import needed_and_accepted
from eval.plan.report import advice, notes_of
from eval.plan.rows import MEASURED, PREDICTED, Need, Outlook, PlanRow, ranked, row_of
from eval.report.plots import Plot
from eval.run import run as evaluate
from eval.statistics.schema import read_rows
from heads.registry import KINDS
from jobs.config import TargetConfig
from jobs.run_files import journal_bytes, read_journal_lines
from tests.support import tiny_folders as tiny
from training.models.build import target_config

NAMES = ["1 layer, width 32", "2 layers, width 32", "medusa", "eagle3"]


def config(home: Path, name: str, **changes: Any) -> PlanConfig:
    """Return a plan for the target in `home`."""
    values = {
        "job": "eval.plan",
        "output_dir": str(home / name),
        "target": TargetConfig(path=str(home / "target"), device="cpu", execution="eager"),
        "depths": [1, 2],
        "heads": ["medusa", "eagle3"],
        "max_draft_tokens": 3,
        "context": 24,
        "cost_seconds": 0.01,
        "assumed_tflops": 100.0,
        "acceptance": str(home / "acceptance.jsonl"),
        "runs": [],
    }
    return PlanConfig(**{**values, **changes})


def rows_in(folder: Path) -> list[PlanRow]:
    """Return the rows of a plan."""
    return [row_of(json.loads(line)) for line in (folder / ROWS).read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no pictures, which take most of the time."""
    monkeypatch.setattr(Plot, "svg", "")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target, and a plan for it in `planned`."""
    folder = tmp_path_factory.mktemp("plan")
    tiny.save(folder / "target")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Plot, "svg", "")
        run(config(folder, "planned"))
    return folder


def curve(home: Path, kind: str, layers: int, alpha: float, **changes: Any) -> Curve:
    """Return a measured acceptance of the target in `home`."""
    values: dict[str, Any] = {
        "target": str(home / "target"),
        "target_hash": hash_input(home / "target"),
        "drafter": kind,
        "drafter_hash": f"{kind} {layers}",
        "kind": kind,
        "draft_shape": "chain",
        "drafter_class": "",
        "stopping": "fixed",
        "layers": layers,
        "hidden_size": 32 if layers else 0,
        "draft_vocab_size": 0,
        "training_tokens": 1_000_000,
        "temperature": 0.0,
        "alpha_by_depth": [alpha, alpha, alpha],
        "tested_by_depth": [900, 800, 700],
        "benchmark": "prompts",
        "source": "eval.run",
    }
    return Curve(**{**values, **changes})


def again(home: Path, tmp_path: Path, **changes: Any) -> Path:
    """Plan once more from the measured costs of `planned`, with other settings."""
    given = {"costs": str(home / "planned" / FILE), "output_dir": str(tmp_path / "again")}
    return run(config(home, "", **{**given, **changes}))


def test_without_acceptances_every_drafter_has_its_need(home: Path, capsys: Any):
    rows = rows_in(home / "planned")
    assert [row.drafter for row in rows] == NAMES
    for row in rows:
        assert row.acceptance == ""
        assert row.predicted_speedup is None
        assert [one.speedup for one in row.needs] == [1.0, 1.2]
        assert row.cost_ratio > 0
        assert row.V[1] == 1
        assert row.training_flop == pytest.approx(row.training_hours * 3600 * 1e14)
    deep, shallow = rows[1], rows[0]
    assert deep.parameters > shallow.parameters
    assert deep.training_flop > shallow.training_flop
    assert deep.memory_bytes > shallow.memory_bytes
    sizes = {row.drafter: (row.memory_bytes, 4 * row.parameters) for row in rows}
    assert sizes["medusa"][0] == sizes["medusa"][1], "its heads store nothing of the text"
    assert sizes["eagle3"][0] > sizes["eagle3"][1], "a control: its layer has keys and values"
    page = (home / "planned" / PAGE).read_text()
    assert all(name in page for name in NAMES)
    assert "needs the least" in page


def test_the_needed_acceptance_gives_the_speedup_in_the_plan_too(home: Path):
    file = home / "planned" / FILE
    measured = read_journal_lines(file, MeasuredCosts.read).records
    for row, one in zip(rows_in(home / "planned"), measured, strict=True):
        for need in row.needs:
            if need.alpha is not None and need.alpha > 1e-9:
                assert need.num_draft_tokens is not None
                found = predicted_speedup([need.alpha], need.num_draft_tokens, one.ratios)
                assert found == pytest.approx(need.speedup, abs=1e-9)


def test_the_best_length_is_the_argmax_over_lengths(home: Path, tmp_path: Path):
    file = tmp_path / "acceptance.jsonl"
    write_curves(file, [curve(home, "chain", 1, 0.9), curve(home, "medusa", 0, 0.6)])
    rows = rows_in(again(home, tmp_path, acceptance=str(file)))
    measured = read_journal_lines(home / "planned" / FILE, MeasuredCosts.read).records
    for row, one in zip(rows, measured, strict=True):
        speeds = row.speedup_by_length
        assert row.num_draft_tokens == max(speeds, key=lambda n: (speeds[n], -n))
        assert row.predicted_speedup == max(speeds.values())
        best = best_gamma(row.alpha_by_depth, one.ratios)
        assert best == (row.num_draft_tokens, pytest.approx(row.predicted_speedup))
        assert sorted(speeds) == list(range(1, max(speeds) + 1))


def test_measured_and_predicted_acceptances_are_distinct(home: Path, tmp_path: Path, capsys: Any):
    file = tmp_path / "acceptance.jsonl"
    known = [curve(home, "chain", 1, 0.7), curve(home, "medusa", 0, 0.6)]
    write_curves(file, [*known, curve(home, "eagle3", 0, 0.5, target="other", target_hash="0")])
    rows = {row.drafter: row for row in rows_in(again(home, tmp_path, acceptance=str(file)))}
    assert [rows[name].acceptance for name in NAMES] == [MEASURED, PREDICTED, MEASURED, PREDICTED]
    one = rows["1 layer, width 32"]
    assert one.alpha_by_depth == one.alpha_low == one.alpha_high == pytest.approx([0.7] * 3, 1e-2)
    other = rows["eagle3"]
    assert other.alpha_low[0] < other.alpha_by_depth[0] < other.alpha_high[0]
    assert other.speedup_low is not None and other.predicted_speedup is not None
    assert other.speedup_low <= other.predicted_speedup <= (other.speedup_high or 0)
    restricted = dataclasses.replace(known[0], draft_vocab_size=5)
    write_curves(file, [restricted, known[1]])
    one = rows_in(again(home, tmp_path, acceptance=str(file)))[0]
    assert one.acceptance == PREDICTED, "the plan's drafter proposes all tokens"
    assert "~0." in capsys.readouterr().out


def test_without_an_assumption_trainings_take_the_least_time_of_this_machine(
    home: Path, tmp_path: Path, capsys: Any
):
    file = tmp_path / "acceptance.jsonl"
    write_curves(file, [curve(home, "medusa", 0, 0.1), curve(home, "chain", 2, 0.9)])
    given = {"acceptance": str(file), "assumed_tflops": 0.0, "cost_seconds": 0.4}
    rows = rows_in(again(home, tmp_path, **given))
    (rate,) = {round(row.training_flop / row.training_hours / 3600 / 1e6) for row in rows}
    assert 1e9 < 1e6 * rate < 1e15, "FLOP/s of a machine"
    asked = config(home, "", **given)
    fast = dataclasses.replace(
        rows[0], unreliable="", predicted_speedup=9.0, speedup_high=9.0, acceptance=PREDICTED
    )
    outlook = Outlook([fast], read_curves(file), 0.1, 0, (1, 1), 1.0, {1: 1.0}, 0.25)
    (line,) = advice(outlook, asked)
    assert " at the 0.25 TFLOP/s of this machine's matrix products." in line
    (line,) = advice(outlook, dataclasses.replace(asked, assumed_tflops=100.0))
    assert line.endswith(" at 100 TFLOP/s.") and "at least" not in line


def test_more_measured_acceptance_never_lowers_the_predicted_speed(home: Path, tmp_path: Path):
    speeds = []
    for number, alpha in enumerate((0.2, 0.5, 0.8, 0.95)):
        file = tmp_path / f"{number}.jsonl"
        write_curves(file, [curve(home, "chain", 1, alpha)])
        folder = again(home, tmp_path / str(number), acceptance=str(file))
        speeds.append(rows_in(folder)[0].tokens_per_second or 0)
    assert speeds == sorted(speeds)
    assert speeds[-1] > 1.5 * speeds[0], "a control: the acceptance counts"


def test_a_drafter_pays_where_its_acceptance_reaches_what_it_needs(home: Path, tmp_path: Path):
    """Check the rates, equal at all depths, that the picture compares."""
    file = tmp_path / "acceptance.jsonl"
    falling = {"alpha_by_depth": [0.9, 0.5, 0.1]}
    write_curves(
        file, [curve(home, "chain", 1, 0.9, **falling), curve(home, "medusa", 0, 0.9, **falling)]
    )
    asked = {"speedups": [0.2, 0.6, 1.0, 1.6, 9.0], "acceptance": str(file)}
    paying = []
    for row in rows_in(again(home, tmp_path, **asked)):
        assert row.predicted_speedup is not None and row.equal_alpha is not None
        assert (row.equal_alpha_low or 0) <= row.equal_alpha <= (row.equal_alpha_high or 0)
        if row.acceptance == MEASURED and row.num_draft_tokens != 1:
            assert row.equal_alpha < 0.89, "a control: the rate at depth 1 is not compared"
        for one in row.needs:
            pays = one.alpha is not None and row.equal_alpha >= one.alpha
            assert pays == (row.predicted_speedup >= one.speedup)
            paying.append(pays)
    assert 0 < sum(paying) < len(paying)


def test_the_picture_shows_needed_and_known_acceptances(home: Path, tmp_path: Path):
    file = tmp_path / "acceptance.jsonl"
    write_curves(file, [curve(home, "chain", 1, 0.7), curve(home, "medusa", 0, 0.6)])
    found = rows_in(again(home, tmp_path, acceptance=str(file), speedups=[0.1, 0.2]))
    rows = [dataclasses.replace(row, unreliable="") for row in found]
    doubtful = dataclasses.replace(rows[1], unreliable="the machine was busy")
    never = dataclasses.replace(rows[0], needs=[Need(9.0, None, None)] * 2)

    def drawn(rows: list[PlanRow]) -> tuple[list[str], list[str]]:
        outlook = Outlook(rows, [], 0.1, 0, (1, 1), 1.0, {1: 1.0}, 1.0)
        plot = needed_and_accepted(outlook, [0.1, 0.2])
        (axes,) = plot.figure.axes
        names = [one.get_text().replace("\n", " ") for one in axes.get_yticklabels()]
        assert names == [row.drafter for row in ranked(rows)]
        labels = [str(one.get_label()) for one in axes.containers]
        return sorted(labels), [text.get_text() for text in axes.texts]

    needs = ["needs for 0.1x"]
    assert drawn(rows) == (["measured"] * 2 + needs * 4 + ["predicted"] * 2, [])
    assert drawn([rows[0], doubtful, *rows[2:]])[1] == ["unreliable costs"]
    assert drawn([never, *rows[1:]]) == (
        ["measured"] * 2 + needs * 3 + ["predicted"] * 2,
        ["never 0.1x"],
    )


# ----------------------------------------------------------------------------------------- resuming
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


def test_all_shapes_of_drafts_are_planned(home: Path, tmp_path: Path, capsys: Any):
    """Plan pruned models as chains, trees and PARD, and the trees of heads that grow them."""
    heads = ["eagle3", "early_exit"]
    asked = config(home, "", output_dir=str(tmp_path / "shapes"), depths=[1], heads=heads,
                   shapes=["chain", "tree", "parallel"])  # fmt: skip
    rows = {row.drafter: row for row in rows_in(run(asked))}
    model = "1 layer, width 32"
    assert list(rows) == [
        *(model, f"{model} tree", f"{model} parallel"),
        *("eagle3", "eagle3 tree", "early_exit"),
    ]
    assert "early_exit tree is left out" in capsys.readouterr().out
    for name in ("eagle3", model):
        assert rows[f"{name} tree"].nodes[2] > 2
        assert rows[name].nodes == {1: 1, 2: 2, 3: 3}
        assert rows[f"{name} tree"].weights == rows[name].weights
        assert rows[f"{name} tree"].training_flop == rows[name].training_flop
    parallel = rows[f"{model} parallel"]
    assert (parallel.kind, parallel.draft_shape, parallel.nodes) == (
        "parallel",
        "chain",
        rows[model].nodes,
    )
    assert parallel.one_pass and not rows[model].one_pass
    assert parallel.training_flop > rows[model].training_flop, "it reads mask tokens too"
    assert parallel.weights != rows[model].weights


def test_a_tree_of_trained_weights_needs_no_training(home: Path, tmp_path: Path):
    file = tmp_path / "acceptance.jsonl"
    write_curves(file, [curve(home, "chain", 1, 0.7), curve(home, "medusa", 0, 0.6)])
    asked = config(home, "", acceptance=str(file))
    found = rows_in(again(home, tmp_path, acceptance=str(file)))

    def outlook(*rows: PlanRow) -> Outlook:
        return Outlook([*rows], read_curves(file), 0.1, 0, (1, 1), 1.0, {1: 1.0}, 1.0)

    def with_speed(row: PlanRow, speedup: float, **changes: Any) -> PlanRow:
        speeds = {"predicted_speedup": speedup, "speedup_low": speedup, "speedup_high": 2.2}
        return dataclasses.replace(row, unreliable="", **speeds, **changes)

    chain, other = with_speed(found[0], 1.1), with_speed(found[1], 2.0)
    tree = with_speed(found[0], 1.5, drafter="its tree", draft_shape="tree", acceptance=PREDICTED)
    assert (chain.acceptance, other.acceptance) == (MEASURED, PREDICTED)
    lines = advice(outlook(chain, other, tree), asked)
    assert any(line.startswith("Train 2 layers, width 32: 2.00x") for line in lines)
    assert any(line.startswith("Evaluate its tree, whose weights are trained: ") for line in lines)
    untrained = dataclasses.replace(tree, layers=3)
    lines = advice(outlook(chain, other, untrained), asked)
    assert any(line.startswith("Or, for less training, train its tree: ") for line in lines)
    assert not any("Evaluate" in line for line in lines), "a control: other weights"
    notes = " ".join(notes_of(outlook(chain, tree)))
    assert "No tree of this target was evaluated yet" in notes
    assert "No tree" not in " ".join(notes_of(outlook(chain, other)))


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


# ---------------------------------------------------------------------------------------- bad input
def other_architecture(home: Path) -> Path:
    folder = home / "gpt2"
    folder.mkdir(exist_ok=True)
    values = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown head": ({"heads": ["egale3"]}, "'egale3' is no kind of head.*nearest is 'eagle3'"),
    "a head twice": ({"heads": ["medusa", "medusa"]}, "medusa would be planned twice"),
    "a wider model": ({"widths": [64]}, "student.hidden_size is 64, expected at most"),
    "an odd shape": ({"shapes": ["bush"]}, "shapes is .*bush.*one or more of chain, tree, paral"),
    "parallel heads": ({"shapes": ["parallel"], "depths": []}, "parallel is for pruned models al"),
    "one parallel token": (
        {"shapes": ["parallel"], "max_draft_tokens": 1},
        "max_draft_tokens is 1, expected 2 or more with shapes=parallel",
    ),
    "no drafter": ({"heads": [], "depths": []}, "combine to no drafter"),
    "no layer": ({"depths": [0]}, "depths is .*expected whole numbers from 1 up"),
    "a large batch": ({"batch_size": 10**8}, "rows of 90 tokens.*are free. Lower batch_size"),
    "a long context": ({"context": 250}, "context is 250, expected at most 190"),
    "a speedup of 0": ({"speedups": [0.0]}, "speedups is .*expected one or more numbers above 0"),
    "a slow training": ({"assumed_tflops": -1.0}, "assumed_tflops is -1.*0 for this machine's"),
    "a cold temperature": ({"temperature": -1.0}, "temperature is -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused_before_anything_is_measured(
    name: str, home: Path, tmp_path: Path
):
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        run(config(home, "", **{"output_dir": str(tmp_path / "refused"), **changes}))
    assert not (tmp_path / "refused").exists()


def test_a_target_of_another_architecture_is_refused(home: Path, tmp_path: Path):
    target = TargetConfig(path=str(other_architecture(tmp_path)), device="cpu")
    with pytest.raises(UserError, match="of the family 'gpt2', expected one of llama"):
        run(config(home, "", output_dir=str(tmp_path / "refused"), target=target))


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


def test_a_dry_run_writes_nothing(home: Path, tmp_path: Path, capsys: Any):
    run(config(home, "", output_dir=str(tmp_path / "dry"), dry_run=True, training_tokens=10**6))
    assert not (tmp_path / "dry").exists()
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    assert "would measure 4 drafters" in out


def test_runs_are_added_to_the_file_of_acceptances(home: Path, tmp_path: Path):
    """Use the finished training of the fixtures, whose target is another."""
    finished = Path(__file__).parent.parent / "fixtures" / "distill.train" / "finished"
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
    monkeypatch.setattr(parts, "COST_WINDOWS", 1)  # times do not matter here
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
    monkeypatch.setattr(parts, "COST_WINDOWS", 1)  # times do not matter here
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
