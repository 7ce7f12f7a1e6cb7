"""PEARL with the drafter in a worker process, which emits the tokens of the virtual clock."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.remote import RemoteChain
from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from decoding.loop import decode, prefill_batch
from decoding.rounds import batch as batch_module
from decoding.rounds.settings import Settings
from decoding.schedules.by_name import WALL
from decoding.schedules.pearl_plus import PearlPlus, PearlPlusWall
from tests.support.tiers import tiered
from tests.support.tiny_targets import VOCABULARY, random_prompts

from .test_laws import models, with_rule
from .test_processors import letters


@pytest.mark.parametrize("rule", tiered(["greedy", "token", "coupled"], ["token"]))
@pytest.mark.parametrize("schedule", [name for name in WALL if "plus" not in name])
def test_the_wall_clock_gives_the_tokens_of_the_virtual_clock(
    schedule: str, rule: str, remote: RemoteChain, folder: Path
) -> None:
    """Check that both clocks give equal tokens and counts, so laws 1 to 5 hold on both."""
    target, _, _ = models()
    local = ChainDrafter(folder, dtype="float64")
    settings = with_rule(rule, max_new_tokens=40, stop_token_ids=(3,), num_draft_tokens=3)
    several = [[7], *random_prompts(5)]
    groups = [several] if schedule == "pearl_wall" else [[prompt] for prompt in several[:4]]
    accepted = 0
    for prompts in groups:
        virtual = decode(
            target, local, prompts, replace(settings, schedule=schedule.replace("wall", "virtual"))
        )
        wall = decode(target, remote, prompts, replace(settings, schedule=schedule))
        counts = [
            (g.tokens, g.rounds, g.drafted, g.tested_by_depth, g.accepted_by_depth, g.finish)
            for g in wall
        ]
        assert counts == [
            (g.tokens, g.rounds, g.drafted, g.tested_by_depth, g.accepted_by_depth, g.finish)
            for g in virtual
        ]
        accepted += sum(g.accepted for g in wall)
    assert accepted > 0


def test_allowed_tokens_are_applied_without_the_worker(remote: RemoteChain) -> None:
    target, _, _ = models()
    settings = Settings(
        max_new_tokens=24,
        allowed=lambda text: range(text[-1] % 2, VOCABULARY, 2),
        schedule="pearl_wall",
    )
    plain = decode(target, None, random_prompts(4), settings)
    assert [g.tokens for g in decode(target, remote, random_prompts(4), settings)] == [
        g.tokens for g in plain
    ]


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("schedule", WALL)
def test_a_stop_string_ends_a_row_on_the_wall_clock(
    schedule: str, rule: str, remote: RemoteChain
) -> None:
    target, _, _ = models()
    free = with_rule(
        rule, max_new_tokens=40, num_draft_tokens=4, costs=RoundCosts(0.3, (1.0, 1.1, 1.2, 1.3))
    )
    for number, prompt in enumerate(random_prompts(2)):
        (plain,) = decode(target, None, [prompt], free, request_ids=[number])
        text = letters(plain.tokens)
        settings = replace(free, stop_strings=(text[16:19],), text_of=letters, schedule=schedule)
        (done,) = decode(target, remote, [prompt], settings, request_ids=[number])
        end = text.index(text[16:19]) + 3
        assert (done.tokens, done.finish) == (plain.tokens[:end], "stop")


def test_the_wall_clock_includes_both_lanes(remote: RemoteChain) -> None:
    target, _, _ = models()
    (done,) = decode(
        target, remote, random_prompts(1), Settings(max_new_tokens=40, schedule="pearl_wall")
    )
    assert (
        done.decode_seconds
        >= done.lanes_seconds
        >= max(done.target_seconds, 0.9 * done.draft_seconds)
        > 0
    )


def test_a_failed_round_leaves_the_worker_usable(remote: RemoteChain) -> None:
    """Check that a decode discards the worker's answer that a failed decode left unread."""
    target, _, _ = models()
    settings = Settings(max_new_tokens=16, schedule="pearl_wall", num_draft_tokens=3)
    before = decode(target, remote, [[4, 5]], settings)[0].tokens
    calls = []

    def dries_up(text: Sequence[int]) -> list[int]:
        calls.append(text)
        return [] if len(calls) > 3 else list(range(VOCABULARY))

    with pytest.raises(UserError, match="allows no token"):
        decode(target, remote, [[4, 5]], replace(settings, allowed=dries_up))
    assert decode(target, remote, [[4, 5]], settings)[0].tokens == before


