"""PEARL+ under the laws, its closed forms compared with a simulation, and its choices.

Law 3 is in test_law_of_overlap.py.
"""

import random
from collections.abc import Sequence

import pytest

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from decoding.loop import decode, prefill_batch
from decoding.rounds.settings import Settings
from decoding.schedules.pearl_plus import (
    Acceptance,
    Choice,
    PearlPlus,
    choose,
    eager_rate,
    pearl_rate,
    serial_rate,
)
from tests.support.tiers import tiered
from tests.support.tiny_targets import random_prompts

from .test_laws import models, with_rule

FLAT = (1.0, 1.02, 1.04, 1.06, 1.08, 1.1)
REGIMES = {
    "serial": RoundCosts(0.01, FLAT, 0.05),
    "pearl": RoundCosts(0.9, FLAT),
    "eager": RoundCosts(0.08, FLAT),
}


def run(
    prompts: Sequence[Sequence[int]], settings: Settings, drafter: ChainDrafter
) -> tuple[list[list[int]], set[str]]:
    """Decode one prompt at a time, and return the outputs and the modes of the chosen schedules."""
    tokens, modes = [], set()
    for number, prompt in enumerate(prompts):
        batch = prefill_batch(models()[0], drafter, [prompt], settings, request_ids=[number])
        assert isinstance(batch, PearlPlus)
        generation = batch.rows[0].generation
        while batch.rows:
            batch.round()
        tokens.append(generation.tokens)
        modes |= {choice.mode for choice in batch.chosen}
    return tokens, modes


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize(
    ("regime", "count"),
    [
        *tiered([("eager", 3), *((regime, 12) for regime in REGIMES)], [("eager", 3)]),
        pytest.param("eager", 64, marks=pytest.mark.exhaustive),
    ],
)
def test_laws_1_and_2(regime: str, count: int, rule: str) -> None:
    settings = with_rule(
        rule,
        max_new_tokens=128,
        num_draft_tokens=5,
        costs=REGIMES[regime],
        schedule="pearl_plus_virtual",
    )
    target, _, draft_model = models()
    prompts = random_prompts(count)
    plain = [g.tokens for g in decode(target, None, prompts, settings)]
    tokens, modes = run(prompts, settings, ChainDrafter(model=draft_model))
    assert tokens == plain
    assert regime in modes


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("rule", tiered(["greedy", "token", "coupled"], ["token"]))
def test_law_4_a_perfect_drafter_is_never_rejected(rule: str, regime: str) -> None:
    """Check that every tested token is accepted, and each regime's least block efficiency."""
    target, twin, _ = models()
    for prompt in random_prompts(4):
        settings = with_rule(
            rule,
            max_new_tokens=64,
            num_draft_tokens=5,
            costs=REGIMES[regime],
            schedule="pearl_plus_virtual",
        )
        (done,) = decode(target, ChainDrafter(model=twin), [prompt], settings)
        assert done.accepted == done.tested > 0
        assert done.block_efficiency > {"serial": 4.5, "pearl": 1.7, "eager": 4.5}[regime]


@pytest.mark.parametrize("regime", tiered(REGIMES, ["eager"]))
def test_law_5_earlier_requests_change_nothing(regime: str) -> None:
    """Check that a request's estimates of acceptance do not affect the next request."""
    target, _, draft_model = models()
    settings = with_rule(
        "token", max_new_tokens=40, costs=REGIMES[regime], schedule="pearl_plus_virtual"
    )
    drafter, (first, second) = ChainDrafter(model=draft_model), random_prompts(2)
    alone = decode(target, ChainDrafter(model=draft_model), [second], settings, request_ids=[7])[0]
    decode(target, drafter, [first], settings, request_ids=[3])
    after = decode(target, drafter, [second], settings, request_ids=[7])[0]
    assert (after.tokens, after.rounds, after.drafted) == (
        alone.tokens,
        alone.rounds,
        alone.drafted,
    )


def simulate(
    mode: str,
    chance: Acceptance,
    gamma: int,
    costs: RoundCosts,
    overlap: float,
    rest_ms: float = 0.0,
    tokens: int = 200_000,
) -> float:
    """Simulate a schedule's state machine, and return its tokens per millisecond.

    mode: `serial`, `pearl` or `eager`. chance: chances of a chunk's first token, and of each token
    after an accepted one. overlap: hidden share of the shorter lane. rest_ms: rest of a round with
    two lanes.
    """
    dice = random.Random(1)

    def passing(tests: int, first: float) -> int:
        chances = [first] + [chance.next] * (tests - 1)
        return next((n for n, wanted in enumerate(chances) if dice.random() >= wanted), tests)

    def lanes(drafted: int, width: int) -> float:
        draft_ms, target_ms = drafted * costs.t_draft_ms, costs.target_ms(width)
        return draft_ms + target_ms - overlap * min(draft_ms, target_ms) + rest_ms

    gained, spent, assumed, fresh = 0, 0.0, 0, True
    while gained < tokens:
        if assumed:  # post-verify: the assumed tokens and the next chunk's first
            window = assumed + 1
            spent += lanes(gamma, assumed + 1)
        elif mode == "pearl":
            window = 1
            spent += lanes(gamma, 1)
        else:
            spent += gamma * costs.t_draft_ms
            if mode == "serial":
                accepted = passing(gamma, chance.first)
                gained, spent = (
                    gained + accepted + 1,
                    spent + costs.target_ms(gamma + 1) + costs.overhead_ms,
                )
            else:
                assumed = gamma
            continue
        accepted = passing(window, chance.first if fresh else chance.next)
        gained += accepted if accepted == window else accepted + 1
        assumed = gamma - 1 if accepted == window else 0
        fresh = not assumed
    return gained / spent


