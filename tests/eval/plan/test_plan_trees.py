"""Trees of several sizes: their measured acceptance, its prediction, and the choice of a tree."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from decoding.costs.prediction import Costs, best_gamma
from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from eval.measure import parts
from eval.plan.acceptance import AcceptanceModel, Prospect, choose_curves, rate_of
from eval.plan.candidates import Candidate, candidates
from eval.plan.config import PlanConfig
from eval.plan.costs import FILE, MeasuredCosts
from eval.plan.curves import Curve, collect, merge, read_curves, write_curves
from eval.plan.job import run
from eval.plan.report import advice, curves_table, notes_of, plan_table
from eval.plan.rows import MEASURED, PREDICTED, build_outlook, ranked
from eval.report.plots import Plot
from eval.run import run as evaluate
from eval.statistics.schema import read_rows, write_rows
from tests.eval.plan.test_plan_acceptances import ONE_PART, write_shallow
from tests.support import tiny_folders as tiny
from tests.support.plans import config, rows_in
from training.models.build import target_config

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


# -------------------------------------------------------------------------------------- the choice
Plan = tuple[PlanConfig, list[Candidate]]


@pytest.fixture(scope="module")
def plan(home: Path) -> Plan:
    """Return the chains and trees of two heads."""
    asked = config(
        home,
        "",
        depths=[],
        heads=["medusa", "eagle3"],
        shapes=["chain", "tree"],
        tree_nodes=[8, 24, 64],
        max_draft_tokens=DEPTHS,
        training_tokens=1 << 20,
    )
    return asked, candidates(asked, target_config(asked.target))


def planned(plan: Plan, price_ms: float) -> tuple[PlanConfig, list[tuple[Candidate, Any]]]:
    """Return a plan, and its candidates with the costs of a price for each node."""
    costs = RoundCosts(0.2, tuple(10 + price_ms * n for n in range(65)), 0.5, 0.1)
    found = []
    for one in plan[1]:
        nodes = {n: one.tree_nodes or n for n in range(1, one.longest + 1)}
        found.append((one, MeasuredCosts({}, one.facts, costs, False, nodes, 1.0)))
    return plan[0], found


def test_a_plan_chooses_among_chains_and_trees_by_the_formula_of_costs(plan: Plan):
    """Check each row's speedup against the formula, and the choice against all of them."""
    known = [curve("medusa"), *TREES[:2], curve("eagle3")]
    chosen = {}
    for price_ms in (0.01, 0.5, 20.0):
        asked, found = planned(plan, price_ms)
        rows = build_outlook(asked, found, known, 1.0).rows
        every = {}
        for row in rows:
            for gamma, speedup in row.speedup_by_length.items():
                n = 1 + (row.nodes[gamma] if row.tree_nodes else gamma)
                round_ms = gamma * 0.2 + 10 + price_ms * (n - 1) + 0.5
                tokens = 1 + sum(math.prod(row.alpha_by_depth[:k]) for k in range(1, gamma + 1))
                assert speedup == pytest.approx(tokens * 10.1 / round_ms)
                every[row.drafter, gamma] = speedup
        for head in ("medusa", "eagle3"):
            (best,) = (row for row in rows if row.kind == head and row.best)
            fastest = max((key for key in every if key[0].startswith(head)), key=every.__getitem__)
            assert (best.drafter, best.num_draft_tokens) == fastest
            chosen[head, price_ms] = best.tree_nodes
    assert [chosen["medusa", price] for price in (0.01, 0.5, 20.0)] == [64, 8, 0]
    assert chosen["eagle3", 0.01] == 64, "predicted from the trees of the other head"
    asked, found = planned(plan, 0.01)
    unsized = [dataclasses.replace(one, tree_nodes=0) for one in known]
    blind = build_outlook(asked, found, unsized, 1.0).rows
    (best,) = (row for row in blind if row.kind == "eagle3" and row.best)
    assert best.tree_nodes == 8, "a control: without the number of nodes"


