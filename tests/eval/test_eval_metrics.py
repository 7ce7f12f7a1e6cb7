"""Laws of `eval.statistics.metrics`: closed forms, monotonicity, conservation and coverage."""

import math
from dataclasses import astuple

import numpy as np
import pytest

from decoding.costs import prediction
from decoding.costs.prediction import Costs
from decoding.rounds.stats import distinct_n
from eval.statistics import metrics
from tests.support.tiers import tiered

FLAT = dict.fromkeys(range(1, 14), 1.0)
STEEP = {n: 1 + 0.3 * (n - 1) for n in range(1, 14)}


# --------------------------------------------------------------------------------------- acceptance
def test_alpha_overall_is_the_mean_of_alpha_k_weighted_by_tests():
    tested, accepted = [100, 70, 42], [70, 42, 20]
    rates = metrics.alpha_by_depth(tested, accepted)
    assert rates == [0.7, 0.6, 20 / 42]
    assert metrics.alpha(tested, accepted) == pytest.approx(np.average(rates, weights=tested))


def test_alpha_without_tests_is_none():
    assert metrics.alpha([], []) is None
    assert metrics.alpha_by_depth([5, 0], [0, 0]) == [0.0, None]


@pytest.mark.parametrize(("tested", "accepted"), [([10, 9], [8, 3]), ([10], [11]), ([10, 2], [5])])
def test_impossible_counts_of_a_chain_are_refused(tested, accepted):
    with pytest.raises(ValueError):
        metrics.alpha_by_depth(tested, accepted)


def test_depths_add_up_over_lists_of_unequal_length():
    assert metrics.add_by_depth([[3, 2], [1], [5, 0, 4]]) == [9, 2, 4]
    assert metrics.add_by_depth([]) == []


def test_a_simulated_chain_gives_back_its_alpha_and_its_tau():
    """Check that the counts of a simulated chain give its acceptance rates and E(gamma).

    Emitted tokens are accepted tokens + rounds, so tau is 1 + accepted / rounds.
    """
    rng = np.random.default_rng(0)
    truth, gamma, rounds = [0.8, 0.6, 0.7], 3, 20_000
    tested, accepted = [0] * gamma, [0] * gamma
    for _ in range(rounds):
        for depth in range(gamma):
            tested[depth] += 1
            if rng.random() >= truth[depth]:
                break
            accepted[depth] += 1
    rates = metrics.alpha_by_depth(tested, accepted)
    assert rates == pytest.approx(truth, abs=0.015)
    emitted = rounds + sum(accepted)
    assert metrics.tau(emitted, rounds) == pytest.approx(
        prediction.expected_tokens(rates, gamma), rel=1e-12
    )


def test_depths_with_few_tests_do_not_predict():
    assert metrics.usable_alpha([100, 50, 3], [50, 25, 3]) == [0.5, 0.5, None]


# --------------------------------------------------------------------------------------- prediction
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 0.999, 1.0])
@pytest.mark.parametrize("gamma", [1, 4, 9])
def test_expected_tokens_has_the_closed_form_at_constant_alpha(alpha, gamma):
    series = sum(alpha**k for k in range(gamma + 1))
    assert prediction.expected_tokens([alpha] * gamma, gamma) == pytest.approx(series)
    assert prediction.expected_tokens([alpha], gamma) == pytest.approx(series)


def test_expected_tokens_is_bounded_and_grows_with_gamma_and_alpha():
    for alpha in np.linspace(0, 1, 11):
        values = [prediction.expected_tokens([alpha], gamma) for gamma in range(1, 9)]
        assert values == sorted(values)
        assert all(1 <= value <= gamma + 1 for gamma, value in enumerate(values, start=1))
    assert prediction.expected_tokens([0.5, 0.5], 2) < prediction.expected_tokens([0.5, 0.6], 2)


