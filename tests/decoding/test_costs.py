"""What is measured before a policy decides: costs that rise with the width, and the rest of a
round.
"""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from decoding.costs.measure import CHEAPEST, SPARED, add_rest, combine_windows, measure_costs
from decoding.costs.timing import Parts, rising, time_parts
from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import RoundCosts
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation

from .test_laws import models


class SimulatedClock:
    """The clock of everything that is timed here: only what a test lets take time takes time, so
    that a busy machine changes no figure. A target's forward takes 1 ms, a draft model's 0.1 ms.
    """

    TARGET_MS, DRAFT_MS = 1.0, 0.1

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, ms: float) -> None:
        self.seconds += ms / 1000

    def delayed(self, function: Callable[..., Any], ms: float) -> Callable[..., Any]:
        """The function, taking this much longer."""

        def call(*given: Any, **named: Any) -> Any:
            self.advance(ms)
            return function(*given, **named)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    clock = SimulatedClock()
    for module in ("costs.timing", "rounds.batch", "session"):
        monkeypatch.setattr(f"decoding.{module}.perf_counter", clock)
    target, _, draft_model = models()
    for model, ms in ((target, clock.TARGET_MS), (draft_model, clock.DRAFT_MS)):
        monkeypatch.setattr(model, "forward", clock.delayed(model.forward, ms))
    return clock


def test_rising_is_the_nearest_rising_sequence() -> None:
    """Against every rising sequence of a small grid."""
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


