"""`eval.plan` as a job: its rows, advice, page and picture."""

import dataclasses
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoding.costs.contention import disturbance
from decoding.costs.prediction import best_gamma, expected_tokens, predicted_speedup
from decoding.interfaces import RoundCosts
from eval.plan.candidates import candidates
from eval.plan.costs import FILE, MeasuredCosts
from eval.plan.curves import read_curves, write_curves
from eval.plan.job import PAGE
from eval.plan.plots import needed_and_accepted, plan_plots
from eval.plan.report import advice, notes_of, plan_table
from eval.plan.rows import MEASURED, PREDICTED, Need, Outlook, PlanRow, build_outlook, ranked
from jobs.amounts import operations
from jobs.run_files import journal_bytes, read_journal_lines
from tests.support.plans import NAMES, again, config, curve, rows_in
from training.models.build import target_config


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


def test_nothing_is_concluded_from_unreliable_costs(home: Path):
    asked = config(home, "")
    found = candidates(asked, target_config(asked.target))
    measured = read_journal_lines(home / "planned" / FILE, MeasuredCosts.read).records
    shallow, deep = NAMES[:2]
    doubt = "Unreliable costs, as others ran: "
    remedy = "Nothing is concluded from them: plan again with remeasure=true on an idle machine."

    def planned(
        unreliable: str, disturbed: list[str], alpha: float = 0.0, factor: float = 1.0
    ) -> Outlook:
        """Plan with rounds of the disturbed drafters that are shorter than their parts.

        factor: of their target times.
        """
        costs = []
        for name, one in zip(NAMES, measured, strict=True):
            draft_ms = 0.2 if name in (shallow, deep) else 2.0
            made = RoundCosts(draft_ms, (1.0,) * len(one.costs.t_target_ms), 0.0, 0.0)
            if name in disturbed:
                slow = tuple(factor * ms for ms in made.t_target_ms)
                changes = {"t_target_ms": slow, "overhead_ms": -0.9, "unreliable": unreliable}
                made = dataclasses.replace(made, **changes)
            costs.append(dataclasses.replace(one, costs=made))
        known = [curve(home, "chain", 1, alpha), curve(home, "medusa", 0, alpha)] if alpha else []
        return build_outlook(asked, [*zip(found, costs, strict=True)], known, 1.0)

    def advised(unreliable: str, disturbed: list[str], alpha: float = 0.0) -> str:
        outlook = planned(unreliable, disturbed, alpha)
        last = plan_table(outlook, asked).column("drafter")[-len(disturbed) :]
        assert not unreliable or {*last} == {*disturbed}
        return " ".join(advice(outlook, asked))

    assert f"{deep} needs the least: an acceptance rate of 0.00" in advised("", [deep]), "a control"
    out = advised("others ran", [deep])
    assert f"{doubt}{deep}. {remedy}" in out
    assert f"{shallow} needs the least: " in out and "rate of 0.00" not in out

    outlook = planned("", [deep])
    shares = {shallow: disturbance(0.33), deep: disturbance(0.31), "medusa": "others ran"}
    busy = [
        dataclasses.replace(row, unreliable=shares.get(row.drafter, "")) for row in outlook.rows
    ]
    lines = advice(dataclasses.replace(outlook, rows=busy), asked)
    share = "beside other processes, the measurement had its processors for only 31 to 33 % of the"
    assert [line.split(" Nothing")[0] for line in lines[:2]] == [
        f"Unreliable costs, as {share} time: {shallow}, {deep}.",
        f"{doubt}medusa.",
    ]
    assert advice(dataclasses.replace(outlook, rows=busy[:3]), asked) == [
        f"Nothing is concluded: {share} time, and others ran, so the costs of all 3 drafters are "
        f"unreliable. Plan again with remeasure=true on an idle machine."
    ]

    assert f"Train {deep}: " in advised("", [deep], 0.7), "a control"
    out = advised("others ran", [deep], 0.7)
    assert f"Fastest of the trained drafters: {shallow}, " in out and doubt in out
    assert f"Train {deep}: " not in out
    assert "faster: train nothing until then." in advised("others ran", [deep, "eagle3"], 0.7)
    out = advised("others ran", NAMES, 0.7)
    assert out.startswith("Nothing is concluded: others ran, so the costs of all 4 drafters")
    assert "Fastest of" not in out and "Train " not in out

    def tripled(unreliable: str) -> tuple[float, float | None, dict[int, float]]:
        outlook = planned(unreliable, NAMES[1:], 0.7, factor=3.0)
        pace = outlook.baseline_tokens_per_second
        return pace, outlook.rows[0].tokens_per_second, outlook.V

    untouched = planned("others ran", [deep], 0.7)
    expected = (1000.0, untouched.rows[0].tokens_per_second, untouched.V)
    assert tripled("others ran") == expected
    assert tripled("")[0] < 400, "a control: the times of reliable rows count"

    def shown(unreliable: str, disturbed: list[str]) -> tuple[list[str], set[str]]:
        """Return the table's cells of the deep model, and what the later pictures name."""
        outlook = planned(unreliable, disturbed, 0.7)
        table = plan_table(outlook, asked)
        place = table.column("drafter").index(deep + " *" * (not unreliable))
        cells = [table.column(name)[place] for name in ("c", "gamma", "speedup", "tokens/s")]
        assert table.title.endswith(" tokens/s without a drafter") == (disturbed != NAMES)
        drawn = [plot.figure.axes[0] for plot in plan_plots(outlook, [1.0, 1.2])[1:]]
        return cells, {name for axes in drawn for name in axes.get_legend_handles_labels()[1]}

    cells, names = shown("others ran", [deep])
    assert cells == ["–", "–", "unreliable", "unreliable"]
    assert {*NAMES} - names == {deep}
    cells, names = shown("", [deep])
    assert "–" not in cells and "unreliable" not in cells and {*NAMES} <= names, "a control"
    assert shown("others ran", NAMES) == ([""] * 4, set())
    assert plan_plots(planned("others ran", NAMES, 0.7), [1.0, 1.2]) == []


