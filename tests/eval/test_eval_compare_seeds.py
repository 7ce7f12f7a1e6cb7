"""Comparisons of runs that differ in their seed, on SIMULATED runs with known results."""

import dataclasses
from statistics import mean

import pytest

from eval.report.comparison_plots import depth, styles_of_entries
from eval.report.comparison_tables import seeds_table
from eval.report.page import Provenance, comparison_page
from eval.report.plots import shift
from eval.report.terminal import print_comparison
from eval.statistics.comparison.entries import entries_of
from eval.statistics.comparison.panels import panels_of
from tests.support import simulated_runs
from tests.support.simulated_comparisons import DEEP, SHALLOW, evaluations_of

SEEDS = (3, 4, 5)


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory):
    """Three runs of the same two drafters, each with another seed."""
    home, found = tmp_path_factory.mktemp("seeds"), []
    folders = [
        simulated_runs.write(home / f"seed={seed}" / "eval.run", SHALLOW | DEEP, seed=seed)
        for seed in SEEDS
    ]
    for seed, one in zip(SEEDS, evaluations_of(*folders), strict=True):
        found.append(with_seed(one, seed))
    return found


def with_seed(evaluation, seed, **changes):
    rows = [dataclasses.replace(row, seed=seed, **changes) for row in evaluation.rows]
    return dataclasses.replace(evaluation, rows=rows)


def panels(evaluations):
    return panels_of(entries_of(evaluations, "headline"), 50, 0)


def cells(table, column):
    return table.column(column)


def test_runs_of_other_seeds_have_their_means_in_a_table(evaluations):
    for panel in panels(evaluations):
        table = seeds_table(panel)
        assert table.title == "Means over the seeds 3, 4, 5"
        assert set(cells(table, "seeds")) == {"3"} and len(table.rows) == 3
        fastest = {
            name: [entry for entry in panel.fastest if entry.row.drafter == name]
            for name in ("simulated-1", "simulated-4", "prompt_lookup")
        }
        expected = {
            name: mean(entry.ranked_speedup.value for entry in entries)
            for name, entries in fastest.items()
        }
        order = sorted(expected, key=lambda name: -expected[name])
        shown = [cell.split(" ")[0] for cell in cells(table, "drafter")]
        assert shown == order
        speeds = [entry.row.speedup for entry in fastest[order[0]]]
        first = cells(table, "speedup [range]")[0]
        assert first == f"{mean(speeds):.2f}x [{min(speeds):.2f}, {max(speeds):.2f}]"
        depths = cells(table, "by depth")[0].split()
        assert depths[0] == f"{mean(e.row.alpha_by_depth[0] for e in fastest[order[0]]):.2f}"


def test_the_table_is_in_the_terminal_and_on_the_page(evaluations, capsys):
    found = panels(evaluations)
    print_comparison(found, evaluations)
    page = comparison_page(found, [[] for _ in found], evaluations, Provenance("", "", ""))
    for text in (capsys.readouterr().out.lower(), page.lower()):
        assert text.count("means over the seeds 3, 4, 5") == len(found)
        assert "lowest and highest over the seeds" in " ".join(text.split())
    assert "2 drafters from 3 evaluations" in page


@pytest.mark.parametrize("changed", ["equal seeds", "another size", "one run"])
def test_control_runs_that_repeat_no_other_have_no_means(evaluations, changed):
    one, two, _ = evaluations
    found = {
        "equal seeds": [one, with_seed(two, SEEDS[0])],
        "another size": [one, with_seed(two, SEEDS[1], drafter_layers=7)],
        "one run": [one],
    }[changed]
    for panel in panels(found):
        assert seeds_table(panel).rows == []
        assert all(entry.plotted == entry.name for entry in panel.entries)


def test_seeds_of_a_drafter_look_alike_in_plots(evaluations):
    panel = panels(evaluations)[0]
    looks = styles_of_entries(panel.entries)
    names = {entry.row.drafter: set() for entry in panel.entries}
    for entry in panel.entries:
        names[entry.row.drafter].add(looks[entry.name])
    assert all(len(found) == 1 for found in names.values())
    assert len({*names["simulated-1"], *names["simulated-4"]}) == 2
    legend = depth(panel, looks).figure.legends[0]
    shown = [text.get_text() for text in legend.get_texts()]
    assert sorted(shown) == ["prompt lookup, the control", "simulated-1", "simulated-4"]


def test_many_points_at_a_number_stay_clear_of_the_next():
    for count in (1, 2, 5, 17, 60):
        places = [shift(index, count, 0.07) for index in range(count)]
        assert places == sorted(places) and max(places) < 0.4
        assert abs(places[0] + places[-1]) < 1e-9
    assert shift(1, 2, 0.07) == pytest.approx(0.035), "a few keep their distance"
