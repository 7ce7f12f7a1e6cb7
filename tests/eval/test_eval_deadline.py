"""`max_seconds` of eval.run: the prompts that fit, the same for every row, with a minimum."""

import math
import re
from collections import defaultdict
from pathlib import Path

import pytest

from decoding.errors import UserError
from eval.config import BenchmarkConfig, EvalConfig
from eval.measure.deadline import Deadline
from eval.measure.measurement import Bench
from eval.measure.records import Arm, Condition, Record, read_records, write_records
from eval.measure.session import Session
from eval.measure.setup import load
from eval.run import run
from eval.statistics.schema import read_rows
from tests.support import tiny_folders as tiny
from tests.support.tiny_folders import config

PROMPTS = 14  # 2 go to the sweep


class Clock:
    """A clock that only decoding advances, by `a_batch` seconds per batch."""

    def __init__(self, a_batch: float = 1.0) -> None:
        self.now, self.a_batch = 0.0, a_batch

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    real, clock = Bench.decode, Clock()

    def decode(self, *given):
        clock.now += clock.a_batch
        return real(self, *given)

    monkeypatch.setattr(Bench, "decode", decode)
    monkeypatch.setattr("eval.measure.session.warm_up", lambda *_: None)
    return clock


def bounded(home: Path, name: str, **changes: object) -> EvalConfig:
    """Return a configuration with a bound of 40 s, enough for 7 prompts of the main part.

    A prompt of the sweep takes 6 batches (two temperatures, three arms), and a prompt of the main
    part takes 4.
    """
    if not (home / "many.jsonl").is_file():
        tiny.prompts(home / "many.jsonl", count=PROMPTS)
    usual = {
        "max_new_tokens": 4,
        "timing_repeats": 1,
        "max_seconds": 40.0,
        "prompt_lookup_control": False,
    }
    benchmark = BenchmarkConfig(path=str(home / "many.jsonl"))
    return config(home, name, **{"benchmark": benchmark, **usual, **changes})


def measured(home: Path, clock: Clock, name: str, **changes: object) -> list[Record]:
    """Measure a run without writing its report, and return all its records."""
    cfg = bounded(home, name, **changes)
    folder = Path(cfg.output_dir)
    folder.mkdir(exist_ok=True)
    session = Session(cfg, load(cfg), folder, Deadline(cfg.max_seconds, folder, clock))
    session.measure()
    return session.records


