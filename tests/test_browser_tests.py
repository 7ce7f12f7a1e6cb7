"""Tests of pages: skipped without Chromium, failures where it is required, run by CI."""

from pathlib import Path

import pytest
import yaml

from tests.support.browser import (
    MARKS,
    REASON,
    REQUIRED,
    VARIABLE,
    require_browser,
    unseen_pages,
)

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
MISSING = "one of chromium on the PATH"


def outcome(missing: str, environment: dict[str, str]) -> str:
    """Return what becomes of a test that uses the browser."""
    try:
        require_browser(missing, environment)
    except pytest.skip.Exception as end:
        return f"skipped: {end.msg}"
    except pytest.fail.Exception as end:
        return f"failed: {end.msg}"
    return "runs"


@pytest.mark.parametrize("environment", [{}, {"CI": "true"}, {VARIABLE: ""}])
def test_pages_are_skipped_without_a_browser(environment: dict[str, str]) -> None:
    assert outcome(MISSING, environment) == f"skipped: {REASON}{MISSING}"
    assert outcome("", environment) == "runs", "control"


def test_pages_fail_without_a_required_browser() -> None:
    found = outcome(MISSING, {VARIABLE: REQUIRED})
    assert found.startswith(f"failed: {REASON}{MISSING}") and f"{VARIABLE}={REQUIRED}" in found
    assert outcome("", {VARIABLE: REQUIRED}) == "runs", "control"


@pytest.mark.parametrize("missing", ["", MISSING])
def test_a_misspelled_requirement_fails(missing: str) -> None:
    assert 'is "yes", expected "required" or nothing' in outcome(missing, {VARIABLE: "yes"})


def test_the_end_of_a_run_counts_the_skipped_pages() -> None:
    skipped = ["Skipped: needs a card", *[f"Skipped: {REASON}{MISSING}"] * 3]
    assert unseen_pages(skipped).endswith(f"3 tests of pages in a browser. They need {MISSING}")
    assert unseen_pages(skipped[:1]) == "", "control"


@pytest.mark.parametrize(("fixture", "mark"), MARKS.items())
def test_exactly_the_tests_that_use_a_part_have_its_mark(
    fixture: str, mark: str, request: pytest.FixtureRequest
) -> None:
    for item in request.session.items:
        used = fixture in getattr(item, "fixturenames", ())
        assert used == (item.get_closest_marker(mark) is not None), item.nodeid


def test_ci_opens_pages_and_keeps_their_pictures() -> None:
    job = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["pages"]
    assert job["env"][VARIABLE] == REQUIRED
    commands = " ".join(step.get("run", "") for step in job["steps"])
    assert "apt-get install --yes chromium" in commands
    assert f'-m "({" or ".join(MARKS.values())}) and' in commands
    kept = next(step for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    sources = [
        ROOT / "tests" / name for name in ("serving/test_web_page.py", "eval/test_report_page.py")
    ]
    for source in sources:
        line = next(one for one in source.read_text().splitlines() if one.startswith("PICTURES"))
        folder = "/".join(line.split('"')[1::2])
        assert f"{folder}/*.png" in kept["with"]["path"].split()
