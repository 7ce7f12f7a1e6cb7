"""The web page as a visitor sees it: the job in a process, and its page in headless Chromium."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.server_process import ServerProcess, run_server

PATIENCE_MS = 120_000
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 420, "height": 900}


def serve(*arguments: str) -> AbstractContextManager[ServerProcess]:
    """Run `python -m serving.web` with these arguments on a free port, until the block ends."""
    return run_server("serving.web", *arguments, environment={"OMP_NUM_THREADS": "1"})


@contextmanager
def chromium_browser(program: Path) -> Iterator[Any]:
    """Run headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(program), args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visitor:
    """A browser window on the page, with what it asked other servers for and its script errors."""

    page: Any
    url: str
    elsewhere: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @classmethod
    def arrive(cls, browser: Any, url: str, size: dict[str, int] | None = None) -> "Visitor":
        """Open the page in a window of its own."""
        window = browser.new_context(viewport=size or DESKTOP)
        page = window.new_page()
        page.set_default_timeout(PATIENCE_MS)
        found = cls(page, url)
        page.on("request", lambda request: found.note(request.url))
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.goto(url)
        page.get_by_role("button", name="Run").wait_for()
        return found

    def note(self, address: str) -> None:
        """Note a request to another server."""
        if not address.startswith((self.url, "data:", "blob:")):
            self.elsewhere.append(address)

    def type(self, prompt: str) -> None:
        self.page.get_by_label("Prompt", exact=True).fill(prompt)

    def choose(self, label: str, option: str) -> None:
        """Choose an option of a dropdown."""
        self.page.get_by_label(label, exact=True).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def set_number(self, label: str, value: float) -> None:
        """Type a number into the field of a slider, or into a field of numbers."""
        box = self.page.get_by_role("spinbutton", name=re.compile(label))
        box.fill(str(value))
        box.press("Tab")

    def run(self) -> None:
        self.page.get_by_role("button", name="Run").click()

    def stop(self) -> None:
        self.page.get_by_role("button", name="Stop").click()

    def wait_for(self, *statuses: str) -> str:
        """Wait until the panes have one of these statuses, and return it."""
        wanted = ", ".join(f'.sd-race[data-status="{status}"]' for status in statuses)
        self.page.locator(wanted).wait_for()
        return str(self.page.locator(".sd-race").get_attribute("data-status"))

    def wait_for_text(self) -> str:
        """Wait until both panes show some text, and return the plain one's."""
        for pane in ("drafted", "plain"):
            self.page.locator(f'[data-pane="{pane}"] .sd-text span').first.wait_for()
        return self.text("plain")

    def text(self, pane: str) -> str:
        return str(self.page.locator(f'[data-pane="{pane}"] .sd-text').text_content())

    def figure(self, name: str) -> str:
        return str(self.page.locator(f'[data-figure="{name}"]').text_content())

    def verdict(self) -> str:
        return str(self.page.locator(".sd-verdict").text_content())

    def toast(self) -> str:
        """Wait for a message and return it."""
        found = self.page.get_by_test_id("toast-body")
        found.first.wait_for()
        return str(found.last.text_content())

    def leave(self) -> None:
        self.page.context.close()