@pytest.mark.parametrize("reliable", [False, True], ids=["empty", "a control"])
def test_an_empty_plan_says_once_that_nothing_is_concluded(
    reliable: bool, home: Path, tmp_path: Path, capsys: Any
):
    """Check the terminal and the page: one sentence, a table without figures from costs, no more.

    Control: one drafter with reliable costs.
    """
    measured = read_journal_lines(home / "planned" / FILE, MeasuredCosts.read).records
    lines = [dataclasses.asdict(one) for one in measured]
    for number, line in enumerate(lines):
        line["costs"]["unreliable"] = "" if reliable and not number else disturbance(0.3)
    given = tmp_path / FILE
    given.write_bytes(journal_bytes(lines))
    write_curves(tmp_path / "acceptance.jsonl", [curve(home, "medusa", 0, 0.7)])
    acceptance = str(tmp_path / "acceptance.jsonl")
    capsys.readouterr()
    asked = {"costs": str(given), "acceptance": acceptance, "assumed_tflops": 0.0}
    folder = again(home, tmp_path, **asked)
    page = unescape((folder / PAGE).read_text().split("<body>")[1])
    out = " ".join(capsys.readouterr().out.split())  # lines break where the folder's name ends
    conclusion = "processors for only 30 % of the time, so the costs of all 4 drafters are"
    for shown in (out, page):
        assert shown.count("Nothing is concluded: ") == shown.count(conclusion) == (not reliable)
        assert shown.count("unreliable") == 1 or reliable
        assert ("needs" in shown) == ("gamma" in shown) == ("matrix products" in shown) == reliable
        assert ("tokens/s without a drafter" in shown) == reliable
        assert "accepted" in shown and all(name in shown for name in NAMES)
    assert ("What to train" in page) == ("Pictures" in page) == reliable
    assert page.count(f"{home / 'target'}, float32, greedy") == 1, "the lead is not repeated"


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
    assert one.alpha_by_depth == pytest.approx([0.7] * 3, 1e-2)
    assert one.alpha_low[2] < one.alpha_low[0] < 0.7 < one.alpha_high[0] < one.alpha_high[2]
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
    fast = dataclasses.replace(  # all that a noisy measurement may have left out
        rows[0],
        unreliable="",
        predicted_speedup=9.0,
        speedup_low=8.0,
        speedup_high=9.0,
        acceptance=PREDICTED,
    )
    outlook = Outlook([fast], read_curves(file), 0.1, 0, (1, 1), 1.0, {1: 1.0}, 0.25)
    (line,) = advice(outlook, asked)
    assert " at the 0.25 TFLOP/s of this machine's matrix products." in line
    (line,) = advice(outlook, dataclasses.replace(asked, assumed_tflops=100.0))
    assert line.endswith(" at 100 TFLOP/s.") and "at least" not in line


@pytest.mark.long
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


