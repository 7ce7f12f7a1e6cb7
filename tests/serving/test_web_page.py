"""The web page in headless Chromium: what a visitor types, sees and stops.

Screenshots are left in build/web/.
"""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from scripts.server_process import ROOT, ServerProcess
from serving.web.race import Pane
from tests.serving.test_web_input import LONG as LONG_RUN
from tests.serving.test_web_input import ROUND_S, TOKENS, running
from tests.support.web_page import DESKTOP, PHONE, Visitor, chromium_browser, serve

pytestmark = pytest.mark.long

PICTURES = ROOT / "build" / "web"
PROMPT = "def __eq__(self, other):"  # its text has 26 tokens
ENDLESS = "def __init__(self, name, value=None):"  # its text ends at the limit
LONG, MOST = 150, 400  # tokens


@pytest.fixture(scope="module")
def server(gradio: None, embedded_target: Path) -> Iterator[ServerProcess]:
    """Show the embedded target with two drafters: prompt lookup, and the target itself."""
    itself = f"{{use: {embedded_target}, name: itself, stopping: fixed}}"
    arguments = (f"drafters=[prompt_lookup,{itself}]", f"max_new_tokens={MOST}", "max_waiting=2")
    with serve(f"target.path={embedded_target}", *arguments) as found:
        yield found


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Any]:
    with chromium_browser(chromium) as found:
        yield found


@pytest.fixture
def visitor(browser: Any, server: ServerProcess) -> Iterator[Visitor]:
    """Open the page; at its end, check for script errors and requests to other servers."""
    found = Visitor.arrive(browser, server.url)
    yield found
    found.leave()
    assert not found.errors and not found.elsewhere


def finished(visitor: Visitor, prompt: str = PROMPT) -> tuple[str, str]:
    """Run a prompt to its end and return both texts."""
    visitor.type(prompt)
    visitor.run()
    visitor.wait_for("waiting", "running")
    visitor.wait_for("finished")
    return visitor.text("plain"), visitor.text("drafted")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_prompt_streams_into_two_equal_panes(
    size: dict[str, int], browser: Any, server: ServerProcess
):
    visitor = Visitor.arrive(browser, server.url, size)
    visitor.type(ENDLESS)
    visitor.set_number("Tokens", LONG)
    visitor.run()
    early = visitor.wait_for_text()
    assert visitor.wait_for("running") and visitor.verdict().startswith("Equal so far")
    visitor.wait_for("finished")
    plain, drafted = visitor.text("plain"), visitor.text("drafted")
    assert plain == drafted and plain.startswith(early) and len(early) < len(plain)
    assert visitor.verdict().startswith("Both texts are equal")
    assert visitor.page.locator('[data-pane="drafted"] .sd-accepted').count() > 3
    assert visitor.page.locator('[data-pane="plain"] .sd-accepted').count() == 0
    assert float(visitor.figure("block efficiency")) > 1
    assert visitor.figure("speedup").endswith("×") and visitor.figure("acceptance").endswith("%")
    assert visitor.figure("plain rate").endswith("tokens/s")
    assert visitor.page.locator(".sd-depth").count() > 0
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{size['width']}.png"
    visitor.page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 10_000
    wide = visitor.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= size["width"], "the page scrolls to the side"
    panes = [visitor.page.locator(f'[data-pane="{one}"]') for one in ("plain", "drafted")]
    (left, right) = (pane.bounding_box() for pane in panes)
    assert (right["x"] > left["x"] + 100) == (size is DESKTOP), "panes are stacked on a phone"
    visitor.leave()
    assert not visitor.errors and not visitor.elsewhere


def test_the_drafter_and_its_schedule_take_effect(visitor: Visitor):
    text, _ = finished(visitor)
    few = float(visitor.figure("block efficiency"))
    visitor.choose("Drafter", "itself")
    assert finished(visitor) == (text, text)
    assert float(visitor.figure("block efficiency")) > max(few, 3.0)
    visitor.choose("Schedule", "PEARL, virtual clock")
    assert finished(visitor) == (text, text)
    assert visitor.page.get_by_text("Virtual clock:").count() == 1
    visitor.choose("Drafter", "prompt_lookup")
    assert finished(visitor) == (text, text), "the schedule is serial again"
    assert float(visitor.figure("block efficiency")) == few


def test_the_temperature_and_the_seed_take_effect(visitor: Visitor):
    greedy, _ = finished(visitor)
    visitor.set_number("Temperature", 1)
    first = finished(visitor)
    visitor.set_number("Seed", 7)
    second = finished(visitor)
    assert first[0] == first[1] and second[0] == second[1], "coupled verification"
    assert len({greedy, first[0], second[0]}) == 3


def test_stop_ends_the_text_and_frees_the_slot(visitor: Visitor):
    visitor.type(ENDLESS)
    visitor.set_number("Tokens", MOST)
    visitor.run()
    visitor.wait_for("running")
    visitor.stop()
    visitor.wait_for("stopped")
    assert visitor.verdict().startswith("Stopped.")
    visitor.set_number("Tokens", 16)
    assert finished(visitor)[0], "the next run is served"


