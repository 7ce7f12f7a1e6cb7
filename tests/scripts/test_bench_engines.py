"""The table of scripts/bench/engines.py from recorded rounds; no engine runs."""

import random

import pytest

from decoding.errors import UserError
from eval.engines.measure import median_result
from eval.engines.plan import EngineArm
from eval.engines.records import EngineRecord
from eval.engines.rows import build_engine_rows
from eval.statistics.engine_row import EngineRow
from eval.statistics.metrics import paired_bootstrap
from scripts.bench import common, engines
from serving.engines.interface import Answer, BatchResult
from tests.support.simulated_records import run_facts

TOKENS, PROMPTS = 20, 8
Rounds = dict[str, list[list[float]]]  # engine -> seconds of each prompt in each round


def recorded(slowdown: dict[str, float], prompts: int) -> Rounds:
    """Return three rounds of each engine, of which one is three times as slow."""
    dice = random.Random(5)
    rounds: Rounds = {engine: [] for engine in slowdown}
    for _ in range(prompts):
        slow = dice.randrange(3)
        for engine, factor in slowdown.items():
            seconds = [factor * dice.uniform(0.9, 1.1) for _ in range(3)]
            seconds[slow] *= 3
            rounds[engine].append(seconds)
    return rounds


def median_record(engine: str, unit: int, seconds: list[float]) -> EngineRecord:
    repeats = [
        BatchResult([Answer([7] * TOKENS, None, one)], one, TOKENS, 0, 0, []) for one in seconds
    ]
    result = median_result(repeats)
    return EngineRecord(
        **vars(EngineArm(engine)),
        rule="greedy",
        ignore_eos=False,
        temperature=0.0,
        batch_size=1,
        unit=unit,
        turn=0,
        sample=0,
        prompt_ids=[f"prompt-{unit}"],
        outputs=[result.answers[0].tokens],
        seconds=result.seconds,
        first_token_seconds=[None],
        rounds=TOKENS,
        drafted=0,
        accepted=0,
        tested_by_depth=[],
        accepted_by_depth=[],
        differs_at=[None],
        gaps=[None],
    )


def rows_of(rounds: Rounds) -> list[EngineRow]:
    records = [
        median_record(engine, unit, seconds)
        for engine, units in rounds.items()
        for unit, seconds in enumerate(units)
    ]
    arms = [EngineArm(engine) for engine in rounds]
    return build_engine_rows(run_facts(), {}, records, arms, {}, [], ignore_eos=False)


def test_the_table_has_the_medians_of_the_rounds_and_an_interval_over_prompts() -> None:
    """Check the ratio and its interval against a bootstrap of ours over the fastest engine.

    Control: the means of the rounds give another ratio.
    """
    rounds = recorded({"ours": 1.0, "slow": 2.0, "fast": 1.25}, PROMPTS)
    [line] = engines.over_the_fastest(rows_of(rounds), rounds=3)
    tokens = [TOKENS] * PROMPTS
    ours, fast = ([sorted(unit)[1] for unit in rounds[name]] for name in ("ours", "fast"))
    found = paired_bootstrap(tokens, ours, tokens, fast, resamples=500)
    assert line == (
        f"batch 1, temperature 0: {TOKENS * PROMPTS / sum(ours):.1f} tokens/s, {found.value:.2f}x "
        f"[{found.low:.2f}, {found.high:.2f}] of fast (8 prompts, median of 3 rounds)"
    )
    assert 1.1 < found.low < found.value < found.high < 1.4
    mean = sum(map(sum, rounds["fast"])) / sum(map(sum, rounds["ours"]))
    assert f"{mean:.2f}x" not in line


def test_few_prompts_have_no_interval_and_an_engine_alone_no_line() -> None:
    few = recorded({"ours": 1.0, "fast": 1.25}, prompts=4)
    [line] = engines.over_the_fastest(rows_of(few), rounds=3)
    assert "x of fast (4 prompts, median of 3 rounds)" in line
    assert engines.over_the_fastest(rows_of({"ours": few["ours"]}), rounds=3) == []


def test_the_median_of_an_even_number_of_rounds_is_one_of_them() -> None:
    results = [BatchResult([], seconds, None, None, None, None) for seconds in (4.0, 1.0, 3.0, 2.0)]
    assert median_result(results).seconds == 2.0


def test_fewer_than_three_rounds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = engines.Options(rounds=2)
    monkeypatch.setattr(common, "read_options", lambda *_, **__: chosen)
    with pytest.raises(UserError, match="rounds is 2, expected at least 3"):
        engines.main()