def test_a_point_is_not_below_a_line_where_its_drafter_reaches_the_speedup(home: Path):
    """Compare the second picture with the costs, the table and the first picture."""
    asked = config(home, "", speedups=[0.9, 1.05, 1.3, 2.0])
    target = tuple(1 + 0.1 * n for n in range(7))
    parts = dict(zip(NAMES, [(0.1, 0.0), (0.6, 0.1), (0.1, 0.9), (0.6, 0.4)], strict=True))
    measured = [
        dataclasses.replace(
            one,
            costs=RoundCosts(draft_ms, target, overhead_ms, 0.05),
            nodes={1: 2, 2: 4, 3: 6} if name == "eagle3" else one.nodes,  # as in a tree
        )
        for one, (name, (draft_ms, overhead_ms)) in zip(
            read_journal_lines(home / "planned" / FILE, MeasuredCosts.read).records,
            parts.items(),
            strict=True,
        )
    ]
    falling = {"alpha_by_depth": [0.8, 0.6, 0.4]}
    known = [curve(home, "chain", 1, 0.8, **falling), curve(home, "medusa", 0, 0.8, **falling)]
    found = candidates(asked, target_config(asked.target))
    outlook = build_outlook(asked, [*zip(found, measured, strict=True)], known, 1.0)
    (axes,) = plan_plots(outlook, asked.speedups)[1].figure.axes
    lines = {str(line.get_label()): np.transpose(line.get_data()) for line in axes.lines}
    sides = []
    for row, one, drawn in zip(outlook.rows, measured, axes.containers, strict=True):
        gamma, costs = row.num_draft_tokens or 0, one.ratios
        ((x, y),) = np.transpose(drawn[0].get_data())
        assert x == pytest.approx(costs.round(gamma) / (1 + costs.baseline_overhead))
        assert y == expected_tokens(row.alpha_by_depth, gamma)
        low, high = drawn[2][0].get_segments()[0][:, 1]
        compared = (
            (y, row.predicted_speedup, row.equal_alpha),
            (low, row.speedup_low, row.equal_alpha_low),
            (high, row.speedup_high, row.equal_alpha_high),
        )
        for need in row.needs:
            at, heights = np.transpose(lines[f"{need.speedup:g}x"])
            assert at[0] < x < at[-1], "the line reaches the point"
            for tokens, speedup, rate in compared:
                reached = bool(tokens >= np.interp(x, at, heights))
                assert speedup is not None and reached == (speedup >= need.speedup)
                if rate is not None:
                    assert reached == (need.alpha is not None and rate >= need.alpha)
                sides.append(reached)
    assert 5 < sum(sides) < len(sides) - 5, "a control: points and bars lie on both sides"


def test_the_picture_of_trainings_has_the_unit_of_the_table(home: Path, tmp_path: Path):
    file = tmp_path / "acceptance.jsonl"
    known = [curve(home, "chain", 1, 0.7), curve(home, "medusa", 0, 0.6)]
    write_curves(file, known)
    found = rows_in(again(home, tmp_path, acceptance=str(file)))
    for flop, unit in ((2e12, "TFLOP"), (3e15, "PFLOP")):
        rows = [dataclasses.replace(row, unreliable="", training_flop=flop) for row in found]
        outlook = Outlook(rows, known, 0.1, 0, (1, 1), 1.0, {1: 1.0}, 1.0)
        axes = plan_plots(outlook, [1.0])[3].figure.axes[0]
        assert axes.get_xlabel() == f"{unit} of training"
        drawn = float(axes.containers[0][0].get_xdata()[0])
        assert f"{drawn:.1f} {unit}" == operations(flop)


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
    doubtful = dataclasses.replace(other, speedup_low=0.9)
    assert "may slow decoding down" in " ".join(advice(outlook(chain, doubtful), asked))
    assert "may slow decoding down" not in " ".join(lines), "a control: both bounds are above 1x"
    assert any(line.startswith("Evaluate its tree, whose weights are trained: ") for line in lines)
    untrained = dataclasses.replace(tree, layers=3, trained=False)
    lines = advice(outlook(chain, other, untrained), asked)
    assert any(line.startswith("Or, for less training, train its tree: ") for line in lines)
    assert not any("Evaluate" in line for line in lines), "a control: other weights"
    notes = " ".join(notes_of(outlook(chain, tree)))
    assert "No tree of this target was evaluated yet" in notes
    assert "No tree" not in " ".join(notes_of(outlook(chain, other)))
