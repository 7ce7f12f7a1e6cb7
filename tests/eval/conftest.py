"""Fixtures: a target, its drafter and prompts on disk; SIMULATED runs, records and rows."""

import pytest
import torch

from eval.compare import run
from eval.report.page import evaluation_page
from eval.statistics.rows import build_rows
from tests.support import simulated_records as simulated
from tests.support import simulated_runs
from tests.support import tiny_folders as tiny
from tests.support.simulated_comparisons import DEEP, SHALLOW, SLOW, configured


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval_run")
    tiny.save(folder / "target", layers=3)
    tiny.save(folder / "shallow", layers=1)
    tiny.prompts(folder / "prompts.jsonl", count=5)
    return folder


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _without_plots(request):
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("undrawn")


@pytest.fixture
def drawn():
    """Draw plots in this test; others have those of `html` and `compared` alone."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write SIMULATED runs of three depths, one evaluation for each, and return their folder."""
    home = tmp_path_factory.mktemp("simulated")
    for number, (label, drafters) in enumerate({"one": SHALLOW, "four": DEEP, "six": SLOW}.items()):
        simulated_runs.write(
            home / label / "eval.run", drafters, seed=number, tokens_seen=(number + 1) * 1_000_000
        )
    return home


@pytest.fixture(scope="module")
def compared(runs):
    return run(configured(runs, "compared", [f"{runs}/*/eval.run"]))


@pytest.fixture(scope="session")
def records():
    return simulated.run()


@pytest.fixture(scope="session")
def rows(records):
    facts = {name: fact for name, (_, fact, _) in simulated.DRAFTERS.items()}
    return build_rows(simulated.run_facts(), facts, simulated.slices(), records)


@pytest.fixture(scope="session")
def html(rows, records):
    return evaluation_page(rows, records, simulated.PROVENANCE)
