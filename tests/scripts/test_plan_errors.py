"""The planner's errors: what a prediction reads, and how it is compared with measurements."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from eval.plan.candidates import Candidate, candidates
from eval.plan.config import PlanConfig
from eval.plan.costs import FILE, MeasuredCosts
from eval.plan.curves import Curve
from eval.statistics.schema import Row, read_rows
from scripts.bench.plan import Options, plan_again, plan_settings
from scripts.bench.plan_errors import (
    Prediction,
    compare,
    predict_without,
    summary,
    summary_lines,
)
from training.models.build import target_config

RATES = {"medusa": 0.35, "eagle3": 0.6, "1 layer, width 32": 0.5, "2 layers, width 32": 0.55}
LENGTHS = [1, 2, 3, 4]

Planned = list[tuple[Candidate, MeasuredCosts]]


@pytest.fixture(scope="module")
def planned(tiny_target: Path) -> tuple[PlanConfig, Planned]:
    """Return the configuration of a plan, and its drafters with costs of 1 / 2 / 4 ms."""
    options = Options(target=str(tiny_target), depths=[1, 2], widths=[0], lengths=LENGTHS)
    config = plan_settings(dataclasses.replace(options, heads=["medusa", "eagle3"]))
    costs = RoundCosts(1.0, (10.0, 10.5, 11.0, 11.5, 12.0), overhead_ms=0.5)
    found = []
    for one in candidates(config, target_config(config.target)):
        nodes = {gamma: gamma for gamma in range(1, one.longest + 1)}
        found.append((one, MeasuredCosts({}, one.facts, costs, one.layers == 0, nodes, 1.0)))
    return config, found


def curve(one: Candidate, **changes: Any) -> Curve:
    """Return the measured acceptance of a drafter."""
    values: dict[str, Any] = {
        **{name: getattr(one, name) for name in ("kind", "draft_shape", "layers", "hidden_size")},
        **dict.fromkeys(("target", "target_hash", "drafter_class"), "known"),
        **dict.fromkeys(("drafter", "drafter_hash"), one.name),
        "stopping": "fixed",
        "draft_vocab_size": one.draft_vocab_size,
        "training_tokens": 163_840,
        "temperature": 0.0,
        "alpha_by_depth": [RATES[one.name]] * 4,
        "tested_by_depth": [400] * 4,
        "benchmark": "prompts",
        "source": "eval.run",
    }
    return Curve(**{**values, **changes})


def test_only_the_others_move_a_prediction(planned: tuple[PlanConfig, Planned]):
    config, found = planned
    curves = {one.name: curve(one) for one, _ in found}

    def predict(name: str, **changed: float) -> Prediction:
        rates = {**curves}
        for other, alpha in changed.items():
            rates[other] = dataclasses.replace(curves[other], alpha_by_depth=[alpha] * 4)
        return predict_without(config, found, list(rates.values()), name, LENGTHS)

    for name in RATES:
        left_out = predict(name)
        assert predict(name, **{name: 0.95}) == left_out, "its own acceptance is not read"
        for other in RATES.keys() - {name}:
            moved = predict(name, **{other: 0.95})
            for before, after in (
                (left_out.tokens_per_second, moved.tokens_per_second),
                (left_out.by_mean, moved.by_mean),
            ):
                assert all(after[length] > before[length] for length in LENGTHS), "a control"


def test_a_prediction_has_the_planned_baseline_and_the_longest_draft(
    planned: tuple[PlanConfig, Planned],
):
    config, found = planned
    curves = [curve(one) for one, _ in found]
    made = predict_without(config, found, curves, "medusa", LENGTHS)
    assert made.baseline_tokens_per_second == pytest.approx(1000 / 10.5)
    assert made.cost_ratio == pytest.approx(0.1)
    assert made.by_mean[1] == pytest.approx(1000 * (1 + (0.6 + 0.5 + 0.55) / 3) / (1 + 10.5 + 0.5))
    short = [
        (one, dataclasses.replace(known, nodes={1: 1, 2: 2})) if one.name == "medusa" else pair
        for pair in found
        for one, known in [pair]
    ]
    made = predict_without(config, short, curves, "medusa", LENGTHS)
    speeds = made.tokens_per_second
    assert speeds[2] == speeds[3] == speeds[4] != speeds[1]


def rows_of(length: int, speed: float, sweep: dict[int, float]) -> tuple[Row, list[Row]]:
    """Return a measured row, and rows of the sweep with these tokens/s."""
    row = read_rows(Path(__file__).parent.parent / "fixtures" / "eval.run" / "results.jsonl")[0]
    return (
        dataclasses.replace(row, num_draft_tokens=length, tokens_per_second=speed),
        [
            dataclasses.replace(row, part="sweep", num_draft_tokens=n, tokens_per_second=rate)
            for n, rate in sweep.items()
        ],
    )


def test_throughput_is_compared_at_the_measured_length_and_lengths_by_their_speed():
    made = Prediction(
        *(0.5, 0.1, 90.0),
        tokens_per_second={1: 100.0, 2: 130.0, 3: 120.0},
        by_mean={1: 150.0, 2: 140.0, 3: 126.0},
    )
    row, sweep = rows_of(3, 105.0, {1: 80.0, 2: 95.0, 3: 100.0})
    found = compare(made, row, [*sweep, dataclasses.replace(sweep[0], drafter="another")])
    assert (found["gamma"], found["best_gamma"], found["planned_gamma"]) == (3, 3, 2)
    assert found["error"] == pytest.approx(120 / 105 - 1)
    assert found["error_by_mean"] == pytest.approx(126 / 105 - 1)
    assert found["speedup_error"] == pytest.approx(120 / 90 / row.speedup - 1)
    assert found["regret"] == pytest.approx(0.05)
    assert found["regret_by_mean"] == pytest.approx(0.2)
    right = dataclasses.replace(made, tokens_per_second={1: 1.0, 2: 2.0, 3: 105.0})
    control = compare(right, row, sweep)
    assert (control["error"], control["regret"]) == (0, 0)


def test_the_summary_has_the_goals():
    def figures(error: float) -> dict[str, float]:
        lost = {"regret": 0.02, "regret_by_mean": 0.1}
        return {"error": error, "error_by_mean": -0.4, "speedup_error": error / 2, **lost}

    found = summary([figures(-0.05), figures(0.08), figures(-0.25)])
    assert found["median_error"] == {"found": 0.08, "met": True}
    assert found["worst_error"] == {"found": 0.25, "met": False}
    assert (found["worst_error_by_mean"], found["median_regret"]) == (0.4, 0.02)
    text = "\n".join(summary_lines(found))
    assert "median 8.0% (goal 10%), worst 25.0% (goal 20%)" in text
    assert "mean acceptance: median 40.0%, worst 40.0%" in text
    assert "does not move: median 4.0%, worst 12.5%" in text
    assert "planned draft length: median 2.0%, worst 2.0%" in text


def test_the_second_plan_is_from_right_before_the_evaluation(tiny_target: Path, tmp_path: Path):
    small = {"depths": [1], "widths": [0], "heads": ["medusa"], "lengths": [1, 2]}
    options = Options(target=str(tiny_target), work=str(tmp_path), context=24, **small)
    config = dataclasses.replace(plan_settings(options), cost_seconds=0.01)
    evaluation = tmp_path / "eval.run"
    evaluation.mkdir()

    def costs() -> bytes:
        return (plan_again(config, evaluation) / FILE).read_bytes()

    interrupted = costs()
    before = costs()
    assert before != interrupted, "those of an interrupted call are measured again"
    assert not Path(config.output_dir).exists(), "the first plan is not touched"
    (evaluation / "results.jsonl").touch()
    assert costs() == before, "a control: a finished evaluation keeps them"
    (tmp_path / "eval.plan.again" / FILE).unlink()
    with pytest.raises(UserError, match="measured without a second plan before it.*Delete"):
        plan_again(config, evaluation)
