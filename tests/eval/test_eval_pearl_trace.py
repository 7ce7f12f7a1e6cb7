"""Speedups of PEARL's schedules, predicted from a trace.

Greedy acceptance is a property of each position, so a trace logged at one draft length predicts,
turn by turn, the decoder's rounds at every other length.
"""

from dataclasses import replace

import pytest

from decoding.costs.prediction import Costs, pearl_round
from decoding.drafters.chain import ChainDrafter
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from eval.run import run
from eval.statistics.pearl_trace import has_trace_turns, mean_lanes, speedup_from_trace, turns
from eval.statistics.schema import read_rows
from tests.decoding.test_laws import models
from tests.support.tiers import tiered
from tests.support.tiny_folders import config
from tests.support.tiny_targets import random_prompts

PREDICTED = ["pearl_virtual", "pearl_virtual_wo_pre", "pearl_virtual_wo_post"]
LIMIT = 60


def decoded(schedule: str, gamma: int) -> list[Generation]:
    target, _, draft_model = models()
    settings = Settings(max_new_tokens=LIMIT, stop_token_ids=(3, 17), num_draft_tokens=gamma)
    drafter = ChainDrafter(model=draft_model)
    return [
        decode(target, drafter, [p], replace(settings, schedule=schedule))[0]
        for p in random_prompts(12)
    ]


@pytest.fixture(scope="module")
def traces() -> list[str]:
    """Return traces logged under PEARL, which tests every position."""
    found = [generation.trace for generation in decoded("pearl_virtual", 3)]
    assert not any("." in trace for trace in found)
    assert any("0" in trace for trace in found)
    assert any("11" in trace for trace in found)
    return found


def counts(trace: str, gamma: int, schedule: str) -> tuple[int, int, int]:
    """Return (target forwards, drafted tokens, emitted tokens) that follow from a trace."""
    taken = list(turns(trace, gamma, LIMIT, schedule))
    return (
        sum(t.width > 0 for t in taken),
        sum(t.drafted for t in taken),
        sum(t.gained for t in taken),
    )


@pytest.mark.parametrize("gamma", tiered([1, 2, 5], [5]))
@pytest.mark.parametrize("schedule", PREDICTED)
def test_a_trace_predicts_every_schedule_at_every_length(
    schedule: str, gamma: int, traces: list[str]
) -> None:
    real = decoded(schedule, gamma)
    assert [counts(t, gamma, schedule) for t in traces] == [
        (g.rounds, g.draft_steps, len(g.tokens)) for g in real
    ]


def test_an_inverted_trace_is_noticed(traces: list[str]) -> None:
    """Control: an inverted trace predicts other counts."""
    real = [(g.rounds, g.draft_steps) for g in decoded("pearl_virtual", 2)]
    inverted = [trace.translate(str.maketrans("01", "10")) for trace in traces]
    assert [counts(t, 2, "pearl_virtual")[:2] for t in inverted] != real


def test_many_coins_give_the_closed_form() -> None:
    import random

    coin = random.Random(3)
    trace = "".join("1" if coin.random() < 0.7 else "0" for _ in range(200_000))
    costs = Costs(
        0.3, {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4}, overhead=0.2, baseline_overhead=0.1
    )
    tokens, cost = pearl_round(0.7, 4, costs)
    predicted = speedup_from_trace(list(turns(trace, 4, len(trace) + 100, "pearl_virtual")), costs)
    assert predicted == pytest.approx(tokens * 1.1 / cost, rel=0.01)


def test_a_trace_keeps_bursts() -> None:
    """Check that a trace predicts a higher speedup if accepted tokens come in long runs.

    Both traces have the same acceptance rate.
    """
    costs = Costs(0.25, {1: 1.0, 5: 1.0})
    even, bursts = "10" * 500, ("1" * 50 + "0" * 50) * 10
    speeds = [
        speedup_from_trace(list(turns(trace, 4, 2_000, "pearl_virtual")), costs)
        for trace in (even, bursts)
    ]
    assert speeds[1] > 1.3 * speeds[0]


def test_rounds_are_priced_by_their_longer_lane() -> None:
    costs = Costs(0.5, {1: 1.0, 3: 1.6})
    # A pre-verify turn (three drafts, one row), a post-verify turn (three drafts, three rows), and
    # the last one.
    assert [t.width for t in turns("111111", 3, 100, "pearl_virtual")] == [1, 3, 3]
    assert mean_lanes(["111111"], 3, 100, "pearl_virtual", costs) == pytest.approx(
        (1.5 + 1.6 + 1.6) / 3
    )


def test_untested_tokens_of_a_trace_are_named() -> None:
    assert not has_trace_turns("pearl_plus_virtual")
    assert not has_trace_turns("serial")
    with pytest.raises(ValueError, match="token 2 was never tested"):
        list(turns("11.1", 2, 10, "pearl_virtual"))


def test_overlapped_rows_are_predicted_from_traces(home):
    shallow = str(home / "shallow")
    names = ["pearl_virtual", "pearl_virtual_wo_pre", "pearl_virtual_wo_post", "pearl_plus_virtual"]
    ways = [{"use": shallow, "schedule": name, "name": name} for name in names]
    folder = run(config(home, "predicted", drafters=ways, temperatures=[0.0], sweep=[3]))
    rows = {row.drafter: row for row in read_rows(folder / "results.jsonl") if row.part == "main"}
    assert all(rows[name].replayed_speedup > 0 for name in names[:3])
    assert [rows[name].length_rule for name in names] == ["fastest"] * 3 + ["own"]
    assert all(rows[name].verdict.startswith("there is no formula") for name in names[1:])
    assert rows["pearl_plus_virtual"].replayed_speedup is None, "its turns depend on costs too"
    assert rows["prompt_lookup"].replayed_speedup is None
