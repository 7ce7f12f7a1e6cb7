"""PEARL's schedule under laws 1, 2 and 4, its clock, and its errors.

Law 3 is in test_law_of_overlap.py, law 5 in test_pearl_edges.py.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.with_lookup import ChainWithLookup
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Drafter
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.schedules.by_name import VIRTUAL
from decoding.schedules.pearl import LaneSeconds, Pearl
from tests.support.oracle_drafters import Oracle
from tests.support.tiers import tiered
from tests.support.tiny_targets import VOCABULARY, random_prompts

from .law_3 import WARPERS
from .rows import BY_NAME, COSTS, Kit
from .test_laws import models, with_rule

# rows whose drafters continue a chain before it is verified
# the first and the last two read the text alone
AHEAD = ("chain", "eagle3_chain", "eagle1_chain", "recurrent_chain", "parallel", "specdiff_sampled")
BATCHED = ["pearl_virtual", "pearl_virtual_wo_post"]
PUBLISHED = [name for name in VIRTUAL if "plus" not in name]


def drafter_of(row: str) -> Drafter:
    """Return the drafter of a row for the target of `models`."""
    return BY_NAME[row].make(Kit(*models(), ()))


def run(
    prompts: Sequence[Sequence[int]], settings: Settings, row: str = "chain"
) -> tuple[list[Generation], list[Generation]]:
    """Return the generations without a drafter, and those under the schedule of `settings`.

    Prompts are decoded one by one if the schedule runs one prompt at a time. row: the drafter's.
    """
    target, drafter = models()[0], drafter_of(row)
    plain = decode(target, None, prompts, settings)
    if settings.schedule in BATCHED:
        return plain, decode(target, drafter, prompts, settings)
    return plain, [
        decode(target, drafter, [p], settings, request_ids=[i])[0] for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("schedule", "gamma", "row"),
    tiered(product(PUBLISHED, (1, 2, 5), AHEAD), [("pearl_virtual", 2, row) for row in AHEAD]),
)
def test_law_1_greedy_output_is_the_targets_own(schedule: str, gamma: int, row: str) -> None:
    # One prompt at a time takes ten times as long; twelve have over a thousand tokens to equal.
    plain, drafted = run(
        random_prompts(64 if schedule in BATCHED else 12),
        Settings(max_new_tokens=128, num_draft_tokens=gamma, schedule=schedule),
        row,
    )
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert sum(g.accepted for g in drafted) > 0


@pytest.mark.parametrize(
    ("schedule", "warper", "row"),
    tiered(
        product(PUBLISHED, WARPERS, AHEAD), [("pearl_virtual", "hot_top_p", row) for row in AHEAD]
    ),
)
def test_law_2_coupled_output_is_the_targets_own_sample(
    schedule: str, warper: str, row: str
) -> None:
    settings = Settings(
        max_new_tokens=48,
        num_draft_tokens=3,
        verify="coupled",
        seed=11,
        schedule=schedule,
        **WARPERS[warper],
    )
    # equality is exact, so more prompts add no power but what a batch adds
    plain, drafted = run(random_prompts(24 if schedule in BATCHED else 8), settings, row)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]


@pytest.mark.parametrize("rule", ["greedy", "token", "coupled"])
def test_law_4_a_perfect_drafter_has_its_closed_form(rule: str) -> None:
    """Check that the pre-verify round emits 1 token, and every post-verify round gamma tokens."""
    gamma, rounds = 4, 6
    settings = with_rule(
        rule, num_draft_tokens=gamma, max_new_tokens=1 + gamma * rounds, schedule="pearl_virtual"
    )
    target, twin, _ = models()
    for generation in decode(target, ChainDrafter(model=twin), random_prompts(16), settings):
        assert generation.rounds == 1 + rounds
        assert generation.accepted == generation.tested


def test_the_ablations_have_their_closed_forms() -> None:
    gamma = 4
    target, twin, _ = models()
    settings = Settings(num_draft_tokens=gamma, max_new_tokens=1 + 24)
    without_post = replace(settings, schedule="pearl_virtual_wo_post")
    for generation in decode(target, ChainDrafter(model=twin), random_prompts(4), without_post):
        assert generation.rounds == 10  # pairs of 1 and gamma: the assumed gamma - 1 and a bonus
    without_pre = replace(settings, schedule="pearl_virtual_wo_pre")
    for prompt in random_prompts(4):
        (generation,) = decode(target, ChainDrafter(model=twin), [prompt], without_pre)
        assert generation.rounds == 6  # gamma + 1 in the first, gamma in every other one


class Adversary(Oracle):
    """Adversarial drafter that can overlap with the target."""

    capabilities = Capabilities(shape="chain", steps="round", can_overlap=True)


@pytest.mark.parametrize("rule", tiered(["greedy", "coupled"], ["coupled"]))
@pytest.mark.parametrize("schedule", VIRTUAL)
def test_law_4_an_adversarial_drafter_changes_nothing(schedule: str, rule: str) -> None:
    target, _, _ = models()
    settings = with_rule(rule, max_new_tokens=24, costs=COSTS)
    for number, prompt in enumerate(random_prompts(6)):
        (plain,) = decode(target, None, [prompt], settings, request_ids=[number])
        drafter = Adversary([plain.tokens], VOCABULARY, wrong=True)
        (done,) = decode(
            target, drafter, [prompt], replace(settings, schedule=schedule), request_ids=[number]
        )
        assert (done.tokens, done.accepted, done.block_efficiency) == (plain.tokens, 0, 1)
        assert done.tested > 0


@pytest.mark.parametrize(("draft_ms", "target_ms"), [(12, 3), (3, 12)])
def test_the_virtual_clock_hides_the_shorter_lane(
    draft_ms: int, target_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check on lanes that sleep that a round costs the time of its longer lane."""
    target, twin, _ = models()
    drafter = ChainDrafter(model=twin)
    propose, forward = drafter.propose, target.forward

    def slow(action: Callable[..., Any], milliseconds: int) -> Callable[..., Any]:
        def act(*given: Any) -> Any:
            time.sleep(milliseconds / 1000)
            return action(*given)

        return act

    monkeypatch.setattr(drafter, "propose", slow(propose, draft_ms))
    monkeypatch.setattr(target, "forward", slow(forward, target_ms))
    settings = Settings(max_new_tokens=13, num_draft_tokens=4, schedule="pearl_virtual")
    (done,) = decode(target, drafter, [[4, 5]], settings)
    both = done.draft_seconds + done.target_seconds
    assert done.lanes_seconds == pytest.approx(both - done.shorter_seconds)
    assert done.shorter_seconds >= 0.003 * (done.rounds - 1)
    assert done.lanes_seconds < both - 0.002 * (done.rounds - 1)
    assert done.decode_seconds >= done.lanes_seconds >= 0.012 * (done.rounds - 1)