def test_deeper_depths_take_the_deepest_measured_alpha():
    assert prediction.survival([0.8, 0.5, None], 4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    with pytest.raises(ValueError, match="depth 1"):
        prediction.survival([], 2)


def test_known_best_speedups_of_the_literature():
    """Compare the best speedup and gamma at V = 1, o = 0 with Leviathan et al., section 3.4."""
    for alpha, c, speedup, gamma in [
        (0.8, 0.05, 3.09, 8),
        (0.7, 0.1, 1.98, 4),
        (0.6, 0.2, 1.40, 2),
        (0.5, 0.1, 1.46, 2),
    ]:
        best = prediction.best_gamma([alpha], Costs(c, FLAT))
        assert best[0] == gamma
        assert best[1] == pytest.approx(speedup, abs=0.006)


def test_some_gamma_helps_exactly_when_alpha_exceeds_c():
    """Check that with V = 1 and no overhead some gamma gains if and only if alpha > c."""
    for alpha in (0.1, 0.3, 0.6):
        assert prediction.verdict([alpha], Costs(alpha - 0.02, FLAT)).helps
        assert not prediction.verdict([alpha], Costs(alpha + 0.02, FLAT)).helps


def test_speedup_falls_with_every_cost():
    base = prediction.predicted_speedup([0.7], 4, Costs(0.1, FLAT))
    assert prediction.predicted_speedup([0.7], 4, Costs(0.2, FLAT)) < base
    assert prediction.predicted_speedup([0.7], 4, Costs(0.1, STEEP)) < base
    assert prediction.predicted_speedup([0.7], 4, Costs(0.1, FLAT, overhead=0.1)) < base
    assert (
        prediction.predicted_speedup([0.7], 4, Costs(0.1, FLAT, 0.1, baseline_overhead=0.1))
        > base * 0.98
    )


def test_a_steep_verification_moves_the_best_gamma_down():
    assert (
        prediction.best_gamma([0.8], Costs(0.05, STEEP))[0]
        < prediction.best_gamma([0.8], Costs(0.05, FLAT))[0]
    )


def test_a_one_pass_drafter_pays_once_and_a_silent_one_pays_less():
    assert Costs(0.3, FLAT, one_pass=True).round(8) == pytest.approx(1.3)
    assert Costs(0.3, FLAT).round(8) == pytest.approx(3.4)
    assert Costs(0.3, STEEP, one_pass=True, nodes={4: 2.0}).round(4) == pytest.approx(0.3 + 1.6)


def test_costs_are_not_extrapolated():
    with pytest.raises(ValueError, match="was not measured"):
        Costs(0.1, {1: 1.0, 4: 1.2}).round(4)
    assert Costs(0.0, {1: 1.0, 3: 1.2}).round(1) == pytest.approx(1.1)


def test_breakeven_alpha_breaks_even():
    costs = Costs(0.3, STEEP, overhead=0.1, baseline_overhead=0.05)
    need = prediction.breakeven_alpha(2, costs)
    assert prediction.predicted_speedup([need], 2, costs) == pytest.approx(1.0)
    assert prediction.breakeven_alpha(2, Costs(2.0, FLAT)) is None


def test_the_verdict_gives_result_and_reason():
    good, bad = (
        prediction.verdict([0.8], Costs(0.05, FLAT)),
        prediction.verdict([0.2], Costs(0.6, STEEP)),
    )
    hopeless = prediction.verdict([0.9], Costs(3.0, FLAT))
    assert good.helps
    assert good.text.startswith("best gamma=8, predicted ")
    assert not bad.helps
    assert "no gamma can help" in bad.text
    assert "break-even alpha" in bad.text
    assert not hopeless.helps
    assert "even alpha 1 would lose" in hopeless.text


# -------------------------------------------------------------------------------------------- costs
def test_overhead_is_the_share_outside_the_parts():
    assert metrics.overhead(10.0, 9.0) == pytest.approx(0.1)
    assert metrics.overhead(10.0, 10.0) == 0.0


def test_V_is_relative_to_one_token():
    assert metrics.cost_table({2: 6.0, 1: 4.0}) == {1: 1.0, 2: 1.5}
    with pytest.raises(KeyError):
        metrics.cost_table({2: 6.0})


# -------------------------------------------------------------------------------------------- speed
def _paired_runs(rng: np.random.Generator, prompts: int, ratio: float) -> tuple[np.ndarray, ...]:
    """Return tokens and seconds of prompts for a drafter, then for its baseline.

    The pace varies between prompts and is the same for both. The expected ratio of the totals is
    `ratio`.
    """
    pace = rng.lognormal(0, 0.5, prompts)
    base_tokens = rng.integers(40, 128, prompts).astype(float)
    base_seconds = base_tokens * 0.005 * pace
    seconds = base_seconds / ratio * rng.lognormal(-0.02, 0.2, prompts)
    return base_tokens, seconds, base_tokens, base_seconds


def _coverage(interval, prompts: int = 40) -> float:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(300):
        low, high = interval(_paired_runs(rng, prompts, 1.5), trial)
        hits += low <= 1.5 <= high
    return hits / 300


@pytest.mark.parametrize("prompts", [6, 40])
def test_the_paired_interval_covers_the_true_ratio_19_times_in_20(prompts):
    def paired(data, trial):
        found = metrics.paired_bootstrap(*data, resamples=400, seed=trial)
        return found.low, found.high

    assert 0.89 <= _coverage(paired, prompts) <= 0.99


def test_control_plain_percentiles_of_few_prompts_cover_too_little():
    def plain(data, trial):
        draws = np.random.default_rng(trial).multinomial(6, np.full(6, 1 / 6), size=400)
        tokens, seconds, base_tokens, base_seconds = (draws @ column for column in data)
        return np.percentile(tokens / seconds * base_seconds / base_tokens, [2.5, 97.5])

    assert _coverage(plain, 6) < 0.89


@pytest.mark.parametrize(("freedom", "published"), [(4, 2.776), (9, 2.262), (30, 2.042)])
def test_the_quantile_of_students_t_is_that_of_the_tables(freedom, published):
    assert metrics._student_t(freedom) == pytest.approx(published, abs=2e-3)


def test_control_an_interval_that_ignores_the_spread_between_prompts_does_not_cover():
    """Control: intervals that are too narrow fail the coverage test.

    They count each prompt ten times, so they are too narrow by a factor of sqrt(10).
    """

    def too_narrow(data, trial):
        found = metrics.paired_bootstrap(
            *(np.tile(column, 10) for column in data), resamples=400, seed=trial
        )
        return found.low, found.high

    assert _coverage(too_narrow) < 0.6


def test_pairing_removes_the_shared_pace_of_prompts():
    data = _paired_runs(np.random.default_rng(2), 60, 1.5)
    tokens, seconds, base_tokens, base_seconds = data
    paired = metrics.paired_bootstrap(*data)
    shuffled = np.random.default_rng(3).permutation(60)
    unpaired = metrics.paired_bootstrap(
        tokens, seconds, base_tokens[shuffled], base_seconds[shuffled]
    )
    assert paired.value == pytest.approx(unpaired.value)
    assert paired.high - paired.low < 0.5 * (unpaired.high - unpaired.low)


def crossed_sides(random, drift):
    """Return the seconds of two equal sides, 16 requests in 3 passes that differ in their speed."""
    lengths_P = random.lognormal(0, 0.4, 16)
    noise = [random.normal(0, 0.1, (3, 16)) + random.normal(0, drift, (3, 1)) for _ in range(2)]
    return [lengths_P * np.exp(one_KP) for one_KP in noise]


@pytest.mark.parametrize("drift", [0.0, 0.05])
def test_the_crossed_interval_covers_drift_from_pass_to_pass(drift):
    random, covered, of_requests = np.random.default_rng(0), 0, 0
    for trial in range(200):
        ours_KP, base_KP = crossed_sides(random, drift)
        found = metrics.crossed_bootstrap(ours_KP, base_KP, resamples=400, seed=trial)
        covered += found.low <= 1 <= found.high
        ones_P = np.ones(16)
        sums = (ones_P, base_KP.sum(axis=0), ones_P, ours_KP.sum(axis=0))
        control = metrics.paired_bootstrap(*sums, resamples=400, seed=trial)
        assert control.value == pytest.approx(found.value)
        of_requests += control.low <= 1 <= control.high
    assert covered >= 188
    assert drift == 0 or of_requests < 175, "control: requests alone do not cover it"


def test_one_pass_has_the_interval_of_its_requests():
    random = np.random.default_rng(1)
    ours_P, base_P = random.lognormal(0, 0.3, (2, 12))
    found = metrics.crossed_bootstrap([ours_P], [base_P], seed=3)
    ones_P = np.ones(12)
    control = metrics.paired_bootstrap(ones_P, base_P, ones_P, ours_P, seed=3)
    assert astuple(found) == pytest.approx(astuple(control))


def test_a_crossed_interval_needs_five_requests_and_paired_sides():
    few = metrics.crossed_bootstrap(np.ones((9, 4)), np.ones((9, 4)))
    assert (few.value, few.low, few.high) == (1.0, None, None)
    with pytest.raises(ValueError, match="unpaired shapes"):
        metrics.crossed_bootstrap(np.ones((3, 8)), np.ones((2, 8)))


def test_the_interval_is_repeatable_and_needs_five_prompts():
    data = _paired_runs(np.random.default_rng(4), 20, 1.2)
    assert metrics.paired_bootstrap(*data, seed=7) == metrics.paired_bootstrap(*data, seed=7)
    one = metrics.paired_bootstrap([10], [1.0], [10], [2.0])
    assert one.value == 2.0
    assert one.low is None
    assert one.high is None
    assert metrics.paired_bootstrap(*(column[:4] for column in data)).low is None
    assert metrics.paired_bootstrap(*(column[:5] for column in data)).low is not None
    with pytest.raises(ValueError, match="unpaired"):
        metrics.paired_bootstrap([1, 2], [1, 2], [1], [1])


def test_identical_sides_give_exactly_one():
    tokens, _, _, seconds = _paired_runs(np.random.default_rng(5), 20, 1.2)
    found = metrics.paired_bootstrap(tokens, seconds, tokens, seconds)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))


