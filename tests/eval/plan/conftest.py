"""A target, and a plan for it without pictures."""

from pathlib import Path

import pytest

from eval.plan.job import run
from eval.report.plots import Plot
from tests.support import tiny_folders as tiny
from tests.support.plans import config


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no pictures, which take most of the time."""
    monkeypatch.setattr(Plot, "svg", "")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target, and a plan for it in `planned`."""
    folder = tmp_path_factory.mktemp("plan")
    tiny.save(folder / "target")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Plot, "svg", "")
        run(config(folder, "planned"))
    return folder