@pytest.mark.parametrize(
    ("first", "next_"),
    tiered([(0.3, 0.3), (0.7, 0.7), (0.95, 0.95), (0.4, 0.8), (0.8, 0.5)], [(0.4, 0.8)]),
)
@pytest.mark.parametrize("gamma", tiered([1, 2, 4], [2]))
def test_the_closed_forms_equal_the_simulation(gamma: int, first: float, next_: float) -> None:
    costs, chance = RoundCosts(0.25, FLAT, 0.1), Acceptance(first, next_)
    assert serial_rate(chance, gamma, costs) == pytest.approx(
        simulate("serial", chance, gamma, costs, 0.0), rel=0.01
    )
    for overlap, rest_ms in ((0.0, 0.1), (0.8, 0.1), (1.0, 0.1), (0.9, 0.3)):
        for mode, rate in (("pearl", pearl_rate), ("eager", eager_rate)):
            expected = simulate(mode, chance, gamma, costs, overlap, rest_ms)
            assert rate(chance, gamma, costs, overlap, rest_ms) == pytest.approx(
                expected, rel=0.02
            ), (mode, overlap)


def best(alpha: float, next_: float, longest: int, costs: RoundCosts, overlap: float) -> Choice:
    """Return the choice with the highest predicted rate."""
    return max(
        choose(alpha, next_, longest, costs, overlap, costs.overhead_ms).values(),
        key=lambda choice: choice.rate,
    )


def test_choices_follow_the_costs() -> None:
    flat = RoundCosts(0.2, FLAT)
    assert best(0.5, 0.5, 6, RoundCosts(0.01, FLAT), 0.0).mode == "serial", (
        "without overlap PEARL never pays"
    )
    assert best(0.9, 0.9, 6, flat, 1.0).mode != "serial", "overlap pays with an accurate drafter"
    assert best(0.5, 0.95, 8, flat, 1.0).gamma >= best(0.5, 0.5, 8, flat, 1.0).gamma
    for alpha in (0.2, 0.5, 0.8, 0.99):
        rate, chance = best(alpha, alpha, 6, flat, 1.0).rate, Acceptance(alpha, alpha)
        assert rate >= max(serial_rate(chance, g, flat) for g in range(1, 7))
        assert rate >= max(pearl_rate(chance, g, flat, 1.0, flat.overhead_ms) for g in range(1, 7))


def test_the_rest_of_rounds_with_two_lanes_decides() -> None:
    """Check that overlap pays if two lanes shorten the rest of a round, and not if it is equal."""
    costs = RoundCosts(0.15, FLAT, 0.6)
    modes = {
        rest_ms: max(
            choose(0.6, 0.6, 6, costs, 0.9, rest_ms).values(), key=lambda one: one.rate
        ).mode
        for rest_ms in (0.6, 0.1)
    }
    assert modes[0.6] == "serial" and modes[0.1] != "serial"


def test_choices_follow_the_acceptance_of_the_request() -> None:
    """Check that a perfect drafter has a higher estimate and no shorter drafts than a poor one."""
    target, twin, draft_model = models()
    settings = Settings(
        max_new_tokens=64, num_draft_tokens=5, costs=REGIMES["eager"], schedule="pearl_plus_virtual"
    )
    seen, gammas = [], []
    for model in (twin, draft_model):
        batch = prefill_batch(target, ChainDrafter(model=model), [[4, 5]], settings)
        while batch.rows:
            batch.round()
        assert isinstance(batch, PearlPlus)
        seen.append(batch.overall.value)
        gammas.append(max(choice.gamma for choice in batch.chosen[5:] or batch.chosen))
    assert seen[0] > seen[1]
    assert gammas[0] >= gammas[1]


def test_errors_name_missing_costs_and_batches() -> None:
    target, twin, _ = models()
    with pytest.raises(UserError, match="needs measured costs"):
        decode(target, ChainDrafter(model=twin), [[4]], Settings(schedule="pearl_plus_virtual"))
    with pytest.raises(UserError, match="one prompt at a time, found 2"):
        decode(
            target,
            ChainDrafter(model=twin),
            [[4], [5]],
            Settings(schedule="pearl_plus_virtual", costs=REGIMES["pearl"]),
        )
