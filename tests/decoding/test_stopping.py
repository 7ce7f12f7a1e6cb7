"""Decisions of the stopping policies, none of which changes the output.

Law 3 under every policy is in test_law_of_distribution.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.parallel import ParallelChain
from decoding.drafters.prompt_lookup import PromptLookup
from decoding.drafters.trees.ranked import RankedTree
from decoding.errors import UserError
from decoding.interfaces import Drafter, RoundCosts, TokenConfidence
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.schedules.by_name import default_stopping
from decoding.stopping import policies
from decoding.stopping.policies import (
    NAMES,
    Assisted,
    Confidence,
    CostRatio,
    Entropy,
    Thompson,
    make_stopping,
)
from heads.sdsat.drafter import SdsatDrafter
from tests.support.tiers import tiered
from tests.support.tiny_targets import hf_model, native_of, random_prompts

from .rows import BY_NAME, DrafterRow, Kit
from .test_laws import models

CHEAP = RoundCosts(0.01, (1.0, 1.01))
EXPENSIVE = RoundCosts(5.0, (1.0, 2.0))
FAIR = RoundCosts(0.15, (1.0, 1.05))
STEEP = tuple(1 + 0.3 * n for n in range(9))
ONE_PASS = [
    BY_NAME[name] for name in ("parallel", "medusa_chain", "p_eagle", "dflash", "dspark", "sdsat")
]


@pytest.mark.parametrize("verify", tiered(["greedy", "coupled"], ["coupled"]))
@pytest.mark.parametrize("stopping", NAMES)
def test_no_policy_changes_the_output(stopping: str, verify: str) -> None:
    target, _, draft_model = models()
    settings = Settings(
        max_new_tokens=48, num_draft_tokens=6, stopping=stopping, costs=FAIR, seed=3
    )
    if verify == "coupled":
        settings = replace(settings, temperature=1.0, verify="coupled")
    prompts = random_prompts(16)
    plain = decode(target, None, prompts, settings)
    for drafter in (ChainDrafter(model=draft_model), PromptLookup()):
        drafted = decode(target, drafter, prompts, settings)
        assert [g.tokens for g in drafted] == [g.tokens for g in plain]
        assert sum(g.accepted for g in drafted) > 0


@pytest.mark.parametrize("stopping", NAMES)
def test_draft_lengths_do_not_depend_on_neighboring_rows(stopping: str) -> None:
    target, _, draft_model = models()
    settings = Settings(
        max_new_tokens=32,
        num_draft_tokens=5,
        temperature=1.0,
        stopping=stopping,
        costs=FAIR,
        seed=9,
        stop_token_ids=(3,),
    )
    prompts = random_prompts(6)
    together = decode(
        target, ChainDrafter(model=draft_model), prompts, settings, request_ids=range(6)
    )
    for request, (prompt, expected) in enumerate(zip(prompts, together)):
        (alone,) = decode(
            target, ChainDrafter(model=draft_model), [prompt], settings, request_ids=[request]
        )
        assert (alone.tokens, alone.rounds, alone.drafted) == (
            expected.tokens,
            expected.rounds,
            expected.drafted,
        )


def test_policies_draft_less_and_more_accurately() -> None:
    target, _, draft_model = models()
    prompts, settings = random_prompts(16), Settings(max_new_tokens=48, num_draft_tokens=8)
    drafted, accepted = {}, {}
    for stopping in ("fixed", "confidence", "entropy", "adaptive_confidence", "cost_ratio"):
        done = decode(
            target,
            ChainDrafter(model=draft_model),
            prompts,
            replace(settings, stopping=stopping, costs=FAIR),
        )
        drafted[stopping] = sum(g.drafted for g in done)
        accepted[stopping] = sum(g.accepted for g in done) / drafted[stopping]
    for stopping in ("confidence", "entropy", "adaptive_confidence", "cost_ratio"):
        assert drafted[stopping] < drafted["fixed"], stopping
        assert accepted[stopping] > accepted["fixed"], stopping


def test_assisted_grows_by_two_and_shrinks_by_one() -> None:
    policy = Assisted()
    assert policy.limit(20) == 5
    policy.update(5, 5)
    assert policy.limit(20) == 7
    policy.update(7, 6)
    policy.update(6, 0)
    assert policy.limit(20) == 5
    for _ in range(9):
        policy.update(1, 0)
    assert policy.limit(20) == 1


def test_confidence_and_entropy_read_the_sampled_token() -> None:
    assert Confidence(0.4).more(1, TokenConfidence(0.41))
    assert not Confidence(0.4).more(1, TokenConfidence(0.39))
    assert Entropy(0.3).more(1, TokenConfidence(0.9, 0.1))  # 1 - sqrt(0.2 * 0.1) = 0.86
    assert not Entropy(0.3).more(1, TokenConfidence(0.9, 3.0))  # 1 - sqrt(0.6) = 0.23


def test_thompson_continues_with_the_acceptance_rate() -> None:
    sure, unsure = Thompson(1), Thompson(1)
    for _ in range(200):
        sure.update(1, 1)
        unsure.update(1, 0)
    assert sum(sure.more(1, None) for _ in range(200)) > 180
    assert sum(unsure.more(1, None) for _ in range(200)) < 20


def test_cost_ratio_compares_survival_with_cost() -> None:
    assert CostRatio(EXPENSIVE).limit(8) == 0, (
        "a draft step as long as five target steps never pays"
    )
    cheap = CostRatio(CHEAP)
    assert cheap.limit(8) == 8
    assert all(cheap.more(depth, TokenConfidence(0.95)) for depth in range(1, 8)), (
        "steps without cost pay at any chance"
    )
    fair = CostRatio(FAIR)
    fair.limit(8)
    lengths = [
        next(d for d in range(1, 60) if not fair.more(d, TokenConfidence(c)))
        for c in (0.05, 0.95)
        if fair.limit(60)
    ]
    assert lengths[0] < lengths[1]


def test_cost_ratio_pauses_a_useless_drafter_and_retries() -> None:
    policy = CostRatio(RoundCosts(0.3, (1.0, 1.2)))
    assert policy.limit(8) > 0
    for _ in range(30):
        if policy.limit(8):
            policy.more(1, TokenConfidence(0.9))
            policy.update(1, 0)
        else:
            policy.update(0, 0)
    assert policy.limit(8) == 0
    for _ in range(300):
        policy.update(0, 0)
    assert policy.limit(8) > 0


def test_cost_ratio_is_the_default_with_measured_costs() -> None:
    """Check the default policy: cost_ratio for sampled chains with costs and a serial schedule.

    Lookups, trees and overlapped schedules have the policy `fixed`.
    """
    target, _, draft_model = models()
    prompts, settings = random_prompts(8), Settings(max_new_tokens=48, num_draft_tokens=8)

    def drafted(drafter: Drafter, **given: Any) -> list[int]:
        return [g.drafted for g in decode(target, drafter, prompts, replace(settings, **given))]

    chain = ChainDrafter(model=draft_model)
    fixed, weighed = (drafted(chain, stopping=name, costs=FAIR) for name in ("fixed", "cost_ratio"))
    assert fixed != weighed
    assert drafted(chain) == fixed
    assert drafted(chain, costs=FAIR) == weighed
    assert drafted(chain, costs=FAIR, schedule="pearl_virtual") == drafted(
        chain, costs=FAIR, schedule="pearl_virtual", stopping="fixed"
    )
    for kind in (ParallelChain, SdsatDrafter):
        assert default_stopping(kind.capabilities, "serial", target) == "cost_ratio"
    assert default_stopping(PromptLookup.capabilities, "serial", target) == "fixed"
    assert default_stopping(RankedTree.capabilities, "serial", target) == "fixed"


@pytest.mark.parametrize("row", ONE_PASS, ids=lambda row: row.name)
def test_drafts_of_one_pass_are_as_long_as_pays(row: DrafterRow) -> None:
    """Check that drafts of one pass follow the costs, of a single row and of a batch."""
    target, _, draft_model = models()
    texts, given = random_prompts(4), Settings(max_new_tokens=24, num_draft_tokens=3)

    def drafted(prompts: list[list[int]], t_draft_ms: float, **more: Any) -> list[int]:
        drafter = row.make(Kit(target, target, draft_model, []))
        costs = RoundCosts(t_draft_ms, (1.0,) * 9, rows=len(prompts))
        settings = replace(given, costs=costs, **more)
        done = decode(target, drafter, prompts, settings)
        plain = decode(target, None, prompts, settings)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
        return [one.drafted for one in done]

    for prompts in (texts[:1], texts):
        assert min(drafted(prompts, 0.01)) > 0 and not any(drafted(prompts, 5.0))
    assert min(drafted(texts, 5.0, stopping="fixed")) > 0, "the control"


def test_a_pass_counts_once() -> None:
    """Check that lengths follow the costs and the accepted tokens."""
    flat, steep = (RoundCosts(0.5, widths).of_one_pass() for widths in ((1.0,) * 9, STEEP))
    (long,), (short, never) = (
        make_stopping("cost_ratio", [0] * count, None, costs, per_token=False)
        for count, costs in ((1, flat), (2, steep))
    )
    before = short.limit(8)
    assert long.limit(8) == 8 > before > 0
    for _ in range(40):
        short.update(4, 4)
        never.update(4, 0)
    assert short.limit(8) > before > never.limit(8) == 0 == short.limit(0)
    (each,) = make_stopping("cost_ratio", [0], None, RoundCosts(0.5, (1.0,) * 9), per_token=False)
    assert each.limit(8) < 8, "the control: a pass for each token"


@pytest.mark.parametrize("verify", [{}, {"temperature": 1.0, "verify": "coupled"}])
@pytest.mark.parametrize("execution", ["eager", "fused"])
def test_measured_costs_do_not_change_the_text_in_half_precision(
    execution: str, verify: dict[str, Any]
) -> None:
    model = hf_model(layers=3, hidden_size=256, intermediate_size=512, vocab_size=3000)
    target, draft_model = (
        native_of(model, dtype=torch.bfloat16, execution=execution) for _ in range(2)
    )
    drafter = ChainDrafter(model=draft_model)
    settings = Settings(max_new_tokens=48, num_draft_tokens=8, **verify)

    def decoded(t_draft_ms: float, **more: Any) -> tuple[list[list[int]], list[int]]:
        costs = RoundCosts(t_draft_ms, (1.0, 1.05))
        chosen = replace(settings, costs=costs, **more)
        made = [decode(target, drafter, [prompt], chosen)[0] for prompt in random_prompts(8)]
        return [one.tokens for one in made], [one.drafted for one in made]

    cheap, expensive = decoded(0.01), decoded(5.0)
    assert cheap[0] == expensive[0]
    if execution == "eager":
        assert cheap[1] == expensive[1], "a fixed length"
        # the control: lengths that follow the costs change the text
        assert decoded(0.01, stopping="cost_ratio")[0] != decoded(5.0, stopping="cost_ratio")[0]
    else:
        assert cheap[1] != expensive[1], "lengths follow the costs"


def test_costs_beyond_the_timed_widths_are_extrapolated() -> None:
    assert RoundCosts(0.1, (1.0, 1.5)).target_ms(4) == pytest.approx(2.5)
    assert RoundCosts(0.1, (1.0, 0.9)).target_ms(4) == pytest.approx(0.9), (
        "noise must not make wide forwards cheaper"
    )


def test_errors_name_the_policy() -> None:
    with pytest.raises(
        UserError, match="stopping 'mood' is unknown, expected one of fixed, confidence"
    ):
        make_stopping("mood", [1], None, None)
    with pytest.raises(UserError, match=r"'cost_ratio' needs measured costs"):
        make_stopping("cost_ratio", [1], None, None)
    with pytest.raises(UserError, match=r"stopping 'thompson' takes no threshold, found 0\.3"):
        make_stopping("thompson", [1], 0.3, None)


def test_the_guides_example_stops_when_the_draft_is_unlikely() -> None:
    """Run the class that docs/adding_a_drafter.md prints."""
    guide = (Path(__file__).parents[2] / "docs" / "adding_a_drafter.md").read_text(encoding="utf-8")
    names = dict(vars(policies))
    exec(guide.partition("```python\n")[2].partition("```")[0], names)
    rule = names["Survival"].make(0, 0.5)
    token = TokenConfidence(confidence=0.6, entropy=0.0)
    for _ in range(2):
        assert rule.limit(8) == 8
        assert [rule.more(depth, token) for depth in (1, 2)] == [True, False]
    assert (rule.reads, rule.learns, rule.ends_itself) == ("confidence", False, True)
