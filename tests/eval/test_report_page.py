"""The pages of reports in headless Chromium: on a phone and on a desk, light, dark and in print.

Pictures of them are left in build/report/.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.doctor.report import doctor_page
from eval.plan.config import PlanConfig
from eval.plan.job import run as run_plan
from eval.report.page import engines_page
from jobs.config import TargetConfig
from scripts.server_process import ROOT
from tests.support import tiny_folders as tiny
from tests.support.examinations import doctor_config, examined, healthy
from tests.support.page_checks import faults, opened
from tests.support.simulated_engines import GAINS, engine_row
from tests.support.simulated_records import PROVENANCE
from tests.support.tiers import tiered
from tests.support.web_page import chromium_browser

pytestmark = pytest.mark.usefixtures("drawn")

PICTURES = ROOT / "build" / "report"
DESK, PHONE, PAPER = 1280, 420, 718  # pixels; A4 within its margins
DARK, WHITE = "rgb(21, 23, 26)", "rgb(255, 255, 255)"
CONTROLS = [
    ("reaches", '<div style="width:1500px">wide</div>'),
    ("pale", '<p style="color:#888;background:#777">pale</p>'),
    ("asked for", '<img src="http://127.0.0.1:1/x.png" alt="">'),
    ("is cut off", '<figure><svg viewBox="0 0 9 9"><text x="8">long</text></svg></figure>'),
]
NAMES = ["evaluation", "comparison", "engines", "plan", "doctor"]


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Any]:
    with chromium_browser(chromium) as found:
        yield found


@pytest.fixture(scope="module")
def file_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function that writes a page once and returns its file."""
    folder = tmp_path_factory.mktemp("pages")

    def write(name: str) -> Path:
        file = folder / f"{name}.html"
        if not file.exists():
            file.write_text(_content(name, request), encoding="utf-8")
        return file

    return write


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plan drafters of a target with random weights; return the run folder."""
    home = tmp_path_factory.mktemp("plan") / ("a_long_name_of_a_folder" * 4)  # shown on the page
    home.mkdir()
    tiny.save(home / "target")
    return run_plan(
        PlanConfig(
            job="eval.plan",
            output_dir=str(home / "planned"),
            target=TargetConfig(path=str(home / "target"), device="cpu", execution="eager"),
            depths=[1, 2],
            heads=["medusa"],
            max_draft_tokens=2,
            context=24,
            cost_seconds=0.01,
            acceptance=str(home / "acceptance.jsonl"),
            runs=[],
        )
    )


@pytest.fixture(scope="module")
def examined_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Examine a drafter without its training, of which little is known; return the page."""
    home = tmp_path_factory.mktemp("doctor")
    drafter = healthy(home)
    return doctor_page(examined(home, drafter), doctor_config(home, drafter), "eval.doctor")


def _content(name: str, request: pytest.FixtureRequest) -> str:
    if name == "evaluation":
        return str(request.getfixturevalue("html"))
    if name == "comparison":
        compared = request.getfixturevalue("compared")
        return str((compared / "comparison.html").read_text(encoding="utf-8"))
    if name == "plan":
        planned = request.getfixturevalue("planned")
        return str((planned / "plan.html").read_text(encoding="utf-8"))
    if name == "doctor":
        return str(request.getfixturevalue("examined_page"))
    rows = [
        engine_row(engine, drafter, "float32", 1, 0.0)
        for engine in GAINS
        for drafter in ("", "simulated")
    ]
    return engines_page(rows, ["simulated: no engine runs it"], PROVENANCE)


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    tiered(
        itertools.product(NAMES, [DESK, PHONE], ["light", "dark"]), [("evaluation", PHONE, "dark")]
    ),
)
def test_a_page_fits_the_window_is_legible_and_asks_for_nothing(
    browser: Any, file_of: Callable[[str], Path], name: str, width: int, scheme: str
):
    with opened(browser, file_of(name), width, scheme) as (page, asked):
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / f"{name}_{width}_{scheme}.png", full_page=True)
        assert faults(page, asked) == []
        painted = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert painted == (DARK if scheme == "dark" else WHITE)
        shown = page.evaluate(
            "[...document.querySelectorAll('figure svg')].map((one) => one.clientWidth)"
        )
        assert all(picture > 300 for picture in shown), "plots are legible"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_on_paper_which_is_white_in_dark_windows_too(
    browser: Any, file_of: Callable[[str], Path], name: str
):
    with opened(browser, file_of(name), PAPER, "dark", printed=True) as (page, asked):
        assert faults(page, asked, printed=True) == []
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == WHITE


@pytest.mark.parametrize(("found", "added"), tiered(CONTROLS, [CONTROLS[0]]))
def test_the_checks_of_a_page_find_its_faults(
    browser: Any, file_of: Callable[[str], Path], tmp_path: Path, found: str, added: str
):
    """Control: the same page with one fault."""
    content = file_of("evaluation").read_text(encoding="utf-8")
    spoilt = tmp_path / "spoilt.html"
    spoilt.write_text(content.replace("</main>", f"{added}</main>"), encoding="utf-8")
    with opened(browser, spoilt, DESK, "light") as (page, asked):
        wrong = faults(page, asked)
    assert wrong and all(found in one for one in wrong if "the page is" not in one)
