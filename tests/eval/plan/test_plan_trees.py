"""Trees of several sizes: their measured acceptance, its prediction, and the choice of a tree."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from decoding.costs.prediction import Costs, best_gamma
from decoding.errors import UserError
from eval.measure import parts
from eval.plan.acceptance import AcceptanceModel, Prospect, choose_curves, rate_of
from eval.plan.curves import Curve, collect, merge, read_curves, write_curves
from eval.report.plots import Plot
from eval.run import run as evaluate
from eval.statistics.schema import read_rows, write_rows
from tests.eval.plan.test_plan_acceptances import ONE_PART, write_shallow
from tests.support import tiny_folders as tiny

KINDS = {"medusa": -0.9, "eagle3": -0.3, "recurrent": -0.5}  # log-odds of chains
DEPTHS = 8


def rates(kind: str, nodes: int) -> list[float]:
    """Return the planted acceptance rates of a chain, or of a tree of some nodes."""
    more = 0.5 * math.log2(nodes) - 0.4 if nodes else 0.0
    return [rate_of(KINDS[kind] + more - 0.1 * math.log2(k)) for k in range(1, DEPTHS + 1)]


def curve(kind: str, nodes: int = 0, **changes: Any) -> Curve:
    """Return the measured acceptance of a head's chain (no nodes) or tree."""
    values: dict[str, Any] = {
        **dict.fromkeys(("target", "target_hash", "drafter_class"), "known"),
        **dict.fromkeys(("drafter", "drafter_hash", "kind"), kind),
        **{"layers": 0, "hidden_size": 0, "draft_vocab_size": 0, "training_tokens": 1 << 20},
        **{"stopping": "fixed", "temperature": 0.0, "benchmark": "prompts", "source": "eval.run"},
        "draft_shape": "tree" if nodes else "chain",
        "tree_nodes": nodes,
        "alpha_by_depth": rates(kind, nodes),
        "tested_by_depth": [4000] * DEPTHS,
    }
    return Curve(**{**values, **changes})


CHAINS = [curve(kind) for kind in KINDS]
TREES = [curve(kind, nodes) for kind in ("medusa", "eagle3") for nodes in (8, 64)]


def tree_of(nodes: int, kind: str = "recurrent") -> Prospect:
    return Prospect.of(curve(kind, nodes))


def costs_of_tree(nodes: int, price: float) -> Costs:
    """Return the costs of trees of some nodes. price: of a verified node, over t_target(1)."""
    V = {n: 1 + price * (n - 1) for n in range(1, 66)}
    verified = {gamma: float(min(nodes, 4 + 16 * (gamma - 1))) for gamma in range(1, DEPTHS + 1)}
    return Costs(0.02, V, nodes=verified, deepest=DEPTHS)


def best_size(model: AcceptanceModel, price: float, sizes: tuple[int, ...] = (8, 24, 64)) -> int:
    """Return the number of nodes with the largest predicted speedup."""
    speeds = {
        nodes: best_gamma(model.predict(tree_of(nodes), DEPTHS), costs_of_tree(nodes, price))[1]
        for nodes in sizes
    }
    return max(speeds, key=lambda nodes: speeds[nodes])


# --------------------------------------------------------------------------------------- prediction
def test_the_acceptance_of_a_tree_is_predicted_from_its_number_of_nodes():
    model = AcceptanceModel.fit([*CHAINS, *TREES])
    for nodes in (8, 24, 64):
        found = model.predict(tree_of(nodes), 4)
        assert found == pytest.approx(rates("recurrent", nodes)[:4], abs=0.04)
    unsized = [dataclasses.replace(one, tree_nodes=0) for one in TREES]
    blind = AcceptanceModel.fit([*CHAINS, *unsized])
    small, large = (blind.predict(tree_of(nodes), 1)[0] for nodes in (8, 64))
    assert small == large, "a control: without the number of nodes all trees are one"
    assert abs(small - rates("recurrent", 8)[0]) > 0.1


@pytest.mark.parametrize("price", [0.004, 0.012, 0.03, 0.1])
def test_the_chosen_size_is_the_best_by_the_true_acceptance(price: float):
    """The planted trees have a best size at each price of a verified node."""
    truth = {
        nodes: best_gamma(rates("recurrent", nodes), costs_of_tree(nodes, price))[1]
        for nodes in (8, 24, 64)
    }
    chosen = best_size(AcceptanceModel.fit([*CHAINS, *TREES]), price)
    assert truth[chosen] > 0.99 * max(truth.values())
    unsized = [dataclasses.replace(one, tree_nodes=0) for one in TREES]
    blind = best_size(AcceptanceModel.fit([*CHAINS, *unsized]), price)
    assert blind == 8, "a control: without the number of nodes the cheapest tree looks best"
    if price == 0.004:
        assert truth[blind] < 0.9 * truth[chosen], "and loses speed where nodes are cheap"


