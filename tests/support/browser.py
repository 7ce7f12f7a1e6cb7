"""Chromium for tests of pages: where it is, and what becomes of such tests without it."""

import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from scripts.page_animation import BROWSERS

MARKS = {"chromium": "browser", "gradio": "web"}  # fixture -> mark of the tests that use it
# A job that has installed a browser sets this variable to REQUIRED: tests of pages then fail
# without one. Elsewhere they are skipped, with CI=true too, as pip cannot install Chromium.
VARIABLE, REQUIRED = "SHALLOW_DRAFT_BROWSER", "required"
REASON = "pages in a browser need "


def missing_part() -> str:
    """Return what tests of pages need and this machine lacks, or "" if nothing is missing."""
    if importlib.util.find_spec("playwright") is None:
        return "Playwright (pip install -e '.[browser]')"
    if not any(map(shutil.which, BROWSERS)):
        return f"one of {', '.join(BROWSERS)} on the PATH (such as Debian's package chromium)"
    return ""


def require_browser(missing: str, environment: Mapping[str, str]) -> None:
    """Skip the running test if a part is missing, or fail it where a browser is required."""
    wish = environment.get(VARIABLE, "")
    if wish not in ("", REQUIRED):
        pytest.fail(f'{VARIABLE} is "{wish}", expected "{REQUIRED}" or nothing')
    if missing and wish == REQUIRED:
        pytest.fail(f"{REASON}{missing}, and {VARIABLE}={REQUIRED} requires them")
    if missing:
        pytest.skip(f"{REASON}{missing}")


def chromium_path() -> Path:
    """Return the path of the Chromium that `missing_part` has found."""
    return Path(next(filter(None, map(shutil.which, BROWSERS))))


def unseen_pages(reasons: Sequence[str]) -> str:
    """Return a line on the tests that were skipped for lack of a browser, or "".

    reasons: those of all skipped tests.
    """
    lacking = [reason.partition(REASON)[2] for reason in reasons if REASON in reason]
    if not lacking:
        return ""
    return f"SKIPPED: {len(lacking)} tests of pages in a browser. They need {lacking[0]}"