@pytest.mark.parametrize("regime", [(0.01, 0.05), (0.9, 0.0), (0.08, 0.0)])
def test_pearl_plus_gives_the_tokens_of_the_virtual_clock(
    regime: tuple[float, float], remote: RemoteChain, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that both clocks give equal tokens and counts, so law 3 holds on both.

    The overlap and the rest, which are otherwise measured, are fixed.
    """
    monkeypatch.setattr(PearlPlusWall, "_measured_overlap", lambda self: 1.0)
    monkeypatch.setattr(PearlPlusWall, "_rest_ms", PearlPlus._rest_ms)
    target, _, _ = models()
    costs = RoundCosts(regime[0], (1.0, 1.02, 1.04, 1.06), regime[1])
    settings = with_rule(
        "token", max_new_tokens=40, stop_token_ids=(3,), num_draft_tokens=4, costs=costs
    )
    for number, prompt in enumerate(random_prompts(4)):
        counts = [
            (g.tokens, g.rounds, g.drafted, g.accepted_by_depth)
            for schedule, drafter in (
                ("pearl_plus_virtual", ChainDrafter(folder, dtype="float64")),
                ("pearl_plus_wall", remote),
            )
            for g in decode(
                target,
                drafter,
                [prompt],
                replace(settings, schedule=schedule),
                request_ids=[number],
            )
        ]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_the_drafter_continues_until_the_target_is_done(
    rule: str, remote: RemoteChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a slow target lengthens chunks beyond the chosen length and keeps the text."""
    target, _, _ = models()
    settings = with_rule(
        rule, max_new_tokens=40, num_draft_tokens=12, costs=RoundCosts(0.9, (1.0, 1.1, 1.2, 1.3))
    )
    settings = replace(settings, schedule="pearl_plus_wall")
    plain = [
        decode(target, None, [p], settings, request_ids=[i])[0].tokens
        for i, p in enumerate(random_prompts(3))
    ]
    forward, lengths = target.forward, {}
    for name, pause in (("quick", 0.0), ("slow", 0.06)):

        def act(*given: Any, pause: float = pause) -> Any:
            time.sleep(pause)
            return forward(*given)

        monkeypatch.setattr(target, "forward", act)
        done = [
            decode(target, remote, [p], settings, request_ids=[i])[0]
            for i, p in enumerate(random_prompts(3))
        ]
        assert [generation.tokens for generation in done] == plain
        lengths[name] = sum(g.drafted for g in done) / sum(g.rounds for g in done)
    # no margin, as other processes can slow the quick target down
    assert lengths["slow"] > lengths["quick"]


def test_pearl_plus_with_a_worker_keeps_the_targets_output(remote: RemoteChain) -> None:
    """Check the text alone, since the choices, and with them the counts, depend on the clock."""
    target, _, _ = models()
    costs = RoundCosts(0.3, (1.0, 1.1, 1.2, 1.3))
    for rule in ("greedy", "coupled"):
        settings = with_rule(rule, max_new_tokens=40, costs=costs)
        for number, prompt in enumerate(random_prompts(4)):
            (plain,) = decode(target, None, [prompt], settings, request_ids=[number])
            (drafted,) = decode(
                target,
                remote,
                [prompt],
                replace(settings, schedule="pearl_plus_wall"),
                request_ids=[number],
            )
            assert drafted.tokens == plain.tokens


def test_the_rest_of_a_round_with_two_lanes_is_measured(
    remote: RemoteChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a slow rule lengthens the rest of a round, and a slow target does not."""
    target, _, _ = models()
    costs = RoundCosts(0.9, (1.0, 1.02, 1.04, 1.06), 0.0)  # two lanes pay
    settings = Settings(
        max_new_tokens=24, num_draft_tokens=4, costs=costs, schedule="pearl_plus_wall"
    )
    # measurements must not change the choices
    monkeypatch.setattr(PearlPlusWall, "_measured_overlap", lambda self: 1.0)
    monkeypatch.setattr(PearlPlusWall, "_rest_ms", PearlPlus._rest_ms)

    def measured_rest_ms() -> float:
        batch = prefill_batch(target, remote, [[4, 5]], settings)
        assert isinstance(batch, PearlPlusWall)
        generation = batch.rows[0].generation
        while batch.rows:
            batch.round()
        batch.close()
        assert batch._verifying > 0
        return 1000 * batch._rest / generation.rounds

    plain, forward = measured_rest_ms(), target.forward
    with monkeypatch.context() as slow_lane:
        slow_lane.setattr(target, "forward", lambda *given: (time.sleep(0.02), forward(*given))[1])
        assert measured_rest_ms() < plain + 10
    rule = batch_module.RULES["greedy"]
    monkeypatch.setitem(
        batch_module.RULES, "greedy", lambda *given: (time.sleep(0.02), rule(*given))[1]
    )
    assert measured_rest_ms() > plain + 15
