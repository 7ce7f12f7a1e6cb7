"""Laws of the planner: needed acceptance, predicted acceptance, and the file of acceptances."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from decoding.costs.prediction import Costs, best_gamma, needed_alpha, predicted_speedup
from decoding.errors import UserError
from eval.plan.acceptance import AcceptanceModel, Prospect, choose_curves, logit, rate_of
from eval.plan.curves import Curve, collect, merge, read_curves, write_curves
from eval.plan.rows import need, pooled_rates

FREE = dict.fromkeys(range(1, 10), 1.0)
GROWING = {n: 1 + 0.06 * (n - 1) for n in range(1, 10)}
COSTS = [
    Costs(0.0, FREE),
    Costs(0.05, GROWING),
    Costs(0.2, GROWING, overhead=0.1, baseline_overhead=0.05),
    Costs(0.3, FREE, one_pass=True, deepest=5),
    Costs(0.1, GROWING, nodes={1: 4, 2: 6, 3: 8}, deepest=3),
]


# -------------------------------------------------------------------------------- needed acceptance
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("speedup", [0.9, 1.05, 1.2, 1.6])
def test_the_needed_acceptance_gives_exactly_the_speedup(costs: Costs, speedup: float):
    alpha, gamma = needed_alpha(speedup, costs) or (math.nan, 0)
    if best_gamma([0.0], costs)[1] >= speedup:
        assert alpha < 1e-9, "it needs none"
        return
    assert predicted_speedup([alpha], gamma, costs) == pytest.approx(speedup, abs=1e-9)
    assert best_gamma([alpha], costs)[1] == pytest.approx(speedup, abs=1e-9)
    assert best_gamma([alpha - 0.01], costs)[1] < speedup - 1e-4, "a control: less is not enough"


def test_a_speedup_that_no_acceptance_reaches_has_no_need():
    costs = Costs(0.5, FREE)
    most = best_gamma([1.0], costs)[1]
    assert need(most + 0.01, costs).alpha is None
    assert need(most - 0.01, costs).alpha is not None


@pytest.mark.parametrize("costs", COSTS)
def test_more_acceptance_never_lowers_the_predicted_speedup(costs: Costs):
    before = 0.0
    for alpha in (k / 50 for k in range(51)):
        speedup = best_gamma([alpha], costs)[1]
        assert speedup >= before
        before = speedup


def test_a_free_drafter_needs_any_positive_acceptance():
    free = Costs(0.0, FREE)
    assert need(1.0, free).alpha == pytest.approx(0, abs=1e-12)
    assert best_gamma([1e-6], free)[1] > 1
    control = Costs(0.0, GROWING)
    assert best_gamma([1e-6], control)[1] < 1, "its verification is not free"
    assert (need(1.0, control).alpha or 0) > 0.05


# ----------------------------------------------------------------------------- predicted acceptance
def planted(kind: str, layers: int, width: int, tokens: int, temperature: float) -> float:
    """Return log-odds that are linear in what the model reads."""
    at = {"chain": -0.6, "medusa": -1.1, "eagle3": -0.3, "recurrent": -0.5, "dflash": -0.9}[kind]
    if kind == "chain":
        at += 0.2 * math.log2(layers) + 0.3 * math.log2(width / 512)
    return at + 0.1 * math.log2(tokens / 1e6) - 0.15 * temperature


def curve(kind: str, layers: int = 0, width: int = 0, **changes: Any) -> Curve:
    """Return a curve whose acceptance is the planted one."""
    tokens, temperature = changes.get("training_tokens", 1 << 20), changes.get("temperature", 0.0)
    at = planted(kind, layers, width, tokens, temperature)
    values: dict[str, Any] = {
        "target": "target",
        "target_hash": "1",
        "drafter": f"{kind} {layers}x{width}",
        "drafter_hash": f"{kind} {layers}x{width} {tokens}",
        "kind": kind,
        "draft_shape": "chain",
        "drafter_class": "",
        "stopping": "fixed",
        "layers": layers,
        "hidden_size": width,
        "draft_vocab_size": 0,
        "training_tokens": tokens,
        "temperature": temperature,
        "alpha_by_depth": [rate_of(at - 0.1 * math.log2(k)) for k in (1, 2, 3, 4)],
        "tested_by_depth": [4000] * 4,
        "benchmark": "prompts",
        "source": "eval.run",
    }
    return Curve(**{**values, **changes})


SHAPES = [(layers, width) for layers in (1, 2, 4) for width in (256, 512)]
HEADS = ("medusa", "eagle3", "recurrent", "dflash")
KNOWN = [curve("chain", *shape) for shape in SHAPES] + [curve(kind) for kind in HEADS]

BY_KIND: dict[str, Any] = {one.kind: one.alpha_by_depth for one in KNOWN}


def test_a_model_that_was_left_out_is_predicted_from_the_others():
    for shape in SHAPES:
        others = [one for one in KNOWN if (one.layers, one.hidden_size) != shape]
        left_out = curve("chain", *shape)
        found = AcceptanceModel.fit(others).predict(Prospect.of(left_out), 4)
        assert found == pytest.approx(left_out.alpha_by_depth, abs=0.04)
    mean = sum(one.alpha_by_depth[0] or 0 for one in KNOWN) / len(KNOWN)
    widest = curve("chain", 4, 512).alpha_by_depth[0]
    assert abs(mean - (widest or 0)) > 0.08, "a control: their mean would predict it badly"


def test_the_error_is_that_of_predictions_without_the_drafter():
    model = AcceptanceModel.fit(KNOWN)
    assert set(model.left_out) == {str(one.form) for one in KNOWN}
    wrong = dataclasses.replace(KNOWN[2], alpha_by_depth=[0.9, 0.9, 0.9, 0.9])
    disturbed = AcceptanceModel.fit([*KNOWN[:2], wrong, *KNOWN[3:]])
    assert disturbed.left_out[str(wrong.form)] > 2, "its own rate does not help to predict it"
    assert disturbed.error > 2 * model.error


def test_bounds_enclose_the_prediction_and_grow_with_the_error():
    few, many = AcceptanceModel.fit(KNOWN[:2]), AcceptanceModel.fit(KNOWN)
    prospect = Prospect.of(curve("chain", 3, 512))
    for model in (few, many):
        low, middle, high = (model.predict(prospect, 3, errors) for errors in (-2, 0, 2))
        assert all(a < b < c for a, b, c in zip(low, middle, high, strict=True))
    assert (few.error, few.left_out) == (0.5, {}), "two forms give no error"


def test_an_unknown_kind_is_predicted_within_the_known_ones():
    rates = [one.alpha_by_depth[0] for one in KNOWN if one.kind in HEADS]
    unknown = Prospect("domino", "chain", 0, 0, 1 << 20, 0.0)
    (found,) = AcceptanceModel.fit(KNOWN).predict(unknown, 1)
    assert min(filter(None, rates)) < found < max(filter(None, rates))


def test_training_and_temperature_move_the_prediction_as_they_were_measured():
    more = [curve("eagle3", training_tokens=1 << 24), curve("medusa", training_tokens=1 << 24)]
    model = AcceptanceModel.fit([*KNOWN, *more, *(curve(kind, temperature=1.0) for kind in HEADS)])

    def rate(**changes: Any) -> float:
        return model.predict(Prospect.of(curve("recurrent", **changes)), 1)[0]

    assert rate(training_tokens=1 << 24) > rate() > rate(temperature=1.0)


def test_a_draft_vocabulary_moves_the_prediction_as_it_was_measured():
    def with_tokens(kind: str, size: int) -> Curve:
        lower = [rate_of(logit(a or 0) - 0.2 * (16 - math.log2(size))) for a in BY_KIND[kind]]
        return curve(kind, draft_vocab_size=size, alpha_by_depth=lower)

    known = [*KNOWN, *(with_tokens(kind, 1 << n) for kind in HEADS[:3] for n in (10, 12, 14))]
    few, more = (with_tokens("dflash", 1 << n) for n in (11, 14))

    def rates(one: Curve, curves: list[Curve] = known) -> list[float]:
        return AcceptanceModel.fit(curves).predict(Prospect.of(one), 4)

    for one in (few, more, curve("dflash")):
        assert rates(one) == pytest.approx(one.alpha_by_depth, abs=0.04)
    assert abs((few.alpha_by_depth[0] or 0) - BY_KIND["dflash"][0]) > 0.08, "a control"
    assert rates(few, KNOWN) == rates(curve("dflash"), KNOWN), "no size is known"


def test_acceptance_is_not_extrapolated_beyond_the_known_trainings():
    model = AcceptanceModel.fit([*KNOWN, *(curve(kind, training_tokens=1 << 24) for kind in HEADS)])

    def rates(tokens: int) -> list[float]:
        return model.predict(Prospect.of(curve("eagle3", training_tokens=tokens)), 3)

    assert rates(1 << 40) == rates(1 << 24) > rates(1 << 22) > rates(1 << 20) == rates(1)


def test_an_unknown_number_of_training_tokens_counts_as_the_median():
    known = [curve(kind, training_tokens=1 << n) for kind in HEADS for n in (20, 22, 24)]
    model = AcceptanceModel.fit(known)
    shortest, usual, _ = (model.predict(Prospect.of(one), 3) for one in known[:3])
    unknown = dataclasses.replace(Prospect.of(known[0]), training_tokens=0)
    assert model.predict(unknown, 3) == pytest.approx(usual) != pytest.approx(shortest)


def test_an_evaluation_replaces_the_figure_of_the_same_training():
    trained = dataclasses.replace(KNOWN[0], source="training", tested_by_depth=[])
    elsewhere = dataclasses.replace(trained, temperature=1.0)
    assert choose_curves([trained, KNOWN[0], elsewhere]) == [KNOWN[0], elsewhere]


def test_drafts_of_a_fixed_length_are_preferred_to_those_that_a_policy_ends():
    ended = dataclasses.replace(KNOWN[0], stopping="confidence")
    by_cost = dataclasses.replace(KNOWN[0], stopping="by_cost", benchmark="others")
    assert merge([KNOWN[0]], [ended, by_cost]) == [KNOWN[0], ended, by_cost]
    for curves in ([KNOWN[0], ended, by_cost], [by_cost, ended, KNOWN[0]]):
        chosen = choose_curves(curves)
        assert ended not in chosen and KNOWN[0] in chosen
        assert by_cost in chosen, "no other was measured on these prompts"


def test_rates_of_several_runs_are_pooled_up_to_the_first_depth_with_few_tests():
    rates = {"alpha_by_depth": [0.5, 0.4, 0.9], "tested_by_depth": [100, 50, 19]}
    first = dataclasses.replace(KNOWN[0], **rates)
    second = dataclasses.replace(first, alpha_by_depth=[0.8, 0.4], tested_by_depth=[200, 160])
    assert pooled_rates([first, second]) == pytest.approx([0.7, 0.4])
    untested = dataclasses.replace(first, alpha_by_depth=[0.6], tested_by_depth=[])
    assert pooled_rates([first, untested]) == pooled_rates([first])
    assert pooled_rates([untested]) == [0.6]
    assert logit(rate_of(0.7)) == pytest.approx(0.7)


# ----------------------------------------------------------------------------------------- the file
def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    file = tmp_path / "new" / "acceptance.jsonl"
    assert read_curves(file) == []
    write_curves(file, KNOWN)
    assert read_curves(file) == KNOWN


def test_merging_keeps_the_last_measurement_of_each_drafter(tmp_path: Path):
    again = dataclasses.replace(KNOWN[1], alpha_by_depth=[0.5, 0.5, 0.5, None])
    assert merge(KNOWN, KNOWN) == KNOWN
    assert merge(KNOWN, [again]) == [KNOWN[0], again, *KNOWN[2:]]
    both = tmp_path / "joined.jsonl"
    write_curves(both, KNOWN)
    text = both.read_text()
    both.write_text(text + json.dumps(dataclasses.asdict(again)))  # without a last newline
    assert read_curves(both) == merge(KNOWN, [again])


def test_a_drafter_of_two_targets_has_a_line_for_each():
    elsewhere = dataclasses.replace(KNOWN[0], target_hash="2", alpha_by_depth=[0.2] * 4)
    assert merge([KNOWN[0]], [elsewhere]) == [KNOWN[0], elsewhere]
    moved = dataclasses.replace(elsewhere, target="its new path", alpha_by_depth=[0.3] * 4)
    assert merge([KNOWN[0], elsewhere], [moved]) == [KNOWN[0], moved], "a control: the hash decides"


BROKEN: dict[str, tuple[Any, str]] = {
    "torn": ('{"target": "a", "tar', "line 2"),
    "a list": ([], "found a list, expected an object"),
    "another format": ({"alpha": 0.5}, "the line lacks alpha_by_depth, benchmark"),
    "an unknown field": ({**dataclasses.asdict(KNOWN[0]), "alhpa": 1}, "unknown fields alhpa"),
    "a rate above 1": ({"alpha_by_depth": [1.5]}, "alpha_by_depth is [1.5], expected rates"),
    "no first rate": ({"alpha_by_depth": [None, 0.5]}, "expected rates from 0 to 1"),
    "no number": ({"temperature": math.nan}, "temperature is NaN, expected a number"),
    "a word": ({"layers": "two"}, 'layers is "two", expected a whole number'),
    "an unknown kind": ({"kind": "egale3"}, 'kind is "egale3", expected one of chain, parallel,'),
    "a model of no layer": ({"layers": 0}, "layers is 0, expected 1 or more, as kind is chain"),
    "a head of some width": (
        {"kind": "eagle3", "layers": 0},
        "hidden_size is 256, expected 0, as kind is eagle3",
    ),
    "no tests": ({"tested_by_depth": [0, 1, 1, 1]}, "the first one 1 or more"),
    "other depths": ({"tested_by_depth": [1]}, "tested_by_depth has 1 depths"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_refused_with_its_number(name: str, tmp_path: Path):
    value, message = BROKEN[name]
    good = dataclasses.asdict(KNOWN[0])
    if isinstance(value, dict) and value.keys() < good.keys():
        value = {**good, **value}
    if name == "another format":
        value = {"alpha": 0.5}
    line = value if isinstance(value, str) else json.dumps(value)
    file = tmp_path / "acceptance.jsonl"
    file.write_text(f"{json.dumps(good)}\n{line}\n{json.dumps(good)}\n")
    with pytest.raises(UserError, match="line 2") as raised:
        read_curves(file)
    assert message in str(raised.value)
    assert "Correct or remove" in str(raised.value)


def test_runs_without_acceptance_of_a_trained_drafter_give_none(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.jsonl").write_text("not a row\n")
    found, notes = collect([str(tmp_path / "*")])
    assert found == []
    assert len(notes) == 1
    assert "does not hold rows" in notes[0]
    rows = Path(__file__).parents[2] / "fixtures" / "eval.run" / "results.jsonl"
    (tmp_path / "run" / "results.jsonl").write_bytes(rows.read_bytes())
    assert "run is incomplete (FileNotFoundError" in collect([str(tmp_path / "*")])[1][0]
