"""Law 5 under PEARL's schedules: batches, stop tokens, context limits, short texts, caches."""

from dataclasses import replace

import pytest

from decoding.drafters.chain import ChainDrafter
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.schedules.by_name import VIRTUAL
from decoding.schedules.pearl import Pearl
from tests.support.tiers import tiered
from tests.support.tiny_targets import hf_model, native_of, random_prompts

from .rows import COSTS
from .test_law_controls import Breaker, key_noise_by_place
from .test_laws import models, with_rule
from .test_pearl import AHEAD, BATCHED, drafter_of, run

by_row = pytest.mark.parametrize("row", tiered(AHEAD, AHEAD[:-1]))
by_rule = pytest.mark.parametrize("rule", tiered(["greedy", "token", "coupled"], ["token"]))


@by_row
@by_rule
@pytest.mark.parametrize("schedule", BATCHED)
def test_law_5_ragged_batches_equal_single_rows(schedule: str, rule: str, row: str) -> None:
    settings = with_rule(rule, max_new_tokens=20, stop_token_ids=(3, 4), schedule=schedule)
    target, drafter = models()[0], drafter_of(row)
    prompts = random_prompts(10, seed=3)
    ids = [40 + i for i in range(len(prompts))]
    together = decode(target, drafter, prompts, settings, request_ids=ids)
    for prompt, request, expected in zip(prompts, ids, together):
        (alone,) = decode(target, drafter, [prompt], settings, request_ids=[request])
        assert (
            alone.tokens,
            alone.rounds,
            alone.drafted,
            alone.accepted_by_depth,
            alone.finish,
        ) == (
            expected.tokens,
            expected.rounds,
            expected.drafted,
            expected.accepted_by_depth,
            expected.finish,
        )
    assert {g.finish for g in together} == {"stop", "length"}


@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_law_5_rejects_noise_of_the_place(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key_noise_by_place(monkeypatch)
    with pytest.raises(AssertionError):
        test_law_5_ragged_batches_equal_single_rows("pearl_virtual", rule, "chain")


@by_row
@by_rule
@pytest.mark.parametrize("schedule", [name for name, kind in VIRTUAL.items() if kind.one_row])
def test_law_5_earlier_requests_change_nothing(schedule: str, rule: str, row: str) -> None:
    """Check that schedules of one row give the same output in both orders of the requests."""
    settings = with_rule(
        rule, max_new_tokens=20, stop_token_ids=(3, 4), schedule=schedule, costs=COSTS
    )
    target, drafter, found = models()[0], drafter_of(row), []
    requests = list(enumerate(random_prompts(10, seed=3)))
    for order in (requests, requests[::-1]):
        done = {
            i: decode(target, drafter, [prompt], settings, request_ids=[i])[0]
            for i, prompt in order
        }
        found.append(
            [(g.tokens, g.rounds, g.drafted, g.accepted_by_depth) for _, g in sorted(done.items())]
        )
        assert {g.finish for g in done.values()} == {"stop", "length"}
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", tiered(["greedy", "coupled"], ["coupled"]))
@pytest.mark.parametrize("schedule", VIRTUAL)
def test_law_5_a_stop_token_inside_the_assumed_span_ends_the_row(schedule: str, rule: str) -> None:
    target, twin, _ = models()
    free = with_rule(rule, max_new_tokens=30, costs=COSTS)
    for number, prompt in enumerate(random_prompts(6)):
        (plain,) = decode(target, None, [prompt], free, request_ids=[number])
        stop = next(
            i for i, token in enumerate(plain.tokens) if i >= 6 and token not in plain.tokens[:i]
        )
        settings = replace(
            free, num_draft_tokens=4, stop_token_ids=(plain.tokens[stop],), schedule=schedule
        )
        (done,) = decode(target, ChainDrafter(model=twin), [prompt], settings, request_ids=[number])
        assert (done.tokens, done.finish) == (plain.tokens[: stop + 1], "stop")
        assert done.accepted <= stop + 1, "tokens after the stop were counted"
        assert done.accepted > 0


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_law_5_rejects_tokens_behind_a_stop(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Pearl.__init__

    def init(self: Pearl, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        self.stops = frozenset()

    monkeypatch.setattr(Pearl, "__init__", init)
    with pytest.raises(AssertionError):
        test_law_5_a_stop_token_inside_the_assumed_span_ends_the_row("pearl_virtual", rule)


@pytest.mark.parametrize("schedule", VIRTUAL)
def test_law_5_a_drafter_at_the_end_of_its_context_leaves_the_rest_to_the_target(
    schedule: str,
) -> None:
    model = hf_model("llama", layers=2)
    target, short = native_of(model), native_of(model, noise=0.03, max_length=14)
    settings = Settings(max_new_tokens=24, num_draft_tokens=3, schedule=schedule, costs=COSTS)
    for prompt in ([4, 9], [4] * 20):
        (plain,) = decode(target, None, [prompt], settings)
        (done,) = decode(target, ChainDrafter(model=short), [prompt], settings)
        assert done.tokens == plain.tokens


@by_row
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("schedule", VIRTUAL)
def test_law_5_one_token_prompts_and_one_token_outputs(schedule: str, rule: str, row: str) -> None:
    target, drafter = models()[0], drafter_of(row)
    for length in (1, 2, 12):
        settings = with_rule(rule, max_new_tokens=length, costs=COSTS, schedule=schedule)
        for prompt in ([7], [9, 4]):
            (plain,) = decode(target, None, [prompt], settings)
            (done,) = decode(target, drafter, [prompt], settings)
            assert (done.tokens, len(done.tokens)) == (plain.tokens, length)


@pytest.mark.parametrize("row", ["chain", "eagle3_chain"])
@pytest.mark.parametrize("schedule", VIRTUAL)
def test_law_5_cache_lengths_after_every_round(
    schedule: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = 0
    original = Pearl.round

    def checked(self: Pearl) -> None:
        nonlocal seen
        original(self)
        assert isinstance(self.drafter, ChainDrafter)
        for row, lane, held, drafted in zip(
            self.rows, self.lanes, self.target.lengths_B, self.drafter.model.lengths_B
        ):
            # The tip is in no cache; assumed tokens are in the drafter's only.
            assert held == len(row.sequence) - 1
            assert drafted < len(row.sequence) + len(lane.tokens) <= row.limit
            seen += 1

    monkeypatch.setattr(Pearl, "round", checked)
    run(
        random_prompts(8),
        Settings(max_new_tokens=40, num_draft_tokens=3, schedule=schedule, costs=COSTS),
        row,
    )
    assert seen > 100


def keep_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep one token more than was accepted in the target's cache."""
    original = Pearl._settle

    def longer(self: Pearl, *given: object) -> list[int]:
        keep = original(self, *given)  # type: ignore[arg-type]
        self.target.commit(None, [1] * len(self.rows))
        return keep

    monkeypatch.setattr(Pearl, "_settle", longer)


def keep_what_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep rejected tokens in the drafter's cache."""
    monkeypatch.setattr(ChainDrafter, "rollback", lambda self, lengths_B: None)


@pytest.mark.parametrize("broken", [keep_one_too_many, keep_what_was_drafted])
@pytest.mark.parametrize("schedule", VIRTUAL)
def test_law_5_rejects_a_cache_that_is_too_long(
    schedule: str, broken: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        test_law_5_cache_lengths_after_every_round(schedule, "chain", monkeypatch)
