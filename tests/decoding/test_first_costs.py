"""The first `generate` measures costs for a bounded time, and says so if it takes long."""

from pathlib import Path

import pytest

from decoding.costs.contention import UndisturbedClock
from decoding.drafters.chain import ChainDrafter
from decoding.engine import COST_SECONDS, COST_WINDOWS, Engine, generate
from decoding.models.text.tokenizer import load_tokenizer
from tests.support.simulated_clock import SimulatedClock

from .test_cost_windows import SimulatedParts
from .test_laws import models

TOKENIZER = Path(__file__).resolve().parents[2] / "assets" / "target"


def new_engine() -> Engine:
    target, _, draft_model = models()
    return Engine(target, ChainDrafter(model=draft_model), load_tokenizer(TOKENIZER), ())


@pytest.mark.parametrize("bound", [COST_SECONDS, 1e9], ids=["bound", "control"])
def test_costs_are_measured_for_a_few_seconds(
    bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the number of windows of a second each, beside busy processes; control: no bound."""
    clock = SimulatedClock()
    parts = SimulatedParts(clock, [0.9])
    monkeypatch.setattr("decoding.costs.measure.perf_counter", clock)
    monkeypatch.setattr("decoding.costs.measure.time_parts", parts)
    monkeypatch.setattr(UndisturbedClock, "share", lambda self: 0.2)
    monkeypatch.setattr("decoding.engine.COST_SECONDS", bound)
    monkeypatch.setattr("decoding.engine.COST_WINDOWS", COST_WINDOWS)
    engine = new_engine()
    generate(engine, [4, 5, 6], max_new_tokens=2)
    measured = parts.windows
    assert measured == COST_SECONDS if bound == COST_SECONDS else measured >= 2 * COST_WINDOWS
    generate(engine, [4, 5, 6], max_new_tokens=2)
    assert parts.windows == measured, "the engine keeps the costs"


@pytest.mark.parametrize("is_slow", [True, False], ids=["slow", "control"])
def test_a_note_says_what_takes_long(
    is_slow: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for one note on the first call; controls: measuring is brief, and a later call."""
    monkeypatch.setattr("decoding.errors.NOTE_SECONDS", 0.0 if is_slow else 1e6)
    engine = new_engine()
    for has_note in (is_slow, False):
        generate(engine, [4, 5, 6], max_new_tokens=2)
        printed = capsys.readouterr().err
        assert printed.count("note: measuring what a round with") == has_note
        assert printed.count("\n") == has_note