# --------------------------------------------------------------------------------------------- text
def test_distinct_4_of_loops_of_random_text_and_of_little_text():
    assert distinct_n(list(range(100))) == 1.0
    assert distinct_n([1, 2, 3] * 40) == pytest.approx(3 / 117)
    assert distinct_n([5, 5, 5]) == 1.0
    assert math.isclose(distinct_n([1, 2, 1, 2, 1], n=2), 0.5)


@pytest.mark.parametrize("gamma", tiered([1, 3, 6], [3]))
@pytest.mark.parametrize("alpha", tiered([0.2, 0.7, 0.95], [0.2, 0.95]))
def test_pearls_closed_form_is_the_mean_of_its_state_machine(alpha: float, gamma: int) -> None:
    """Compare tokens and cost per round with a simulation of pre-verify and post-verify."""
    costs = Costs(0.3, {n: 1 + 0.1 * (n - 1) for n in range(1, 8)}, overhead=0.05, overlapped=True)
    draw = np.random.default_rng(0)
    tokens = cost = 0.0
    post, rounds = False, 60_000
    for _ in range(rounds):
        cost += max(gamma * 0.3, costs.V_at(gamma if post else 1)) + 0.05
        tests = gamma if post else 1
        passed = int(np.argmin(np.append(draw.random(tests) < alpha, False)))
        tokens += passed + (passed < tests)
        post = passed == tests
    assert prediction.pearl_round(alpha, gamma, costs) == pytest.approx(
        (tokens / rounds, cost / rounds), rel=0.02
    )
    assert prediction.pearl_round(1.0, gamma, costs)[0] == pytest.approx(gamma)


def test_pearl_without_overlap_and_at_low_acceptance_loses_to_serial() -> None:
    slow = {"cost_ratio": 0.125, "V": dict.fromkeys(range(1, 20), 1.0)}
    pearl = prediction.predicted_speedup([0.6], 8, Costs(**slow, overlapped=True))
    serial = prediction.best_gamma([0.6], Costs(**slow))[1]
    assert pearl / serial == pytest.approx(0.98, abs=0.02)


def test_overlap_is_the_hidden_share_of_each_shorter_lane():
    """Check an overlap of 1 for lanes that run together, and of 0 for lanes that take turns.

    Each lane is the longer one in one of two rounds, so the sums of both lanes are equal.
    """
    draft, target = (3.0, 1.0), (1.0, 3.0)
    shorter = sum(map(min, draft, target))
    assert metrics.overlap(sum(draft), sum(target), sum(map(max, draft, target)), shorter) == 1.0
    assert metrics.overlap(sum(draft), sum(target), sum(draft) + sum(target), shorter) == 0.0
    assert metrics.overlap(2.0, 3.0, 5.0, 0.0) is None
    assert metrics.overlap(2.0, 3.0, 5.2, 2.0) == 0.0, "clock noise gives no negative share"