def test_acceptance_is_not_extrapolated_to_other_sizes_than_the_measured():
    model = AcceptanceModel.fit([*CHAINS, *TREES])
    assert model.nodes_range == (8, 64)
    assert model.predict(tree_of(512), 2) == model.predict(tree_of(64), 2)
    assert model.predict(tree_of(2), 2) == model.predict(tree_of(8), 2)
    assert model.predict(tree_of(16), 2) > model.predict(tree_of(8), 2), "a control: within"
    none = AcceptanceModel.fit(CHAINS)
    assert none.predict(tree_of(64), 2) == none.predict(tree_of(0), 2)


def test_trees_of_all_sizes_are_left_out_together():
    model = AcceptanceModel.fit([*CHAINS, *TREES])
    assert set(model.left_out) == {str(one.form) for one in [*CHAINS, *TREES]}
    assert len(model.left_out) == 5, "three chains, and the trees of two heads"


# ----------------------------------------------------------------------------------------- the file
def test_trees_of_other_sizes_have_lines_of_their_own(tmp_path: Path):
    file = tmp_path / "acceptance.jsonl"
    write_curves(file, [*TREES, *CHAINS])
    assert read_curves(file) == [*TREES, *CHAINS]
    again = dataclasses.replace(TREES[0], alpha_by_depth=[0.5] * DEPTHS)
    assert merge(TREES, [again]) == [again, *TREES[1:]], "a control: of one size the last counts"


def test_lines_of_earlier_versions_are_read_and_replaced(tmp_path: Path):
    file = tmp_path / "acceptance.jsonl"
    lines = [dataclasses.asdict(one) for one in (TREES[0], CHAINS[0])]
    for line in lines:
        del line["tree_nodes"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    old = read_curves(file)
    assert old == [dataclasses.replace(TREES[0], tree_nodes=0), CHAINS[0]]
    assert merge(old, [TREES[1]]) == [CHAINS[0], TREES[1]], "its number is known now"
    assert merge(old, [TREES[2]]) == [*old, TREES[2]], "a control: another drafter"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (8, "tree_nodes is 8, expected 0, as draft_shape is chain"),
        (-1, "tree_nodes is -1, expected a whole number from 0 up"),
        (8.5, "tree_nodes is 8.5, expected a whole number"),
    ],
)
def test_a_wrong_number_of_nodes_is_refused(nodes: float, message: str, tmp_path: Path):
    file = tmp_path / "acceptance.jsonl"
    line = {**dataclasses.asdict(CHAINS[0]), "tree_nodes": nodes}
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match="line 1") as raised:
        read_curves(file)
    assert message in str(raised.value)


def test_trees_of_a_fixed_size_are_preferred_to_those_of_a_varying_one():
    by_cost = dataclasses.replace(TREES[0], stopping="by_cost", tree_nodes=5)
    assert choose_curves([by_cost, TREES[1]]) == [TREES[1]]
    assert choose_curves([by_cost, TREES[2]]) == [by_cost, TREES[2]], "a control: another drafter"


def test_evaluations_give_the_number_of_nodes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parts, "COST_WINDOWS", 1)  # times do not matter here
    monkeypatch.setattr(Plot, "png", b"")
    write_shallow(home, tmp_path)
    tree = {"use": "ranked_tree", "folder": str(tmp_path / "shallow"), "frontier": 2}
    entries = [
        {**tree, "name": "six", "max_nodes": 6},
        {**tree, "name": "three", "max_nodes": 3},
        str(tmp_path / "shallow"),
    ]
    asked: dict[str, Any] = {**ONE_PART, "timing_repeats": 1, "prompt_lookup_control": False}
    evaluate(tiny.config(tmp_path, "trees", **{**asked, "drafters": entries, "max_prompts": 3}))
    results, origins = tmp_path / "trees" / "results.jsonl", tmp_path / "trees" / "drafters.json"
    rows = read_rows(results)
    assert [row.tree_nodes for row in rows] == [6, 3, 0]

    def sizes() -> list[tuple[str, int]]:
        found, notes = collect([str(tmp_path / "trees")])
        assert notes == []
        assert merge(found) == found, "none replaces another"
        return [(one.stopping, one.tree_nodes) for one in found]

    assert sizes() == [("fixed", 6), ("fixed", 3), ("fixed", 0)]
    written = json.loads(origins.read_text())
    written["six"]["by_cost"] = True
    origins.write_text(json.dumps(written))
    write_rows(results, [dataclasses.replace(rows[0], drafted=4.2), *rows[1:]])
    assert sizes()[0] == ("by_cost", 4), "the mean of a size that varies"
    write_rows(results, [dataclasses.replace(row, tree_nodes=0) for row in rows])
    assert {nodes for _, nodes in sizes()} == {0}, "rows of earlier versions do not have it"
