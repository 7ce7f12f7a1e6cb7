"""Fixtures of the tests of recurrent heads."""

from pathlib import Path

import pytest

from recurrent_drafting.train import run
from tests.support.head_runs import configured


@pytest.fixture(scope="session")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(configured(tiny_target, folder))
    return folder