def test_costs_hold_noise_back() -> None:
    parts = Parts(0.2, {1: 1.0, 2: 1.3, 3: 1.1, 4: 1.5}, 10, 1)
    assert parts.costs.t_target_ms == pytest.approx((1.0, 1.2, 1.2, 1.5))
    assert parts.costs.t_draft_ms == 0.2
    sparse = Parts(0.2, {1: 1.0, 2: 1.2, 6: 2.0, 8: 1.8}, 10, 1)
    assert sparse.costs.t_target_ms == pytest.approx((1.0, 1.2, 1.375, 1.55, 1.725, 1.9, 1.9, 1.9))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rest_of_a_round_is_what_neither_model_takes(
    temperature: float, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow rule is found in the rest, and in nothing else."""
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


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 3), (1e9, 5)])
def test_windows_end_with_the_time_but_for_three(
    seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []

    def timed(*given: Any, **settings: Any) -> Parts:
        windows.append(settings)
        return Parts(0.2, {1: 1.0, 2: 1.3}, 10, 1)

    monkeypatch.setattr("decoding.costs.measure.time_parts", timed)
    target, _, draft_model = models()
    with torch.inference_mode():
        measure_costs(
            target,
            ChainDrafter(model=draft_model),
            [4, 5, 6],
            Settings(),
            windows=5,
            tokens=4,
            seconds=seconds,
        )
    assert len(windows) == expected


def test_what_is_done_for_each_step_is_the_steps(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow sampling makes a draft step more expensive, a rule that is slow over drafts a round that
    drafts, and neither a round without a draft.
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_by_cost_knows_what_its_growing_takes(
    temperature: float, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While costs are measured, simulated costs have it draft."""
    from decoding.drafters.trees.ranked import RankedTree

    target, _, draft_model = models()
    drafter = RankedTree(model=draft_model, by_cost=True)
    settings = Settings(temperature=temperature, num_draft_tokens=3)
    before = measure_costs(target, drafter, [4, 5, 6], settings)
    monkeypatch.setattr(drafter, "_run", clock.delayed(drafter._run, 20))
    after = measure_costs(target, drafter, [4, 5, 6], settings)
    assert after.t_draft_ms - before.t_draft_ms == pytest.approx(20, rel=0.1)
    assert after.plain_ms == pytest.approx(before.plain_ms)


def test_a_round_without_a_draft_costs_no_rest_of_one_with() -> None:
    costs = RoundCosts(0.5, (1.0, 1.1, 1.2), 0.4, 0.1)
    assert costs.round_ms(0, 0) == costs.plain_ms == pytest.approx(1.1)
    assert costs.round_ms(2, 2) == pytest.approx(1.0 + 1.2 + 0.4)
    assert RoundCosts(0.5, (1.0,), 0.4).plain_ms == pytest.approx(1.4)
    assert RoundCosts.read(json.loads(json.dumps(asdict(costs)))) == costs


def test_a_step_of_beams_costs_what_its_width_does() -> None:
    """The first one starts from the tip, others from as many as they do."""
    costs = RoundCosts(
        0.9, (1.0, 1.1, 1.2), 0.4, t_draft_by_frontier_ms=((1, 0.2), (2, 0.3), (8, 0.9))
    )
    assert [costs.step_ms(beams) for beams in (1, 1.5, 2, 5, 8)] == pytest.approx(
        [0.2, 0.25, 0.3, 0.6, 0.9]
    )
    assert costs.steps_ms(1) == costs.steps_ms(1, 8) == pytest.approx(0.2)
    assert costs.steps_ms(3, 2) == pytest.approx(0.2 + 2 * 0.3)
    assert costs.round_ms(3, 2) == pytest.approx(0.2 + 2 * 0.9 + 1.2 + 0.4)
    dearer = costs.with_slower_steps(0.1)
    assert dearer.t_draft_ms == dearer.step_ms(8) == pytest.approx(1.0) and dearer.step_ms(
        1
    ) == pytest.approx(0.3)
    assert RoundCosts.read(json.loads(json.dumps(asdict(costs)))) == costs
    bare = RoundCosts(0.9, (1.0,))
    assert bare.step_ms(1) == bare.step_ms(8) == 0.9, (
        "control: of other drafters all steps are alike"
    )


def test_every_width_is_timed_and_held_against_noise() -> None:
    from recurrent_drafting.drafter import RecurrentDrafter
    from tests.support.toy_heads import knowing_head, markov

    target = markov()
    asked: list[int] = []

    class Watched(RecurrentDrafter):
        def time_step(self, frontier: int = 1) -> None:
            asked.append(frontier)
            super().time_step(frontier)

    for children in ("top_k", "sampled"):
        asked.clear()
        drafter = Watched(head=knowing_head(target), beam_width=6, children=children, by_cost=True)
        parts = time_parts(target, drafter, [1, 2, 3], repeats=2, warmup=1)
        assert asked[::3] == [1, 2, 4, 6, 2, 4, 6, 1, 4, 6, 1, 2], (
            "none of them is always behind the same forward"
        )
        assert (
            set(parts.t_draft_by_frontier_ms) == {1, 2, 4, 6}
            and parts.t_draft_ms == parts.t_draft_by_frontier_ms[6]
        )
    assert Watched(head=knowing_head(target), beam_width=6).capabilities.frontiers == (1, 6), (
        "fixed beams know two widths"
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


def test_a_bad_window_decides_nothing() -> None:
    """Nor does the pace of a window: its parts count by their ratios."""
    good = RoundCosts(0.3, (1.0, 1.1, 1.2), 0.1)
    slow = RoundCosts(0.6, (2.0, 2.2, 2.4), 0.2)
    bad = RoundCosts(3.0, (1.5, 9.0, 1.0), -2.0)
    costs = combine_windows([good, bad, slow, slow, good])
    assert costs.t_target_ms == pytest.approx((1.5, 1.65, 1.8))
    assert (costs.t_draft_ms, costs.overhead_ms, costs.plain_overhead_ms) == pytest.approx(
        (0.45, 0.15, 0.15)
    )
    assert combine_windows([bad]).t_target_ms == pytest.approx((1.5, 5.0, 5.0)), (
        "costs rise with the width"
    )
    assert combine_windows([bad]).overhead_ms == pytest.approx(-SPARED * 1.5), (
        "some less than its parts, and no more"
    )


def test_whole_rounds_come_out_right_where_parts_were_timed_too_dear() -> None:
    """The target's forwards took a fifth less inside rounds than by themselves."""
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


def test_noise_of_a_steps_rest_goes_both_ways() -> None:
    """Clipping each window at nothing would make steps dear that are not: a window's share may be
    negative, and half a step's time at least stays.
    """
    costs = RoundCosts(1.0, (4.0, 4.0, 4.0, 4.0, 4.0), t_draft_by_frontier_ms=((1, 1.0),))
    drafter = ChainDrafter(model=models()[2])

    def took(steps: float, ms: float) -> Generation:
        """Ten rounds of so many steps and verified tokens, a tree's each of one beam."""
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