def prompts_of(records: list[Record], part: str = "main") -> dict[Condition, list[str]]:
    """Return the prompts of a part by condition, in the order of measurement.

    Asserts that all arms of a condition have the same prompts in the same order.
    """
    found: dict[Condition, dict[Arm, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.part == part:
            found[record.condition][record.arm].append(record.prompt_id)
    for by_arm in found.values():
        assert len(by_arm) > 1 and len(set(map(tuple, by_arm.values()))) == 1, "not paired"
    return {condition: next(iter(by_arm.values())) for condition, by_arm in found.items()}


def test_as_many_prompts_as_fit_are_measured_and_reported(home, clock, capsys):
    folder = run(bounded(home, "some"), clock)
    assert clock.now == 2 * 6 + 7 * 4
    cold, hot = prompts_of(read_records(folder / "records.jsonl")).values()
    assert cold == hot and len(cold) == 7
    assert cold != sorted(cold, key=lambda one: int(one[1:])), (
        "shuffled: a file may be sorted by kind"
    )
    rows = read_rows(folder / "results.jsonl")
    assert {(row.part, row.prompts, row.prompts_asked) for row in rows} == {
        ("sweep", 2, 2),
        ("main", 7, 12),
    }
    words = "7 of 12 prompts (those that fit into 40 s)"
    assert words in " ".join(capsys.readouterr().out.split())
    page = (folder / "report.html").read_text()
    assert (
        words in page and "5 of 12 prompts: max_seconds=40 ended before they were measured" in page
    )
    run(bounded(home, "some"), clock)
    assert words in " ".join(capsys.readouterr().out.split()), "a finished run reports it again"


def test_a_minimum_that_exceeds_the_bound_is_reported_with_its_seconds(home, clock, capsys):
    folder = run(bounded(home, "over", max_seconds=20.0), clock)
    assert clock.now == 2 * 6 + 5 * 4
    assert {row.overrun_seconds for row in read_rows(folder / "results.jsonl")} == {32.0}
    words = "5 of 12 prompts (the minimum; measuring took 32 s, limit 20 s)"
    told = capsys.readouterr()
    assert words in " ".join(told.out.split()) and "fit into" not in told.out + told.err
    assert "the minimum of 5 prompts, in 32 s (limit 20 s)" in " ".join(told.err.split())
    page = (folder / "report.html").read_text()
    assert words in page and "fit into" not in page
    unmeasured = "max_seconds=20 was over, after 32 s, when the minimum of 5 was measured"
    assert f"7 of 12 prompts: {unmeasured}" in page
    run(bounded(home, "over", max_seconds=20.0), clock)
    assert words in " ".join(capsys.readouterr().out.split()), "a finished run reports it again"


def test_a_minimum_within_the_bound_is_no_overrun(home, clock):
    folder = run(bounded(home, "within", max_seconds=32.0), clock)
    rows = read_rows(folder / "results.jsonl")
    assert {(row.part, row.prompts, row.overrun_seconds) for row in rows} == {
        ("sweep", 2, 0.0),
        ("main", 5, 0.0),
    }


def test_time_sets_the_number_of_prompts_and_not_which(home, clock):
    short, long = (measured(home, clock, f"{s:.0f}", max_seconds=s) for s in (36.0, 44.0))
    short, long = (next(iter(prompts_of(records).values())) for records in (short, long))
    assert (len(short), len(long)) == (6, 8) and long[:6] == short


@pytest.mark.parametrize(("seconds", "count"), [(1.0, 5), (1e6, PROMPTS - 2)])
def test_a_bounded_run_measures_a_minimum_and_at_most_all(home, clock, seconds, count):
    records = measured(home, clock, f"least_{count}", max_seconds=seconds)
    assert [len(found) for found in prompts_of(records).values()] == [count, count]
    assert [len(found) for found in prompts_of(records, "sweep").values()] == [2, 2]


def test_a_sweep_leaves_most_of_the_time(home, clock):
    folder = run(bounded(home, "swept", sweep_prompts=6, max_seconds=50.0), clock)
    cold, hot = prompts_of(read_records(folder / "records.jsonl"), "sweep").values()
    assert cold == hot and len(cold) == 3, "18 s of 50"
    assert "a sweep on 3 of 6 prompts" in (folder / "report.html").read_text()


def test_batches_of_two_sizes_use_the_same_prompts(home, clock):
    records = measured(
        home, clock, "batches", batch_sizes=[1, 2], temperatures=[0.0], max_seconds=43.0
    )
    one, two = prompts_of(records).values()
    assert one == two and len(one) == 12 - 2
    assert clock.now == 9 + 5 * 6


def test_a_resumed_run_counts_earlier_time_and_finishes_its_prompt(home, clock):
    """Check that a run killed within a prompt finishes that prompt, and measures no other.

    It is killed between the prompt's two temperatures and resumed with no time left.
    """
    whole = measured(home, clock, "resumed")
    cut = [record for record in whole if (record.unit, record.temperature) != (8, 1.0)]
    assert len(cut) == len(whole) - 2
    write_records(home / "resumed" / "records.jsonl", cut)
    before = clock.now
    assert prompts_of(measured(home, clock, "resumed")) == prompts_of(whole)
    assert clock.now == before + 2


def test_a_deadline_expects_the_next_block_to_be_as_long_as_the_longest(tmp_path):
    clock = iter([0.0, 10.0, 40.0, 41.0])
    deadline = Deadline(50.0, tmp_path, lambda: next(clock))
    deadline.count("main", 9.0)  # at 10 s
    assert deadline.has_room("main", 4), "the first five are measured without a look at the clock"
    assert deadline.has_room("main", 5)  # at 40 s
    assert not Deadline(50.0, tmp_path, iter([0.0, 31.5]).__next__).has_room("main", 5), (
        "10 s of the first run, 31.5 s, and 9 s"
    )
    assert not deadline.has_room("sweep", 2), "its share is over at 41 s"
    assert not Deadline(0.0, tmp_path / "none", lambda: 0.0).bounds


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_an_infinite_or_negative_bound_is_refused(home, value):
    with pytest.raises(
        UserError, match=r"max_seconds is .*, expected seconds, or 0 for all prompts"
    ):
        run(bounded(home, "refused", max_seconds=value))


def progress_of(errors: str) -> list[str]:
    """Return the counts that the progress of a run showed: `7/20`, or `35%` under a bound."""
    return re.findall(r"^eval (\d+/\d+|\d+%) ", errors, flags=re.M)


def test_the_progress_has_one_total_and_reaches_it(home, clock, capsys, monkeypatch):
    """Check a run, and one that is resumed in the middle, where half of it is measured."""
    monkeypatch.setattr("jobs.progress.PLAIN_EVERY_SECONDS", 0.0)
    batches = 2 * 6 + (PROMPTS - 2) * 4
    whole = measured(home, clock, "counted", max_seconds=0.0)
    shown = progress_of(capsys.readouterr().err)
    assert shown == [f"{done}/{batches}" for done in range(1, batches + 1)]
    write_records(home / "counted" / "records.jsonl", whole[: len(whole) // 2])
    measured(home, clock, "counted", max_seconds=0.0)
    shown = progress_of(capsys.readouterr().err)
    assert shown[-1] == f"{batches}/{batches}" and len(shown) < batches


@pytest.mark.parametrize("seconds", [40.0, 20.0, 1e6])
def test_the_progress_under_a_bound_is_a_percentage(home, clock, capsys, monkeypatch, seconds):
    """Check it where the bound leaves prompts out, is exceeded, and leaves none out."""
    monkeypatch.setattr("jobs.progress.PLAIN_EVERY_SECONDS", 0.0)
    measured(home, clock, f"percent_{seconds:.0f}", max_seconds=seconds)
    shown = [int(one.removesuffix("%")) for one in progress_of(capsys.readouterr().err)]
    assert shown == sorted(shown) and shown.count(100) == 1 and shown[-1] == 100
    assert len(set(shown)) > 10


@pytest.mark.parametrize("costs", [0.0, 60.0])
def test_the_progress_goes_on_where_the_costs_use_up_the_bound(
    home, clock, capsys, monkeypatch, costs
):
    monkeypatch.setattr("jobs.progress.PLAIN_EVERY_SECONDS", 0.0)

    def freeze_costs(*_: object) -> None:
        clock.now = costs

    monkeypatch.setattr("eval.measure.session.freeze_costs", freeze_costs)
    measured(home, clock, f"costs_{costs:.0f}", max_seconds=40.0)
    shown = [int(one.removesuffix("%")) for one in progress_of(capsys.readouterr().err)]
    batches = 2 * 6 + 5 * 4
    assert shown == sorted(shown) and shown[-1] == 100
    if costs:
        assert shown[:-2] == [100 * done // batches for done in range(1, batches)]
    else:
        assert shown[:12] == [int(100 * done / 40) for done in range(1, 13)], "the seconds"


def test_a_dry_run_names_the_bound(home, capsys):
    run(bounded(home, "planned", dry_run=True))
    assert "tokens, as many of them as fit into 40 s, into" in capsys.readouterr().out
