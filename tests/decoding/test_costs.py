"""Measured costs of a round: never less for more tokens, and with the rest of the round."""

import itertools
import json
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from decoding.costs.measure import (
    CHEAPEST,
    SPARED,
    add_rest,
    combine_windows,
    measure_costs,
)
from decoding.costs.timing import Parts, choose_threads, rising, time_parts
from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import RoundCosts
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from tests.support.simulated_clock import SimulatedClock
from tests.support.tiers import tiered

from .test_laws import models

pytestmark = pytest.mark.usefixtures("shares")


@pytest.mark.parametrize("fastest", [1, 3])
def test_the_faster_number_of_threads_is_chosen(
    fastest: int, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, before = models()[0], torch.get_num_threads()
    plain = target.forward

    def forward(*given: Any, **named: Any) -> Any:
        clock.advance(0 if torch.get_num_threads() == fastest else 5)
        return plain(*given, **named)

    monkeypatch.setattr(target, "forward", forward)
    torch.set_num_threads(3)
    try:
        assert choose_threads(target) == torch.get_num_threads() == fastest
    finally:
        torch.set_num_threads(before)


def test_rising_returns_the_nearest_nondecreasing_sequence() -> None:
    """Check that no nondecreasing sequence on a grid of quarters has a smaller squared error."""
    dice = random.Random(3)
    for _ in range(30):
        values = [dice.randint(0, 4) for _ in range(4)]
        found = rising(values)
        assert all(a <= b for a, b in itertools.pairwise(found))
        error = sum((a - b) ** 2 for a, b in zip(found, values))
        grid = itertools.combinations_with_replacement([n / 4 for n in range(17)], 4)
        assert (
            error <= min(sum((a - b) ** 2 for a, b in zip(other, values)) for other in grid) + 1e-12
        )
    assert rising([1.0, 1.2, 1.5]) == (1.0, 1.2, 1.5)
    assert rising([]) == ()


def test_costs_smooth_noise() -> None:
    parts = Parts(0.2, {1: 1.0, 2: 1.3, 3: 1.1, 4: 1.5}, 10, 1)
    assert parts.costs.t_target_ms == pytest.approx((1.0, 1.2, 1.2, 1.5))
    assert parts.costs.t_draft_ms == 0.2
    sparse = Parts(0.2, {1: 1.0, 2: 1.2, 6: 2.0, 8: 1.8}, 10, 1)
    assert sparse.costs.t_target_ms == pytest.approx((1.0, 1.2, 1.375, 1.55, 1.725, 1.9, 1.9, 1.9))


@pytest.mark.parametrize("temperature", tiered([0.0, 1.0], [1.0]))
def test_the_rest_of_a_round_excludes_both_models(
    temperature: float, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a slow verification rule lengthens the rest of a round and no other cost."""
    from decoding.rounds import batch

    target, _, draft_model = models()
    drafter = ChainDrafter(model=draft_model)
    settings = Settings(temperature=temperature, verify="coupled", schedule="pearl_plus_virtual")
    with torch.inference_mode():
        before = measure_costs(target, drafter, [4, 5, 6], settings)
    assert before.t_target_ms == pytest.approx((clock.TARGET_MS,) * 8)
    assert before.t_draft_ms == pytest.approx(clock.DRAFT_MS)

    for name, rule in list(batch.RULES.items()):
        monkeypatch.setitem(batch.RULES, name, clock.delayed(rule, 10))
    with torch.inference_mode():
        after = measure_costs(target, drafter, [4, 5, 6], settings)
    assert after.overhead_ms - before.overhead_ms == pytest.approx(10)
    assert after.t_target_ms == pytest.approx(before.t_target_ms)
    assert after.t_draft_ms == pytest.approx(before.t_draft_ms)


def test_work_of_every_step_is_charged_to_steps(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that slow sampling lengthens draft steps, and a slow rule rounds with a draft.

    The rule is slow only if it verifies a draft. Rounds without a draft keep their cost.
    """
    from decoding.rounds import batch
    from decoding.sampling.token_chooser import TokenChooser

    target, _, draft_model = models()
    drafter, settings = (
        ChainDrafter(model=draft_model),
        Settings(temperature=1.0, num_draft_tokens=4),
    )
    before = measure_costs(target, drafter, [4, 5, 6], settings)
    rule = batch.RULES["token"]

    def slow_rule(logits: torch.Tensor, proposal: Any, *given: Any) -> Any:
        clock.advance(30 * (proposal is not None))
        return rule(logits, proposal, *given)

    monkeypatch.setattr(TokenChooser, "draft", clock.delayed(TokenChooser.draft, 10))
    monkeypatch.setitem(batch.RULES, "token", slow_rule)
    after = measure_costs(target, drafter, [4, 5, 6], settings)
    # the last rounds of a generation draft less than the mean round that the estimate assumes
    assert after.t_draft_ms - before.t_draft_ms == pytest.approx(10, rel=0.1)
    assert after.overhead_ms - before.overhead_ms == pytest.approx(30, rel=0.1)
    assert after.plain_ms == pytest.approx(before.plain_ms)


@pytest.mark.parametrize("temperature", tiered([0.0, 1.0], [1.0]))
def test_the_costs_of_a_tree_by_cost_include_its_growth(
    temperature: float, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that slower draft forwards lengthen the measured steps of a cost-based tree.

    The tree drafts during the measurement, although it has no costs yet.
    """
    from decoding.drafters.trees.ranked import RankedTree

    target, _, draft_model = models()
    drafter = RankedTree(model=draft_model, by_cost=True)
    settings = Settings(temperature=temperature, num_draft_tokens=3)
    before = measure_costs(target, drafter, [4, 5, 6], settings)
    monkeypatch.setattr(drafter, "_run", clock.delayed(drafter._run, 20))
    after = measure_costs(target, drafter, [4, 5, 6], settings)
    assert after.t_draft_ms - before.t_draft_ms == pytest.approx(20, rel=0.1)
    assert after.plain_ms == pytest.approx(before.plain_ms)


def test_rounds_with_and_without_a_draft_have_separate_rests() -> None:
    costs = RoundCosts(0.5, (1.0, 1.1, 1.2), 0.4, 0.1)
    assert costs.round_ms(0, 0) == costs.plain_ms == pytest.approx(1.1)
    assert costs.round_ms(2, 2) == pytest.approx(1.0 + 1.2 + 0.4)
    assert RoundCosts(0.5, (1.0,), 0.4).plain_ms == pytest.approx(1.4)
    assert RoundCosts.read(json.loads(json.dumps(asdict(costs)))) == costs


def test_the_cost_of_a_step_depends_on_its_frontier() -> None:
    """Check that the first step costs that of one beam, and the others that of their frontier.

    Costs between measured frontiers are interpolated.
    """
    costs = RoundCosts(
        0.9, (1.0, 1.1, 1.2), 0.4, t_draft_by_frontier_ms=((1, 0.2), (2, 0.3), (8, 0.9))
    )
    assert [costs.step_ms(beams) for beams in (1, 1.5, 2, 5, 8)] == pytest.approx(
        [0.2, 0.25, 0.3, 0.6, 0.9]
    )
    assert costs.steps_ms(1) == costs.steps_ms(1, 8) == pytest.approx(0.2)
    assert costs.steps_ms(3, 2) == pytest.approx(0.2 + 2 * 0.3)
    assert costs.round_ms(3, 2) == pytest.approx(0.2 + 2 * 0.9 + 1.2 + 0.4)
    slower = costs.with_slower_steps(0.1)
    assert slower.t_draft_ms == slower.step_ms(8) == pytest.approx(1.0) and slower.step_ms(
        1
    ) == pytest.approx(0.3)
    assert RoundCosts.read(json.loads(json.dumps(asdict(costs)))) == costs
    bare = RoundCosts(0.9, (1.0,))
    assert bare.step_ms(1) == bare.step_ms(8) == 0.9, (
        "control: steps of other drafters cost the same"
    )


def test_a_forward_is_timed_after_what_precedes_it_while_decoding(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft step evicts the target's weights: the next forward takes 5 ms, any other one 1 ms."""
    target, _, draft_model = models()
    evicted = True
    forward, draft = target.forward, draft_model.forward

    def read_weights(*given: Any, **named: Any) -> Any:
        nonlocal evicted
        clock.advance(4.0 if evicted else 0.0)
        evicted = False
        return forward(*given, **named)

    def evict(*given: Any, **named: Any) -> Any:
        nonlocal evicted
        evicted = True
        return draft(*given, **named)

    monkeypatch.setattr(target, "forward", read_weights)
    monkeypatch.setattr(draft_model, "forward", evict)
    timing: dict[str, Any] = {"widths": range(1, 4), "repeats": 2, "warmup": 1}
    found = time_parts(target, ChainDrafter(model=draft_model), [4, 5, 6], **timing)
    assert found.t_target_ms == pytest.approx({1: 1.0, 2: 5.0, 3: 5.0})
    without = time_parts(target, None, [4, 5, 6], **timing)
    assert without.t_target_ms == pytest.approx({1: 1.0, 2: 1.0, 3: 1.0}), "control: no draft steps"


def test_every_frontier_is_timed_and_smoothed() -> None:
    from recurrent_drafting.drafter import RecurrentDrafter
    from tests.support.toy_heads import exact_head, markov

    target = markov()
    asked: list[int] = []

    class Watched(RecurrentDrafter):
        def time_step(self, frontier: int = 1) -> None:
            asked.append(frontier)
            super().time_step(frontier)

    for children in ("top_k", "sampled"):
        asked.clear()
        drafter = Watched(head=exact_head(target), beam_width=6, children=children, by_cost=True)
        parts = time_parts(target, drafter, [1, 2, 3], repeats=2, warmup=1)
        times = [asked[::3].count(frontier) for frontier in (1, 2, 4, 6)]
        assert max(times) - min(times) <= 1, "frontiers take turns"
        assert (
            set(parts.t_draft_by_frontier_ms) == {1, 2, 4, 6}
            and parts.t_draft_ms == parts.t_draft_by_frontier_ms[6]
        )
    assert Watched(head=exact_head(target), beam_width=6).capabilities.frontiers == (1, 6), (
        "fixed beams have two frontiers"
    )
    noisy = Parts(0.4, {1: 1.0}, 10, 1, {1: 0.2, 2: 0.5, 4: 0.3, 6: 0.4}).costs
    assert noisy.t_draft_by_frontier_ms == ((1, 0.2), *((n, pytest.approx(0.4)) for n in (2, 4, 6)))
    one, other = (
        replace(noisy, t_draft_by_frontier_ms=((1, low), (6, 2 * low))) for low in (0.1, 0.3)
    )
    assert combine_windows([one, one, other]).t_draft_by_frontier_ms == (
        (1, pytest.approx(0.1)),
        (6, pytest.approx(0.2)),
    )
    assert combine_windows([one, one, other]).t_draft_ms == pytest.approx(0.2)


def test_one_bad_window_does_not_matter() -> None:
    """Check that one outlier among five windows does not change the combined costs.

    The ratios of the parts are combined, so windows of different speeds agree.
    """
    good = RoundCosts(0.3, (1.0, 1.1, 1.2), 0.1)
    slow = RoundCosts(0.6, (2.0, 2.2, 2.4), 0.2)
    bad = RoundCosts(3.0, (1.5, 9.0, 1.0), -2.0)
    costs = combine_windows([good, bad, slow, slow, good])
    assert costs.t_target_ms == pytest.approx((1.5, 1.65, 1.8))
    assert (costs.t_draft_ms, costs.overhead_ms, costs.plain_overhead_ms) == pytest.approx(
        (0.45, 0.15, 0.15)
    )
    assert combine_windows([bad]).t_target_ms == pytest.approx((1.5, 5.0, 5.0)), (
        "costs are nondecreasing"
    )
    assert combine_windows([bad]).overhead_ms == pytest.approx(-SPARED * 1.5), (
        "a round saves a limited share of a target forward"
    )


def test_rounds_are_right_if_parts_were_overestimated() -> None:
    """Check that predictions equal timed rounds, if forwards take a fifth less time inside them."""
    parts = RoundCosts(0.5, (5.0, 5.5, 6.0))
    drafter = ChainDrafter(model=models()[2])

    def took(steps: int, ms: float) -> Generation:
        done = Generation()
        done.rounds, done.decode_seconds = 10, ms / 100
        done.draft_steps = done.draft_frontiers = done.verified = 10 * steps
        return done

    rounds = {0: 4.0, 1: 4.9, 2: 5.8}
    found = combine_windows(
        [add_rest(parts, drafter, *(took(steps, rounds[steps]) for steps in (2, 1, 0)))]
    )
    assert [found.round_ms(steps, steps) for steps in rounds] == pytest.approx([*rounds.values()])


def test_the_rest_of_a_step_may_be_negative() -> None:
    """Check that the rest of a step may shorten it, down to the share CHEAPEST of its time.

    Negative rests are kept, since cutting them off at 0 would overestimate steps.
    """
    costs = RoundCosts(1.0, (4.0, 4.0, 4.0, 4.0, 4.0), t_draft_by_frontier_ms=((1, 1.0),))
    drafter = ChainDrafter(model=models()[2])

    def took(steps: float, ms: float) -> Generation:
        """Return ten rounds of `ms` milliseconds with this mean number of draft steps."""
        done = Generation()
        done.rounds, done.decode_seconds = 10, ms / 100
        done.draft_steps = done.draft_frontiers = done.verified = round(10 * steps)
        return done

    plain = took(0, 4.0)
    for extra, expected in ((0.25, 1.25), (-0.25, 0.75), (-5.0, CHEAPEST)):
        deep, shallow = took(4, 4.5 + 4 * (1 + extra)), took(1, 4.5 + 1 + extra)
        found = add_rest(costs, drafter, deep, shallow, plain)
        assert found.step_ms(1) == pytest.approx(expected)
        if expected > 0.5:
            assert found.overhead_ms == pytest.approx(0.5)