def test_a_plan_shows_the_sizes_and_the_best_of_each_drafter(plan: Plan):
    asked, found = planned(plan, 0.01)
    outlook = build_outlook(asked, found, [curve("medusa"), *TREES[:2]], 1.0)
    table = plan_table(outlook, asked)
    by_name = {name.removesuffix(" *"): n for n, name in enumerate(table.column("drafter"))}
    nodes, best = table.column("nodes"), table.column("best")
    names = [f"medusa tree of {nodes}" for nodes in (8, 24, 64)]
    assert [nodes[by_name[name]] for name in names] == ["8", "24", "64"]
    assert nodes[by_name["medusa"]] == "–"
    assert [best[by_name[name]] for name in ["medusa", *names]] == ["", "", "", "best"]
    assert [row.acceptance for row in outlook.rows if row.kind == "medusa"] == [
        *(MEASURED, MEASURED, PREDICTED, MEASURED)
    ], "no tree of 24 nodes was evaluated"
    lines = " ".join(advice(outlook, asked))
    assert "Fastest of the trained drafters: medusa tree of 64, " in lines
    deepest = max(one.longest for one, _ in found if one.kind == "medusa")
    assert f"by its measured acceptance, with 64 nodes at depth {deepest}." in lines
    assert "medusa tree of 8" in " ".join(curves_table(outlook.curves).column("category"))
    chains = [pair for pair in found if not pair[0].tree_nodes]
    table = plan_table(build_outlook(asked, chains, [curve("medusa")], 1.0), asked)
    assert "nodes" not in table.columns and "best" not in table.columns, "a control: no trees"


def test_the_memory_of_a_tree_holds_its_nodes(plan: Plan):
    asked, found = planned(plan, 0.01)
    memory = {row.drafter: row.memory_bytes for row in build_outlook(asked, found, [], 1.0).rows}
    (node,) = {one.cache_bytes_a_token for one, _ in found if one.kind == "eagle3"}
    for nodes in (8, 24, 64):
        more = memory[f"eagle3 tree of {nodes}"] - memory["eagle3"]
        assert more == asked.batch_size * (nodes - DEPTHS) * node
        assert memory[f"medusa tree of {nodes}"] == memory["medusa"], "a control: it stores nothing"
    assert node > 0


def test_trained_weights_need_only_an_evaluation_of_another_size(plan: Plan):
    asked, found = planned(plan, 0.01)
    trees = [pair for pair in found if pair[0].tree_nodes == 24]
    lines = " ".join(advice(build_outlook(asked, trees, [*TREES[:2], CHAINS[2]], 1.0), asked))
    assert "Evaluate medusa tree of 24, whose weights are trained: " in lines
    lines = " ".join(advice(build_outlook(asked, trees, [*TREES[2:], CHAINS[2]], 1.0), asked))
    assert "Evaluate medusa" not in lines, "a control: another head was trained"


def test_sizes_beyond_the_evaluated_ones_are_named(plan: Plan):
    asked, found = planned(plan, 0.01)

    def notes(*curves: Curve) -> str:
        return " ".join(notes_of(build_outlook(asked, found, curves, 1.0)))

    nearest = "Smaller and larger ones are predicted to accept what the nearest of these does."
    assert f"The evaluated trees have 8 nodes. {nearest}" in notes(curve("medusa"), TREES[0])
    assert f"have 8 to 24 nodes. {nearest}" in notes(TREES[0], curve("eagle3", 24))
    assert nearest not in notes(*TREES), "a control: sizes in between"
    assert nearest not in notes(curve("medusa")), "no tree at all has a note of its own"


def test_trees_are_measured_at_their_sizes(home: Path, tmp_path: Path, capsys: Any):
    asked = config(home, "", output_dir=str(tmp_path / "trees"), depths=[1],
                   heads=["medusa", "recurrent"], shapes=["tree"],
                   tree_nodes=[2, 20, 64])  # fmt: skip
    done = run(asked)
    rows = {row.drafter: row for row in rows_in(done)}
    out = " ".join(capsys.readouterr().out.split())
    model = "1 layer, width 32"
    assert list(rows) == [
        *(f"{model} tree of 2", f"{model} tree of 20"),
        *("medusa tree of 2", "medusa tree of 20", "medusa tree of 64"),
        *("recurrent tree of 20", "recurrent tree of 64"),
    ]
    assert f"{model} tree of 64 is left out: at depth 3 its trees have at most 36 nodes." in out
    assert "recurrent tree of 2 is left out: it drafts a chain." in out
    assert rows[f"{model} tree of 20"].nodes == {1: 4, 2: 20, 3: 20}
    assert rows[f"{model} tree of 2"].nodes == {1: 2, 2: 2}, "no path of two nodes is 3 deep"
    assert rows["medusa tree of 64"].nodes[3] == 64
    assert rows["recurrent tree of 20"].nodes == {1: 7, 2: 14, 3: 21}, "beams of one length"
    for row in rows.values():
        assert max(row.V) == 1 + max(row.nodes.values()), "its widest forward was timed"
        assert row.best == (row is ranked([r for r in rows.values() if r.kind == row.kind])[0])
    file = done / FILE
    before = file.read_bytes()
    run(dataclasses.replace(asked, tree_nodes=[20]))
    assert file.read_bytes() == before, "fewer sizes need no measurement"
    assert "holds the costs of all drafters" in capsys.readouterr().out


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
