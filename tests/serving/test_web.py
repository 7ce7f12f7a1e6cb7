"""The web page without a browser: races of two panes, visitors, choices, and the page's HTML."""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from decoding.engine import text_of
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.stats import Generation
from decoding.rounds.ties import TIE_GAP, choice_scores, top_two_gap
from jobs.config import TargetConfig
from serving.web.config import WebConfig
from serving.web.demo import Ask, Demo
from serving.web.limits import MOST_BODY_BYTES, refusal_of
from serving.web.models import load
from serving.web.page import IDLE, empty_html, race_html, status_of, verdict_of
from serving.web.race import ACCEPTED, CORRECTED, PLAIN, Pane, PaneState, Race, RaceState, Word
from serving.web.visits import Visits

PROMPT = "def __eq__(self, other):"
DRAFTERS = ("lookup", "itself")


def config_of(target: Path, **fields: Any) -> WebConfig:
    """Return the settings of a page in float64, where drafted text equals plain text."""
    place = TargetConfig(path=str(target), dtype="float64", device="cpu")
    fields.setdefault(
        "drafters",
        [
            {"use": "prompt_lookup", "name": "lookup"},
            {"use": str(target), "name": "itself", "stopping": "fixed"},
        ],
    )
    return WebConfig(job="serving.web", output_dir="unused", target=place, **fields)


