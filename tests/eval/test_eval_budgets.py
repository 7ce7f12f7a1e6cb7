"""Budgets of a row: sums of the models' budgets, shares of the limits, and explicit gaps."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from decoding.costs import machine_limits
from decoding.costs.machine_limits import Limits, measure_limits
from decoding.costs.roofline import forward_budget
from decoding.drafters.prompt_lookup import PromptLookup
from decoding.drafters.self_speculation import SelfSpeculation
from decoding.drafters.with_lookup import LookupFirst
from decoding.errors import UserError
from decoding.models.folder import read_config
from decoding.models.load import load_target
from decoding.models.native.weights import NativeConfig
from eval.measure.records import read_records
from eval.report import evaluation_tables as tables
from eval.report.terminal import print_evaluation
from eval.run import run
from eval.statistics import budgets
from eval.statistics.budgets import UNKNOWN, Shapes, row_budgets, shapes_of, with_limits
from eval.statistics.paired_samples import PairedSample
from eval.statistics.rows import build_rows, samples_of
from eval.statistics.schema import DrafterFacts, RoundBudget, read_rows, write_rows
from heads.medusa.drafter import MedusaDrafter
from tests.decoding.row_kinds.medusa import random_medusa
from tests.support import simulated_records as simulated
from tests.support.tiny_folders import config

LIMITS = Limits(bytes_a_second=2e9, operations_a_second=50e9)
ONE_PASS = PairedSample(
    rounds=10,
    batch_rounds=10,
    seconds=0.02,
    base_tokens=30,
    base_batch_rounds=30,
    base_seconds=0.03,
)


def native(folder):
    return NativeConfig.from_dict(read_config(folder))


def shapes(home, **changes):
    target = load_target(home / "target", dtype="float32")
    mappings = {
        "chain": {"_target_": "any", "folder": str(home / "shallow"), "dtype": "float64"},
        "lookup": {"_target_": "any"},
        "skipping": {"_target_": "any"},
    }
    skipping = SelfSpeculation(attention=[1], mlp=[1])
    skipping.prepare(target, None)
    drafters = {name: skipping if name == "skipping" else PromptLookup() for name in mappings}
    return dataclasses.replace(shapes_of(home / "target", target, mappings, drafters), **changes)


def facts(name, **changes):
    return DrafterFacts(name, 1, 1, False, **changes)


# ----------------------------------------------------------------------------- bytes and operations
def test_a_round_needs_its_draft_steps_and_one_target_forward(home):
    unit = dataclasses.replace(ONE_PASS, verified=30, draft_steps=40)
    found = row_budgets(shapes(home), facts("chain"), unit, 4, 50)
    target, drafter = native(home / "target"), native(home / "shallow")
    wide, step = (
        forward_budget(target, torch.float32, 4, 50),
        forward_budget(drafter, torch.float64, 1, 50),
    )
    assert found["budget"].megabytes == pytest.approx((wide.bytes_read + 4 * step.bytes_read) / 1e6)
    assert found["budget"].megaflop == pytest.approx((wide.operations + 4 * step.operations) / 1e6)
    one = forward_budget(target, torch.float32, 1, 50)
    assert found["baseline_budget"] == RoundBudget(
        one.bytes_read / 1e6, one.operations / 1e6, None, None
    )
    lookup = row_budgets(shapes(home), facts("lookup"), unit, 4, 50)["budget"]
    assert lookup.megabytes == pytest.approx(wide.bytes_read / 1e6), "a lookup reads nothing"


def test_finished_rows_read_no_cache(home):
    """Check that a finished row reads no cache, while the weights are read once per round.

    One of two rows ends after half of the rounds, so three quarters of both caches are read.
    """
    whole = dataclasses.replace(ONE_PASS, rounds=20)
    ragged = dataclasses.replace(ONE_PASS, rounds=15)
    of = [
        row_budgets(shapes(home), facts("lookup"), unit, 4, 100)["budget"].megabytes
        for unit in (ONE_PASS, whole, ragged)
    ]
    assert of[2] - of[0] == pytest.approx((of[1] - of[0]) / 2)
    cache = forward_budget(native(home / "target"), torch.float32, 1, 100).cache_bytes
    assert of[1] - of[0] > cache / 1e6, "a cache and an embedded token more"


def test_a_layer_without_both_sublayers_costs_nothing(home):
    whole = native(home / "target")
    shallower = dataclasses.replace(whole, num_layers=whole.num_layers - 1)
    skipped = forward_budget(whole, torch.float32, 3, 40, 2, (1, 1))
    assert skipped == forward_budget(shallower, torch.float32, 3, 40, 2)
    assert skipped.bytes_read < forward_budget(whole, torch.float32, 3, 40, 2, (1, 0)).bytes_read
    unit = dataclasses.replace(ONE_PASS, draft_steps=10)
    drafted = row_budgets(shapes(home), facts("skipping"), unit, 4, 40)["budget"].megabytes
    alone = row_budgets(shapes(home), facts("lookup"), unit, 4, 40)["budget"].megabytes
    assert drafted - alone == pytest.approx(
        forward_budget(shallower, torch.float32, 1, 40).bytes_read / 1e6
    )


def test_a_head_needs_its_own_budget_with_a_lookup_before_it_too(home):
    target = load_target(home / "target", dtype="float32")
    head = MedusaDrafter(heads=random_medusa(target), shape="chain")
    drafters = {"head": head, "both": LookupFirst(head)}
    mappings = {name: {"_target_": "any", "folder": "any"} for name in drafters}
    known = shapes_of(home / "target", target, mappings, drafters)
    unit = dataclasses.replace(ONE_PASS, draft_steps=5)
    found = [row_budgets(known, facts(name), unit, 2, 40)["budget"] for name in drafters]
    alone = row_budgets(shapes(home), facts("lookup"), unit, 2, 40)["budget"]
    draft = head.draft_budget(target, 0.5, 2, 40, 1)
    assert found[0].megabytes == pytest.approx(alone.megabytes + draft.bytes_read / 1e6)
    assert found[0] == found[1] and draft.operations > 0


def test_a_drafter_alone_needs_its_step_and_no_target(home):
    found = row_budgets(shapes(home), facts("chain", schedule="alone"), ONE_PASS, 4, 50)["budget"]
    assert (
        found.megabytes
        == forward_budget(native(home / "shallow"), torch.float64, 1, 50).bytes_read / 1e6
    )


# ----------------------------------------------------------------------------- shares of the limits
def test_a_share_is_the_rate_over_the_limit(home):
    unit = dataclasses.replace(ONE_PASS, verified=30, draft_steps=40)
    found = row_budgets(shapes(home, limits=LIMITS), facts("chain"), unit, 4, 50)
    for budget, seconds in ((found["budget"], 0.02 / 10), (found["baseline_budget"], 0.03 / 30)):
        assert budget.bandwidth_share * LIMITS.bytes_a_second * seconds == pytest.approx(
            budget.megabytes * 1e6
        )
        assert budget.operations_share * LIMITS.operations_a_second * seconds == pytest.approx(
            budget.megaflop * 1e6
        )
    assert (found["reading_gigabytes_per_second"], found["product_gigaflop_per_second"]) == (
        2.0,
        50.0,
    )


def test_a_virtual_clock_has_no_shares(home):
    found = row_budgets(
        shapes(home, limits=LIMITS), facts("chain", schedule="pearl_virtual"), ONE_PASS, 4, 50
    )
    assert found["budget"].bandwidth_share is None
    assert found["baseline_budget"].bandwidth_share is not None


def test_a_limit_is_the_best_of_its_rounds(monkeypatch):
    rates = iter([1.0, 4.0, 9.0, 2.0])
    clock = iter([0.0, 0.1, 0.2, 0.3, 9.0])
    monkeypatch.setattr(machine_limits, "per_second", lambda *_: next(rates))
    monkeypatch.setattr(machine_limits.time, "perf_counter", lambda: next(clock))
    assert machine_limits._best(lambda: None, "cpu", 0.5) == 9.0


def test_limits_are_measured_within_the_allowed_memory(monkeypatch):
    held = []
    valid = machine_limits.readers
    monkeypatch.setattr(
        machine_limits, "readers", lambda size, *more: held.append(size) or valid(1 << 16, *more)
    )
    found = measure_limits(1 << 40, torch.float32, "cpu", seconds=0.01)
    assert held == [machine_limits.MOST_BYTES]
    assert found.bytes_a_second > 1e6 and found.operations_a_second > 1e6


def test_limits_are_measured_once_a_run_and_not_for_toys(home, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(budgets, "measure_limits", lambda *_: calls.append(1) or LIMITS)
    path = tmp_path / "limits.json"
    small = shapes(home)
    many = budgets.LEAST_TOKENS + 1
    assert with_limits(small, many, path).limits is None, "a toy"
    assert with_limits(UNKNOWN, many, path).limits is None
    monkeypatch.setattr(budgets, "LEAST_BYTES", 1)
    assert with_limits(small, budgets.LEAST_TOKENS, path).limits is None, "a trial"
    assert (
        with_limits(dataclasses.replace(small, in_one_process=False), many, path).limits is None
    ), "several processes"
    assert not calls
    assert with_limits(small, many, path).limits == with_limits(small, many, path).limits == LIMITS
    for wrong in ('{"a": 1.0}', '{"bytes_a_second": "x", "operations_a_second": 1.0}', "{}"):
        path.write_text(wrong)
        with pytest.raises(
            UserError,
            match="is damaged: expected the numbers bytes_a_second and operations_a_second",
        ):
            with_limits(small, many, path)
    assert len(calls) == 1, "a resumed run reads those of its folder"


# ----------------------------------------------------------------------------------------- messages
def test_a_run_reports_budgets_and_no_shares_for_toys(home, capsys):
    shallow = str(home / "shallow")
    ways = [
        shallow,
        {"use": "static_tree", "folder": shallow},
        {"use": shallow, "schedule": "alone", "name": "small"},
    ]
    folder = run(config(home, "budgets", drafters=ways, sweep=[2], temperatures=[0.0]))
    printed = capsys.readouterr().out
    assert "the machine's limits were not measured (a run of at most 5,000 tokens" in " ".join(
        printed.split()
    )
    assert "not measured" in printed and "MB read" in printed
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "What a round must read and compute" in page and "not measured" in page
    rows = read_rows(folder / "results.jsonl")
    assert not (folder / "limits.json").exists()
    step = forward_budget(native(home / "target"), torch.float64, 1, rows[0].context)
    for row in rows:
        assert row.reading_gigabytes_per_second is None and row.budget.bandwidth_share is None
        assert row.baseline_budget.megabytes == pytest.approx(step.bytes_read / 1e6)
        assert (row.budget.megabytes > row.baseline_budget.megabytes) == (row.schedule != "alone")
    records = read_records(folder / "records.jsonl")
    (chain,) = [row for row in rows if (row.drafter, row.part) == ("shallow", "main")]
    units = samples_of(chain, records)
    rounds = sum(unit.batch_rounds for unit in units)
    drafted = sum(unit.draft_steps for unit in units) / rounds
    own = forward_budget(native(home / "shallow"), torch.float64, 1, chain.context)
    wide = forward_budget(native(home / "target"), torch.float64, 1 + drafted, chain.context)
    assert chain.budget.megabytes == pytest.approx(
        (wide.bytes_read + drafted * own.bytes_read) / 1e6, rel=1e-4
    )


def simulated_rows(limits):
    """Return SIMULATED rows of models whose forwards all read the same number of bytes."""
    step = forward_budget(native_llama(), torch.float32, 1, 100)
    named = dict.fromkeys(simulated.DRAFTERS, lambda *_: step)
    made = {name: fact for name, (_, fact, _) in simulated.DRAFTERS.items()}
    known = Shapes(lambda *_: step, {**named, "simulated-slow": None}, limits=limits)
    return build_rows(
        simulated.run_facts(), made, simulated.slices(), simulated.run(prompts=14), known
    )


def native_llama():
    return NativeConfig("llama", 1000, 512, 1024, 8, 8, 8, 64, 256, 1e-5, False, {})


def test_shares_above_one_are_marked_invalid():
    rows = [row for row in simulated_rows(Limits(1e9, 1e9)) if row.part == "main"]
    console = Console(file=io.StringIO(), width=160)
    print_evaluation(rows, console)
    printed = " ".join(console.file.getvalue().split())
    assert "plain reading (1.0 GB/s)" in printed and "plain product (1 GFLOP/s)" in printed
    good, slow = (
        next(row for row in rows if row.drafter == f"simulated-{name}") for name in ("good", "slow")
    )
    assert good.budget.bandwidth_share > 1
    assert tables.budget_cells(good.budget)["of bandwidth"].endswith(
        "% (yardstick read slowly: not valid)"
    )
    assert slow.budget is None and set(tables.budget_cells(slow.budget).values()) >= {"not known"}
    valid = next(
        row for row in simulated_rows(Limits(1e12, 1e13)) if row.drafter == "simulated-good"
    )
    assert "not valid" not in "".join(tables.budget_cells(valid.budget).values())
    virtual = dataclasses.replace(
        valid, schedule="pearl_virtual", budget=RoundBudget(3.0, 4.0, None, None)
    )
    assert "virtual clock" in tables.budgets_table([virtual]).rows[1]


def test_rows_with_and_without_budgets_survive_their_file(tmp_path):
    rows = simulated_rows(LIMITS)
    write_rows(tmp_path / "results.jsonl", rows)
    assert read_rows(tmp_path / "results.jsonl") == rows
    new = (
        "budget",
        "baseline_budget",
        "reading_gigabytes_per_second",
        "product_gigaflop_per_second",
        "run_verify",
    )
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    old = [{key: value for key, value in line.items() if key not in new} for line in lines]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    before = read_rows(tmp_path / "results.jsonl")
    assert [row.speedup for row in before] == [row.speedup for row in rows]
    assert {row.budget for row in before} == {None}
    assert [row.condition_label for row in before] == [row.condition_label for row in rows]
    print_evaluation(before, Console(file=io.StringIO(), width=160))