@pytest.mark.parametrize("stopping", ["assisted", "cost_ratio"])
def test_policies_that_learn_from_rounds_are_refused(stopping: str) -> None:
    target, twin, _ = models()
    settings = Settings(schedule="pearl_virtual", stopping=stopping, costs=COSTS)
    with pytest.raises(
        UserError, match=f"stopping cannot be '{stopping}', which learns from rounds. Use fixed or"
    ):
        decode(target, ChainDrafter(model=twin), [[4]], settings)
    decode(
        target,
        ChainDrafter(model=twin),
        [[4]],
        replace(settings, stopping="confidence", max_new_tokens=4),
    )


def test_the_rest_of_a_round_is_charged_on_top_of_the_longer_lane() -> None:
    batch = object.__new__(Pearl)
    batch.rows = [type("Row", (), {"generation": Generation()})()]  # type: ignore[assignment]
    for draft, target in ((2.0, 3.0), (4.0, 1.0)):
        batch._charge(batch.rows, 1, LaneSeconds(draft, target, max(draft, target)), 0.5)
    assert batch.rows[0].generation.decode_seconds == pytest.approx(3.5 + 4.5)
    assert batch.rows[0].generation.draft_seconds == pytest.approx(6.0)
    assert batch.rows[0].generation.target_seconds == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("fields", "drafter", "words"),
    [
        (
            {"schedule": "parallel"},
            ChainDrafter,
            "schedule 'parallel' is unknown, expected one of serial, pearl_virtual",
        ),
        (
            {"verify": "block", "temperature": 1.0},
            ChainDrafter,
            "verify=block cannot do. Use verify=token or verify=coupled",
        ),
        ({}, ChainWithLookup, "needs a chain drafter that can run"),
        ({"schedule": "pearl_wall"}, ChainDrafter, "needs a drafter in a separate process"),
        ({"schedule": "pearl_virtual_wo_pre"}, ChainDrafter, "runs one prompt at a time, found 2"),
    ],
)
def test_errors_name_the_unsupported_setting(
    fields: dict, drafter: type[ChainDrafter], words: str
) -> None:
    target, twin, _ = models()
    settings = Settings(**{"schedule": "pearl_virtual", **fields})
    with pytest.raises(UserError, match=words):
        decode(target, drafter(model=twin), [[4], [5]], settings)


def test_without_a_drafter_the_schedule_is_serial() -> None:
    target, _, _ = models()
    settings = Settings(max_new_tokens=6, schedule="pearl_virtual")
    assert (
        decode(target, None, [[4]], settings)[0].tokens
        == decode(target, None, [[4]], replace(settings, schedule="serial"))[0].tokens
    )
