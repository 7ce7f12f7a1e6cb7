"""Laws of comparisons: Pareto fronts, iso-speedup curves and paired speedups.

The runs are SIMULATED, with known results.
"""

import dataclasses
import json

import numpy as np
import pytest

from decoding.costs.prediction import Costs, best_gamma, expected_tokens, iso_cost_ratio
from eval.report.comparison_plots import iso_speedup_curves
from eval.report.comparison_tables import differences_table
from eval.statistics import metrics
from eval.statistics.comparison.panels import chains, pareto_front, usual_costs
from eval.statistics.schema import main_rows, read_rows
from tests.support import simulated_runs
from tests.support.simulated_comparisons import SHALLOW, evaluations_of, lines, panels, three


def dominates(one, other):
    return one[0] <= other[0] and one[1] >= other[1] and one != other


def check_front(points, marks):
    """Assert that the front is exactly the set of points that no other point dominates.

    A point on the front dominates each of the others.
    """
    front = [point for point, marked in zip(points, marks, strict=True) if marked]
    for point, marked in zip(points, marks, strict=True):
        assert marked != any(dominates(other, point) for other in front)
        assert not marked or not any(dominates(other, point) for other in points)


def test_the_pareto_front_holds_exactly_the_undominated_points():
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = [
            (int(cost), float(gain))
            for cost, gain in zip(rng.integers(0, 6, 12), rng.integers(0, 6, 12), strict=True)
        ]
        marks = pareto_front(points)
        check_front(points, marks)
        # control: a changed mark breaks the law, unless two points are equal
        for index in range(len(points)):
            if points.count(points[index]) == 1:
                with pytest.raises(AssertionError):
                    check_front(
                        points, [mark != (place == index) for place, mark in enumerate(marks)]
                    )


COSTS = Costs(
    0.3, {n: 1 + 0.05 * (n - 1) for n in range(1, 10)}, overhead=0.08, baseline_overhead=0.03
)


def closed_form(alpha, c):
    """Return the best speedup over draft lengths k from 1 to 8, from its formula.

    The speedup is E (1 + o_1) / (k c + V(k+1) + o), with E = (1 - alpha^(k+1)) / (1 - alpha) and
    the values of COSTS.
    """
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
        if c <= 0:  # too low an acceptance rate for that speedup, even at no cost
            assert closed_form(alpha, 0.0) <= speedup + 1e-9
            continue
        on_plot += 1
        assert closed_form(alpha, c) == pytest.approx(speedup)
        assert best_gamma([alpha], dataclasses.replace(COSTS, cost_ratio=c))[1] == pytest.approx(
            speedup
        )
        assert closed_form(alpha, 1.2 * c) < speedup < closed_form(alpha, 0.8 * c), (
            "and no other point is on the curve"
        )
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
            found = best_gamma([alpha_A[index]], dataclasses.replace(costs, cost_ratio=c_A[index]))[
                1
            ]
            assert found == pytest.approx(level)
    assert expected_tokens([0.5], 1) == 1.5


@pytest.mark.long
def test_the_comparison_has_every_row_of_the_runs_once(runs, compared):
    key = ("drafter", "temperature", "batch_size", "num_draft_tokens")
    read = [
        (label, *(vars(row)[name] for name in key), row.speedup, row.alpha)
        for label in ("one", "four", "six")
        for row in main_rows(read_rows(runs / label / "eval.run" / "results.jsonl"))
    ]
    found = [
        (line["run"], *(line[name] for name in key), line["speedup"], line["alpha"])
        for line in lines(compared)
    ]
    assert sorted(found) == sorted(read)
    assert len(set(found)) == len(found) == 12


def test_fronts_of_a_comparison_obey_the_law(compared):
    for condition in {line["condition"] for line in lines(compared)}:
        here = [line for line in lines(compared) if line["condition"] == condition]
        for cost, mark in (
            ("drafter_parameters", "pareto_parameters"),
            ("training_tokens", "pareto_training_tokens"),
        ):
            assert all(line[mark] is not None for line in here)
            check_front(
                [(line[cost], line["counted_speedup"]) for line in here],
                [line[mark] for line in here],
            )


def test_one_speedup_over_another_is_paired_over_prompts_and_runs(tmp_path, runs):
    one, four = panels(*three(runs)[:2])[1].compared[0], panels(*three(runs)[:2])[1].compared[2]
    assert one.entry.name == "simulated-1" and four.rival.name == "simulated-1"
    assert four.shared == 20
    assert four.ratio.value == pytest.approx(four.entry.speedup.value / one.entry.speedup.value)
    assert four.ratio.low < four.ratio.value < four.ratio.high
    same = simulated_runs.write(tmp_path / "again" / "eval.run", SHALLOW, seed=0, slower=2.0)
    twin = next(
        s
        for s in panels(three(runs)[0], same)[1].compared
        if s.entry.folder == str(same) and s.entry.row.drafter == "simulated-1"
    )
    assert twin.ratio.value == pytest.approx(1.0)
    assert (twin.ratio.low, twin.ratio.high) == pytest.approx((1.0, 1.0)), (
        "a slower machine slows its baseline too"
    )
    assert twin.entry.row.tokens_per_second == pytest.approx(one.entry.row.tokens_per_second / 2), (
        "control: tokens/s are not"
    )


def test_pairing_cancels_the_difficulty_of_prompts():
    """Check that pairing by prompt narrows the interval to less than a fifth.

    Prompts are easy or hard for both drafters alike. Control: shuffled prompts give a wide
    interval.
    """
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
    assert dataclasses.astuple(duel) == pytest.approx(dataclasses.astuple(paired)), (
        "with one baseline both intervals agree"
    )
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
    # Records without a checksum, as in runs of earlier versions.
    lines = [
        {key: value for key, value in json.loads(line).items() if key != "crc32"}
        for line in records.splitlines()
    ]
    (tmp_path / "other" / "records.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines)
    )
    found = panels(three(runs)[0], tmp_path / "other")
    compared = next(s for s in found[1].compared if s.entry.row.drafter == "simulated-4")
    assert compared.ratio is None and compared.rival.name == "simulated-1"
    table = differences_table(found, evaluations_of(three(runs)[0], tmp_path / "other"))
    assert any("only shared prompts are compared" in cells for cells in table.rows)