@pytest.fixture(autouse=True)
def _brief_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure costs briefly: no decision from them may change a text."""
    monkeypatch.setattr("decoding.engine.COST_SECONDS", 0.1)


@pytest.fixture(scope="module")
def demo(tiny_target: Path) -> Iterator[Demo]:
    """Load a target and, as drafters, prompt lookup and the target itself; show every state."""
    cfg = config_of(tiny_target)
    found = Demo(load(cfg), cfg, refresh_seconds=0.0)
    yield found
    found.close()


def ask(**fields: Any) -> Ask:
    return replace(Ask(PROMPT, "itself", max_new_tokens=24), **fields)


def states_of(demo: Demo, asked: Ask) -> list[RaceState]:
    return list(demo.answer(asked, threading.Event()))


def rounds_of(race: Race, prompt: list[int]) -> list[RaceState]:
    """Return the states after every round, which readers of a slot may miss."""
    return [race.state for _ in race.rounds(prompt, lambda: False)]


# Panes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_both_panes_show_the_targets_own_text(drafter: str, demo: Demo):
    states = states_of(demo, ask(drafter=drafter))
    last, ids = states[-1], demo.check(ask())
    engine = demo.models.engine(drafter, "serial")
    settings = demo.prepare(ask(), ids)[0].plain.settings
    (alone,) = decode(engine.target, None, [ids], settings)
    assert last.plain.text == last.drafted.text == text_of(engine, alone.tokens).rstrip("\ufffd")
    assert last.plain.tokens == last.drafted.tokens == len(alone.tokens)
    assert last.compared and last.differs_at is None and status_of(last) == "finished"
    assert verdict_of(last) == f"Both texts are equal: the same {len(alone.tokens)} tokens."
    assert last.plain.block_efficiency == 1 and not last.plain.tested_by_depth


def test_control_different_texts_are_reported(demo: Demo):
    ids = demo.check(ask())
    race, _ = demo.prepare(ask(), ids)
    other, _ = demo.prepare(ask(temperature=1.5, seed=3), ids)
    mixed = Race(race.plain, other.drafted, compared=True)
    before = rounds_of(mixed, ids)[-1]
    last, at = mixed.state, mixed.differs_at
    assert at is not None and last.differs_at == at
    assert verdict_of(before) == f"The texts differ from token {at + 1} on.", "no cause yet"
    scores_V = choice_scores(
        demo.models.target, [*ids, *race.plain.generation.tokens[:at]], race.plain.settings, 0
    )
    assert last.gap == pytest.approx(top_two_gap(scores_V)) and last.gap > TIE_GAP
    assert "tie" not in verdict_of(last) and "This is a fault in decoding" in verdict_of(last)
    half = verdict_of(replace(last, dtype="bfloat16"))
    assert "tie" not in half and "With bfloat16's rounding" in half
    for gap in (0.0, last.gap):
        fused = replace(last, dtype="bfloat16", backend="native fused", gap=gap)
        assert "This is a fault in decoding" in verdict_of(fused)
    tied = verdict_of(replace(last, gap=TIE_GAP / 2))
    assert "nearly tie: 5.0e-05 apart" in tied and "fault" not in tied
    assert verdict_of(replace(last, stopped=True)).startswith("Stopped. The texts differ")


def test_control_a_text_that_ends_early_is_reported(demo: Demo):
    asked = ask(max_new_tokens=12)
    race, ids = demo.prepare(ask(), demo.check(ask()))
    cut = Race(race.plain, demo.prepare(asked, ids)[0].drafted, compared=True)
    rounds_of(cut, list(ids))
    assert cut.state.differs_at == 12 and "equal" not in verdict_of(cut.state)


def test_text_grows_and_accepted_tokens_are_marked(demo: Demo):
    race, ids = demo.prepare(ask(), demo.check(ask()))
    states = rounds_of(race, list(ids))
    for before, after in pairwise(states):
        for old, new in ((before.plain, after.plain), (before.drafted, after.drafted)):
            assert new.text.startswith(old.text) and new.words[: len(old.words)] == old.words
            assert new.seconds >= old.seconds and new.tokens >= old.tokens
    drafted, plain = states[-1].drafted, states[-1].plain
    generation = race.drafted.generation
    assert sum(drafted.accepted_by_depth) == generation.trace.count("1") > 10
    assert {word.mark for word in plain.words} == {PLAIN}
    assert {word.mark for word in drafted.words} == {ACCEPTED, PLAIN}, "it drafts for itself"
    assert drafted.acceptance_by_depth == [1.0] * len(drafted.tested_by_depth)
    assert drafted.block_efficiency == generation.block_efficiency > 3


def test_a_token_in_place_of_a_rejected_draft_is_marked(demo: Demo):
    asked = ask(prompt="one two one two one two one", drafter="lookup", max_new_tokens=60)
    race, ids = demo.prepare(asked, demo.check(asked))
    drafted = rounds_of(race, list(ids))[-1].drafted
    rejected = sum(drafted.tested_by_depth) - sum(drafted.accepted_by_depth)
    marked = sum(word.mark == CORRECTED for word in drafted.words)
    assert 0 < marked <= rejected, "a token may end no character"


class Clock(Pane):
    """A pane whose rounds take the given seconds, and decode nothing."""

    def __init__(self, seconds: list[float]) -> None:
        self.left, self.clock, self.opened = list(seconds), 0.0, False
        self.generation = Generation()

    @property
    def is_open(self) -> bool:
        return self.opened

    @property
    def done(self) -> bool:
        return self.opened and not self.left

    @property
    def seconds(self) -> float:
        return self.clock

    def open(self, prompt: Any) -> None:
        self.opened = True

    def round(self) -> None:
        self.clock += self.left.pop(0)

    def close(self) -> None: ...


def clocks_of(in_turn: bool) -> list[tuple[float, float, bool]]:
    """Return both clocks, and whether a pane is done, after every step of a race."""
    plain, drafted = Clock([1.0] * 12), Clock([1.7] * 5)
    race = Race(plain, drafted, compared=True, in_turn=in_turn)
    steps = race.rounds([1], lambda: False)
    return [(plain.clock, drafted.clock, plain.done or drafted.done) for _ in steps]


def test_the_pane_whose_clock_is_behind_runs_next():
    assert all(abs(one - two) <= 1.7 for one, two, done in clocks_of(False) if not done)
    assert clocks_of(False)[-1][:2] == pytest.approx((12.0, 8.5))
    control = clocks_of(True)
    assert any(abs(one - two) > 1.7 for one, two, _ in control)
    assert control[-1][:2] == pytest.approx((12.0, 8.5))


def test_panes_that_share_a_cache_decode_in_turn(tiny_target: Path, demo: Demo):
    cfg = config_of(tiny_target)
    cfg.target.backend = "hf"
    with closing(Demo(load(cfg), cfg, refresh_seconds=0.0)) as shared:
        assert shared.models.twin is None
        race, ids = shared.prepare(ask(), shared.check(ask()))
        states = rounds_of(race, list(ids))
    assert all(state.plain.done or not state.drafted.tokens for state in states)
    ours = states_of(demo, ask())[-1]
    assert states[-1].drafted.text == states[-1].plain.text == ours.plain.text


def test_a_twin_has_the_same_weights_and_its_own_cache(demo: Demo):
    target, twin = demo.models.target, demo.models.twin
    assert twin is not None and twin is not target
    assert twin.weights is target.weights  # type: ignore[attr-defined]
    twin.open(1, 8)
    target.open(2, 8)
    assert (len(twin.lengths_B), len(target.lengths_B)) == (1, 2)


# Choices that take effect -------------------------------------------------------------------


def test_a_temperature_changes_the_text_and_both_panes_agree(demo: Demo):
    greedy = states_of(demo, ask())[-1]
    hot = states_of(demo, ask(temperature=1.2, seed=1))[-1]
    again = states_of(demo, ask(temperature=1.2, seed=1))[-1]
    other = states_of(demo, ask(temperature=1.2, seed=2))[-1]
    assert hot.plain.text == hot.drafted.text == again.drafted.text, "coupled verification"
    assert len({greedy.plain.text, hot.plain.text, other.plain.text}) == 3


def test_samples_of_token_verification_are_not_compared(tiny_target: Path):
    cfg = config_of(tiny_target, verify="token")
    with closing(Demo(load(cfg), cfg, refresh_seconds=0.0)) as sampling:
        last = states_of(sampling, ask(temperature=1.2))[-1]
        assert "Two samples" in verdict_of(last)
        assert "equal" in verdict_of(states_of(sampling, ask())[-1])


def test_the_drafter_changes_the_rounds_and_not_the_text(demo: Demo):
    lookup, itself = (states_of(demo, ask(drafter=name))[-1] for name in DRAFTERS)
    assert lookup.drafted.text == itself.drafted.text
    assert lookup.drafted.rounds > itself.drafted.rounds


@pytest.mark.parametrize("schedule", ["pearl_virtual", "pearl_plus_virtual"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_pearl_runs_on_a_virtual_clock(schedule: str, temperature: float, demo: Demo):
    asked = ask(schedule=schedule, temperature=temperature)
    last = states_of(demo, asked)[-1]
    assert last.virtual and "Virtual clock" in race_html(last)
    serial = states_of(demo, replace(asked, schedule="serial"))[-1]
    assert last.drafted.text == last.plain.text == serial.plain.text
    assert not serial.virtual and "Virtual clock" not in race_html(serial)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["pearl_wall", "pearl_plus_wall"])
def test_pearl_runs_with_the_drafter_in_a_worker(schedule: str, demo: Demo):
    if schedule not in demo.models.choices["itself"].schedules:
        pytest.skip("needs two processor cores")
    last = states_of(demo, ask(schedule=schedule))[-1]
    assert not last.virtual
    assert last.drafted.text == last.plain.text == states_of(demo, ask())[-1].plain.text
    worker = demo.models.engine("itself", schedule).drafter
    assert worker is demo.models.engine("itself", "pearl_wall").drafter, "it is kept"
    worker.close()  # type: ignore[union-attr]
    with pytest.raises(UserError, match="worker ended"):
        states_of(demo, ask(schedule=schedule))
    assert states_of(demo, ask(schedule=schedule))[-1].drafted.done, "another one is started"
    demo.models.drop_worker("itself")


def test_only_fitting_schedules_are_offered(demo: Demo):
    assert demo.models.choices["lookup"].schedules == ("serial",)
    assert {"pearl_virtual", "pearl_plus_virtual"} < {*demo.models.choices["itself"].schedules}


# Visitors -----------------------------------------------------------------------------------


def test_a_stopped_run_frees_the_slot(demo: Demo):
    stop, states = threading.Event(), []
    for state in demo.answer(ask(max_new_tokens=256), stop):
        states.append(state)
        if state.drafted.tokens:
            stop.set()
    last = states[-1]
    assert last.stopped and status_of(last) == "stopped" and "Stopped." in verdict_of(last)
    assert 0 < last.plain.tokens < 200
    assert states_of(demo, ask())[-1].drafted.done, "the next visitor is served"


def test_a_visitor_who_leaves_frees_the_slot(demo: Demo):
    stop = threading.Event()
    with closing(demo.answer(ask(max_new_tokens=256), stop)) as states:  # type: ignore[type-var]
        next(states)
    assert stop.is_set()
    assert states_of(demo, ask())[-1].drafted.done


def test_a_visitor_who_leaves_the_queue_gets_nothing(demo: Demo):
    stop = threading.Event()
    stop.set()
    assert list(demo.answer(ask(), stop)) == []


def test_visitors_are_served_one_after_another(demo: Demo):
    prompts = ["one two three", "import os", PROMPT]
    alone = [states_of(demo, ask(prompt=prompt))[-1].plain.text for prompt in prompts]
    found: dict[str, str] = {}

    def visit(prompt: str) -> None:
        found[prompt] = states_of(demo, ask(prompt=prompt))[-1].drafted.text

    threads = [threading.Thread(target=visit, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[prompt] for prompt in prompts] == alone and len({*alone}) == 3


def test_a_session_stops_its_own_run_only():
    visits = Visits()
    first, another = visits.begin("me"), visits.begin("they")
    mine, theirs = visits.stop_of("me", first), visits.stop_of("they", another)
    visits.stop("me")
    visits.stop("nobody")
    assert mine.is_set() and not theirs.is_set()
    second = visits.begin("me")
    stop = visits.stop_of("me", second)
    visits.end("me", first)
    assert not stop.is_set() and visits.stop_of("me", second) is stop, "an earlier run's end"
    third = visits.begin("me")
    assert stop.is_set() and not visits.stop_of("me", third).is_set(), "a session has one run"
    visits.end("me", third)
    visits.leave("they")
    visits.leave("nobody")
    assert theirs.is_set() and len(visits) == 0


def test_a_run_that_waited_is_over_once_another_is_begun():
    visits = Visits()
    first, second = visits.begin("me"), visits.begin("me")
    assert visits.stop_of("me", first).is_set() and not visits.stop_of("me", second).is_set()
    for number in (0, None, [second], visits.begin("they")):
        assert visits.stop_of("me", number).is_set(), "no run of this session"
    visits.end("me", first)
    assert not visits.stop_of("me", second).is_set()
    visits.leave("me")
    assert visits.stop_of("me", second).is_set(), "its visitor has left"


def test_runs_that_are_begun_and_never_asked_for_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serving.web.visits.MOST_UNASKED", 2)
    visits = Visits()
    asked = visits.stop_of("asked", visits.begin("asked"))
    numbers = {name: visits.begin(name) for name in ("a", "b")}
    numbers["a"] = visits.begin("a")  # again, which takes no other session's place
    assert len(visits) == 3
    for name in ("c", "d"):
        numbers[name] = visits.begin(name)
    assert len(visits) == 3 and not asked.is_set(), "a run whose turn has come keeps its place"
    gone = [name for name, number in numbers.items() if visits.stop_of(name, number).is_set()]
    assert gone == ["a", "b"]


# Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": " \n\t"}, "the prompt is empty"),
        ({"prompt": None}, "the prompt is empty"),
        ({"prompt": "x" * 20001}, "has 20,001 characters, and the limit is 20,000. Shorten it"),
        ({"prompt": "word " * 900}, r"tokens, and the target's context holds 512 .* Shorten it"),
        ({"prompt": "cut \ud83d emoji"}, "half a surrogate pair"),
        ({"drafter": "itsel"}, "drafter 'itsel' is unknown, expected one of lookup, itself"),
        ({"drafter": None}, "drafter None is unknown"),
        ({"drafter": "lookup", "schedule": "pearl_virtual"}, "schedule of lookup .* one of serial"),
        ({"schedule": ["serial"]}, "schedule of itself"),
        ({"temperature": 2.5}, "temperature is 2.5, expected a number of at most 2"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected a whole number from 1 to 256"),
        ({"max_new_tokens": 257}, "max_new_tokens is 257"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_choices_that_the_page_does_not_offer_are_refused(
    fields: dict[str, Any], words: str, demo: Demo
):
    with pytest.raises(UserError, match=words):
        states_of(demo, ask(**fields))


def test_the_page_serves_after_bad_input(demo: Demo):
    for bad in (ask(prompt=""), ask(prompt="word " * 900), ask(drafter="none")):
        with pytest.raises(UserError):
            states_of(demo, bad)
    assert states_of(demo, ask())[-1].drafted.done


def test_a_prompt_that_nearly_fills_the_context_ends_with_it(demo: Demo):
    ids = demo.models.encode("a " * 200)
    room = demo.models.target.max_length
    asked = ask(prompt="a " * (200 * (room - 8) // len(ids)), max_new_tokens=256)
    assert room - 40 < len(demo.check(asked)) < room
    last = states_of(demo, asked)[-1]
    assert last.plain.text == last.drafted.text and 0 < last.plain.tokens < 40


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/gradio_api/queue/join", "POST", [(b"content-length", b"512")], None),
        ("/gradio_api/queue/join", "POST", [(b"content-length", b"104857600")], 413),
        ("/gradio_api/queue/join", "POST", [(b"content-length", b"-1")], 411),
        ("/gradio_api/queue/join", "POST", [(b"transfer-encoding", b"chunked")], 411),
        ("/gradio_api/upload", "POST", [(b"content-length", b"512")], 403),
        ("/gradio_api/queue/data", "GET", [], None),
    ],
)
def test_large_bodies_and_files_are_refused(
    path: str, method: str, headers: list[tuple[bytes, bytes]], status: int | None
):
    refused = refusal_of({"type": "http", "path": path, "method": method, "headers": headers})
    assert (refused and refused[0]) == status
    assert MOST_BODY_BYTES < 100 << 20


# HTML ---------------------------------------------------------------------------------------


def test_text_is_escaped():
    word = "<script>alert('x')</script> & \"${1+1}\""
    state = RaceState(PaneState((Word(word, PLAIN),), 1, 1, 0.1), PaneState(), True)
    html = race_html(state)
    assert "<script>" not in html and "&lt;script&gt;" in html and "&amp; &quot;" in html


def test_figures_are_those_of_the_state():
    plain = PaneState((Word("a", PLAIN),), 10, 10, 2.0)
    words = (Word("b", ACCEPTED), Word("c", CORRECTED))
    drafted = PaneState(words, 12, 4, 1.0, 0.5, (4, 2, 1), (3, 1, 0))
    html = race_html(RaceState(plain, drafted, True))
    assert ">2.40×<" in html, "12 tokens/s over 5"
    assert ">3.00<" in html and ">57%<" in html, "12 tokens in 4 forwards, 4 of 7 accepted"
    for share in ("75%", "50%", "0%"):
        assert f'style="height:{share}"' in html
    assert '<span class="sd-accepted">b</span><span class="sd-corrected">c</span>' in html
    assert "12 tokens, 4 target forwards, 1.00 s and 0.50 s for the prompt" in html
    assert 'data-status="running"' in html and "Equal so far: 10 tokens" in html
    assert 'data-status="idle"' in empty_html(IDLE) and "speedup" in empty_html(IDLE)