def test_a_browser_that_leaves_frees_the_slot(
    gradio: None, browser: Any, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that the next visitor is served before the whole text is decoded, in slow rounds."""
    rounds: Counter[Pane] = Counter()
    round_of = Pane.round

    def slow(pane: Pane) -> None:
        time.sleep(ROUND_S)
        rounds[pane] += 1
        round_of(pane)

    monkeypatch.setattr(Pane, "round", slow)
    with running(tiny_target) as page:
        leaving, other = (Visitor.arrive(browser, page.url) for _ in range(2))
        leaving.type(LONG_RUN[0])
        leaving.set_number("Tokens", TOKENS)
        leaving.run()
        leaving.wait_for("running")
        leaving.leave()
        other.set_number("Tokens", 8)
        assert finished(other)[0]
        other.leave()
        first = max(rounds[pane] for pane in list(rounds)[:2])
    assert 0 < first < TOKENS - 1, "the text of the visitor who left was decoded to its end"


def test_visitors_queue(browser: Any, server: ServerProcess, visitor: Visitor):
    other = Visitor.arrive(browser, server.url)
    for one, prompt in ((visitor, ENDLESS), (other, PROMPT)):
        one.type(prompt)
        one.set_number("Tokens", MOST)
    visitor.run()
    visitor.wait_for_text()
    other.run()
    time.sleep(0.3)
    assert visitor.wait_for("running") and not other.text("plain")
    visitor.stop()
    other.wait_for("finished")
    assert visitor.wait_for("stopped")
    assert other.text("plain") == other.text("drafted") != visitor.text("plain")
    other.leave()


def test_another_press_replaces_a_run_that_decodes_or_waits(
    browser: Any, server: ServerProcess, visitor: Visitor
):
    text, _ = finished(visitor)
    visitor.set_number("Tokens", MOST)
    visitor.type(ENDLESS)
    visitor.run()
    visitor.wait_for("running")
    visitor.type(PROMPT)
    visitor.run()
    visitor.wait_for("finished")
    assert visitor.text("plain") == text, "while the first run decodes"
    other = Visitor.arrive(browser, server.url)
    other.set_number("Tokens", MOST)
    other.type(ENDLESS)
    other.run()
    other.wait_for("running")
    visitor.type(ENDLESS)
    visitor.run()
    visitor.type(PROMPT)
    visitor.set_number("Tokens", 8)
    visitor.run()
    visitor.wait_for("waiting")
    assert visitor.text("plain") == "" and other.wait_for("running")
    other.stop()
    other.leave()
    visitor.wait_for("finished")
    assert text.startswith(visitor.text("plain")), "while the first run waits"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("   ", "the prompt is empty"), ("word " * 2000, "the target's context holds")],
)
def test_bad_prompts_are_refused_and_the_page_goes_on(prompt: str, words: str, visitor: Visitor):
    visitor.type(prompt)
    visitor.run()
    assert words in visitor.toast()
    visitor.set_number("Tokens", 16)
    assert finished(visitor)[0]


def test_a_short_text_is_at_the_top_of_its_pane(visitor: Visitor):
    assert finished(visitor)[0]
    pane, text = (
        visitor.page.locator(".sd-text").first,
        visitor.page.locator(".sd-text > div").first,
    )
    above = text.bounding_box()["y"] - pane.bounding_box()["y"]
    assert 0 < above < 40 < pane.bounding_box()["height"] - text.bounding_box()["height"]


def test_the_verdict_is_in_one_font(visitor: Visitor):
    finished(visitor)
    tools = visitor.page.context.new_cdp_session(visitor.page)
    for domain in ("DOM", "CSS"):
        tools.send(f"{domain}.enable")
    root = tools.send("DOM.getDocument")["root"]["nodeId"]

    def fonts_of_verdict() -> list[Any]:
        node = tools.send("DOM.querySelector", {"nodeId": root, "selector": ".sd-verdict"})
        return list(tools.send("CSS.getPlatformFontsForNode", {"nodeId": node["nodeId"]})["fonts"])

    assert len(fonts_of_verdict()) == 1
    gradios = "document.querySelector('.sd-verdict').style.fontFamily = 'var(--font)'"
    visitor.page.evaluate(gradios)
    # Gradio's font is fetched once a text asks for it.
    visitor.page.evaluate(
        "document.fonts.load('600 16px ' + getComputedStyle("
        "document.querySelector('.sd-verdict')).fontFamily, 'Both')"
    )
    for _ in range(50):
        if len(fonts_of_verdict()) == 2:
            break
        visitor.page.wait_for_timeout(200)
    assert len(fonts_of_verdict()) == 2, "control: Gradio's bold font lacks letters"


def test_text_is_shown_and_not_run(visitor: Visitor):
    visitor.page.evaluate("window.ran = 0")
    finished(visitor, "<img src=x onerror='window.ran = 1'> ${window.ran = 1} {{1 + 1}}")
    assert visitor.page.evaluate("window.ran") == 0
    assert visitor.page.locator(".sd-text img").count() == 0


def test_large_requests_and_files_are_refused(server: ServerProcess):
    large = httpx2.post(f"{server.url}/gradio_api/queue/join", content=b"x" * (2 << 20))
    assert large.status_code == 413 and "at most" in large.text
    files = {"files": ("a.txt", b"text")}
    assert httpx2.post(f"{server.url}/gradio_api/upload", files=files).status_code == 403
    assert httpx2.get(server.url).status_code == 200


def test_a_second_ctrl_c_ends_the_job_quietly_while_a_page_is_open(
    gradio: None, embedded_target: Path
):
    with (
        serve(f"target.path={embedded_target}") as found,
        httpx2.stream("GET", f"{found.url}/gradio_api/heartbeat/visitor") as beating,
    ):
        next(beating.iter_raw())
        found.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        status, printed = found.end(signal.SIGINT)
    assert status == 0 and printed.strip().endswith("stopped") and "Traceback" not in printed


def test_ctrl_c_ends_the_job(gradio: None, embedded_target: Path):
    with serve(f"target.path={embedded_target}") as found:
        assert httpx2.get(found.url).status_code == 200
        status, printed = found.end(signal.SIGINT)
    assert status == 0 and printed.strip().endswith("stopped") and "Traceback" not in printed
